"""Where keys and values of a session lie, for its report, and warnings where that makes a method slow."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.step import PassCache
from longreach.cache import MemoryUse
from longreach.cache.host import gib
from longreach.methods.base import AttentionMethod

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session


class MemoryNotes:
    """use: the memory of the last pass over a cache with layers in host memory, else None."""

    def __init__(self, session: Session):
        self._session = session
        self.use: MemoryUse | None = None
        self._warned: set[AttentionMethod] = set()  # of reading host memory whole
        self._idle: set[AttentionMethod] = set()  # for which the CPU, asked to attend, had nothing to do

    def note(self, cache: PassCache, *, decoding: bool) -> None:
        """Note where keys and values lie, for the report. Warns once if the decode method reads host layers whole."""
        if not cache.kv.config.host:
            return
        session, use, before = self._session, cache.kv.memory_use, self.use
        if not decoding and before is not None:  # a prompt is read as ever: the report keeps the last step's choice
            use = replace(use, attend=before.attend)
        self.use = use
        if not decoding:
            return
        method, shape = session.decode, session.facts.shape
        missing = method.reads_whole_on_miss
        whole = range(shape.layers) if missing else method.whole_layers(shape, session.model.dtype)
        slow = set(whole).intersection(use.host_layers).difference(session.facts.cache_windows)
        if slow and method not in self._warned:
            self._warned.add(method)
            warnings.warn(
                f"{method.name} reads {len(slow)} layers whole at each step"
                f"{' in which it finds nothing to reuse' if missing else ''}, and their keys and values lie in host "
                f"memory: up to {gib(use.host_bytes * len(slow) // len(use.host_layers))} over the link for each new "
                f"token. Raise CacheConfig(device_bytes=...) (--device-memory), or decode with a method that reads "
                f"fewer keys",
                stacklevel=3,
            )

    def note_calls(self, cache: LongreachCache) -> None:
        """After an answer, note the memory that attention on the CPU took. Warns once if it was asked for in vain."""
        kv, session = cache.kv, self._session
        if self.use is None or kv.attend.by != "cpu" or not kv.in_host:
            return
        self.use = replace(self.use, calls_bytes=kv.calls.nbytes)
        idle = not session.ledger.computed_by("cpu", kv.in_host)
        if idle and kv.config.host_attend == "cpu" and session.decode not in self._idle:
            self._idle.add(session.decode)
            warnings.warn(
                f"host_attend='cpu' (--host-attend) has no effect: {session.decode.name} reads keys in host memory by "
                f"ops that the CPU does not compute, so the GPU reads them over the link",
                stacklevel=3,
            )
