"""The caches of a session: empty ones, those that it keeps, and those of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from longreach.adapters.transformers.automatic_plans import PlanSession
from longreach.adapters.transformers.checks import check_host, check_host_attend, text_config
from longreach.adapters.transformers.fingerprint import Fingerprint, fingerprint
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.saved_cache import load, save
from longreach.adapters.transformers.step import ModelFacts
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape
from longreach.methods.slots import Eviction, Fusion
from longreach.runtime import Ledger

ROUND = 256  # tokens to which `static_cache` rounds a cache's size up, so that similar prompts share a captured step


class SessionCaches:
    """The part of a Session that makes caches. Its attributes are the session's, which sets all of them."""

    model: PreTrainedModel
    prefill: AttentionMethod
    decode: AttentionMethod
    fuse: Fusion | None
    evict: Eviction | None
    observers: tuple[AttentionMethod, ...]
    cache_config: CacheConfig
    impl: str
    ledger: Ledger
    facts: ModelFacts
    static_caches: dict[int, LongreachCache]
    _shape: ModelShape
    _layers: int
    _plans: PlanSession
    _decodes: tuple[AttentionMethod, ...]
    _fingerprint: Fingerprint | None = None

    _undo: list[Callable[[], Any]]

    def check_open(self) -> None:
        """Raise InvalidInput if the session was closed."""
        if not self._undo:
            raise InvalidInput("the session is closed; attach to the model again")

    def load_cache(self, path: str | os.PathLike[str], config: CacheConfig | None = None) -> LongreachCache:
        """The cache that `LongreachCache.save` wrote, to go on from. config: default the session's.

        Hashes the model's weights, once. State of methods is made again from the keys at the next pass; only MAC's
        ring comes from the file. `saved_tokens` of the result holds the tokens, if they were saved.
        Raises InvalidInput for a file that is missing, cut short, damaged, or saved with another model, other weights,
        methods, plans or pages; CapacityError; Unsupported, and OutOfMemory.
        """
        self.check_open()
        return load(self, path, config)

    def save_cache(
        self, cache: LongreachCache, path: str | os.PathLike[str], tokens: Any = None, overwrite: bool = False
    ) -> None:
        """As `LongreachCache.save`."""
        self.check_open()
        save(self, cache, path, tokens, overwrite)

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the model as it is now; weights are hashed again only if they may have changed."""
        known = self._fingerprint
        if known is None or not known.holds(self.model) or not known.sampled_alike(self.model):
            known = self._fingerprint = fingerprint(self.model, chunks=False)
        return known

    def new_cache(self, batch: int = 1, config: CacheConfig | None = None) -> LongreachCache:
        """An empty cache for `batch` sequences, to pass as `past_key_values`. config: default the session's."""
        kept = config or self.cache_config
        check_host(kept, self.evict, self._shape)
        check_host_attend(kept, self.model.device, self.impl)
        resident = self.resident_layers() if kept.host else ()
        theirs = DynamicCache(config=text_config(self.model)).layers if self.facts.hybrid else None
        return LongreachCache(self._layers, batch, kept, self.model.device, self, self.evict, resident, theirs)

    def static_cache(self, batch: int, columns: int) -> LongreachCache:
        """An empty cache that the session keeps for this batch, with room for the columns."""
        kept, config = self.static_caches.get(batch), self.cache_config
        room = config.capacity or -(-columns // ROUND) * ROUND
        placed = kept is not None and (not config.host or kept.resident == self.resident_layers())
        if kept is not None and placed and (kept.kv.config.capacity or 0) >= room:
            kept.empty()
            return kept
        self.static_caches.pop(batch, None)
        kept = None  # its memory goes before more is taken
        fresh = self.new_cache(batch, replace(config, capacity=room))
        self.static_caches[batch] = fresh
        return fresh

    def resident_layers(self) -> frozenset[int]:
        """Layers that stay in GPU memory first, with `CacheConfig(host=True)`: those with a sliding window, and those
        that a decode method of the session reads whole. Methods that read all layers whole name none."""
        whole = (frozenset(method.whole_layers(self._shape, self.model.dtype)) for method in self._decodes)
        return frozenset(self.facts.cache_windows).union(*(some for some in whole if len(some) < self._layers))
