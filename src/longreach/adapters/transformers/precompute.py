"""Keys before rotation and values of chunks, each computed alone or behind a shared prefix, for the chunk store.

A key is what its layer makes of a hidden state, biases and norms (q/k norm) included, before the rotary embedding;
the layer's own code makes it, asked once more with a rotation of nothing, so it is exact to the bit. That costs a
second projection to queries, keys and values, and no accuracy; unrotating the cache's keys would round them again.
Layers that do not rotate (SmolLM3, Command R7B) store the keys they attend to. What a chunk attends to is itself and
the prefix, at positions from 0: sliding windows, sinks and soft caps are the model's. A model that rotates long prompts
by other frequencies (longrope) attends within a chunk by those of short ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.checks import check_model, decoder_of
from longreach.adapters.transformers.fingerprint import Fingerprint, fingerprint
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.prompt_reader import CHUNK, Advance
from longreach.adapters.transformers.prompt_tokens import check_tokens, context_limit, short_context
from longreach.adapters.transformers.ranks import Ranks, in_pass, ranks_of, together
from longreach.adapters.transformers.rotary import (
    Rotation,
    attention_modules,
    captured,
    find_rotation,
    probing,
)
from longreach.errors import InvalidInput, OutOfMemory, Unsupported
from longreach.methods.base import is_count
from longreach.ops import HeadShard, rotate
from longreach.store.key import Chunk, ChunkKey, as_ids

NOTHING = torch.zeros(0, dtype=torch.int64)
CHANGED = (
    "the model's weights or configuration are not those its fingerprint was taken of, or have changed since; take a "
    "new one"
)


class Precompute:
    """Computes chunks on an attached model with dense prefill. The prefix is read once and kept in a cache.

    prefix: int64 [P], tokens before every chunk, special ones included; what they are is part of every key, their own
        keys and values are not stored. chunk: tokens per pass; keys and values go to the host after each, so that
        device memory holds one pass of hidden states and the cache of one chunk.
    known: the model's fingerprint, where it was taken already; refused where it is another's.

    Chunks are computed one by one: a pass of 512 tokens fills a GPU, and what a chunk holds depends on no neighbour.

    Under tensor parallelism every rank must make the same calls. Each gets chunks of all KV heads, which the ranks
    gather in each pass. An error on one rank makes all raise, but for one inside a pass (see `ranks.py`) and while the
    fingerprint is taken.

    Raises InvalidInput (a model in training mode among others), Unsupported (weights that changed since their
    fingerprint was taken; a model with positions in its keys other than by rotation).
    """

    def __init__(
        self,
        session: Session,
        prefix: Sequence[int] | Tensor = (),
        *,
        chunk: int = CHUNK,
        known: Fingerprint | None = None,
    ):
        if not is_count(chunk, 1):
            raise InvalidInput(f"prefill chunk: expected a count of tokens >= 1, got {chunk!r}")
        if known is not None and not isinstance(known, Fingerprint):
            raise InvalidInput(
                f"known: expected a Fingerprint or None, got {known!r}; take one with fingerprint(model)"
            )
        if session.prefill.name != "dense":
            raise InvalidInput(
                f"stored chunks are those of dense attention, and this session prefills with {session.prefill.name}; "
                f"attach with prefill=None"
            )
        self.session, self.pass_tokens = session, chunk
        self._decoder = decoder_of(session.model)
        check_model(session.model, self._decoder, rotary=True)
        self.prefix = as_ids(prefix)
        self._check_tokens(self.prefix, "prefix")
        self._require_eval()
        self.ranks: Ranks | None = ranks_of(self._decoder)
        self.fingerprint = known or fingerprint(session.model)
        self._require_same()
        self._cache, self._read = session.new_cache(1), NOTHING  # the tokens that are in the cache
        self._attending = attention_modules(self._decoder)
        self._checked = set[int]()

    def key(self, tokens: Sequence[int] | Tensor, behind: Sequence[int] | Tensor = ()) -> ChunkKey:
        """What a chunk behind the prefix and `behind` is stored under. Raises InvalidInput (training mode; what can be
        no tokens), Unsupported where the weights are not those of the fingerprint."""
        return self.keys(tokens, [behind])[0]

    def keys(self, tokens: Sequence[int] | Tensor, places: Sequence[Sequence[int] | Tensor]) -> list[ChunkKey]:
        """Like key, behind each of several: the model is checked once, which takes milliseconds."""
        self.require_model()
        model, dtype = self.fingerprint.digest, self.session.model.dtype
        return [ChunkKey.of(model, dtype, self._before(behind), tokens) for behind in places]

    def require_model(self) -> None:
        """Raise InvalidInput for a model in training mode, Unsupported for one that is not that of the fingerprint."""
        self.session.check_open()
        self._require_eval()
        self._require_same()

    def require_weights(self) -> None:
        """As require_model; a sample of each weight's bytes is compared too, which takes one transfer to the host."""
        self.require_model()
        self._require_sample()

    def check(self, tokens: Sequence[int] | Tensor, behind: Sequence[int] | Tensor = ()) -> None:
        """Raise InvalidInput for a chunk that this model cannot compute, before any is."""
        self._check(as_ids(tokens), self._before(behind))

    def _before(self, behind: Sequence[int] | Tensor) -> Tensor:
        return torch.cat([self.prefix, as_ids(behind)])

    def _check(self, tokens: Tensor, before: Tensor) -> None:
        self._require_eval()
        if not len(tokens):
            raise InvalidInput("a chunk holds no tokens; leave it out")
        self._check_tokens(before, "prefix")
        self._check_tokens(tokens, "chunk")
        room = self.room(len(tokens) + len(before))
        if room is None or room >= 0:
            return
        what = f"a chunk of {len(tokens)} tokens behind a prefix of {len(before)}"
        short = short_context(self.session.model)
        if short is not None:
            raise InvalidInput(
                f"{what} goes beyond token {short}, where this model's rotation changes (longrope); cut it into "
                f"smaller ones (--chunk-tokens)"
            )
        longer = f"{what} is longer than the model's context of {context_limit(self.session.model)} tokens"
        if len(tokens) + room <= 0:  # not one token has room
            raise InvalidInput(f"{longer}; shorten the system prompt, or what else stands before the chunk")
        raise InvalidInput(f"{longer}; cut it into smaller ones (--chunk-tokens)")

    def room(self, taken: int) -> int | None:
        """Tokens that may be computed together in addition to `taken`; None for no limit."""
        limits = [n for n in (context_limit(self.session.model), short_context(self.session.model)) if n is not None]
        return min(limits) - taken if limits else None

    def compute(
        self,
        tokens: Sequence[int] | Tensor,
        progress: Advance = lambda done: None,
        behind: Sequence[int] | Tensor = (),
    ) -> Chunk:
        """The chunk of these tokens, behind the prefix and `behind`. progress: called with the tokens that each pass
        read. Of the tokens before it, only those that differ from the last computed chunk's are read again.

        Raises OutOfMemory, Unsupported (keys or values that are no finite numbers; weights changed meanwhile). Whatever
        it raises, the prefix is forgotten, and read again with the next chunk: it may be of weights that are refused.
        """
        ids, before = as_ids(tokens), self._before(behind)
        self._check(ids, before)
        try:
            with together(self.ranks):
                return self._compute(ids, before, progress)
        except BaseException:
            self._cache, self._read = self.session.new_cache(1), NOTHING
            raise

    def _compute(self, tokens: Tensor, before: Tensor, progress: Advance) -> Chunk:
        self._require_same()
        found = _ChunkBuffer(len(tokens))
        with memory_errors(), self.session.prompt_end(len(before) + len(tokens)) as phases:
            phases.room = len(before) + len(tokens)
            self._read_before(before)
            try:
                with self._noting(found):
                    for first in range(0, len(tokens), self.pass_tokens):
                        found.first = first
                        self._forward(tokens[first : first + self.pass_tokens])
                        found.to_host()
                        progress(min(self.pass_tokens, len(tokens) - first))
            except OutOfMemory as error:
                raise OutOfMemory(
                    f"memory ran out while a chunk of {len(tokens)} tokens was computed, {self.pass_tokens} at a "
                    f"time; lower the prefill chunk size (--prefill-chunk-size) or the chunk (--chunk-tokens)"
                ) from error
            self._read = torch.cat([before, tokens])
        keys, values = found.layers(len(self._attending))
        self._require_sample()  # after the passes, to find changes made meanwhile
        key = ChunkKey.of(self.fingerprint.digest, self.session.model.dtype, before, tokens)
        return Chunk(key, before, tokens, keys, values)

    def _require_same(self) -> None:
        self._require(self.fingerprint.holds(self.session.model))

    def _require_sample(self) -> None:
        self._require(self.fingerprint.sampled_alike(self.session.model))

    def _require(self, same: bool) -> None:
        """Raise Unsupported on all ranks if one's weights changed: the others would wait for it in the next pass."""
        if not (same if self.ranks is None else all(self.ranks.all_values(same))):
            raise Unsupported(CHANGED)

    def _require_eval(self) -> None:
        """With dropout a chunk would be another one each time, under the same key."""
        if any(module.training for module in (self.session.model, *self._decoder.modules())):
            raise InvalidInput("the model is in training mode, in which chunks hold noise (dropout); call model.eval()")

    def _check_tokens(self, tokens: Tensor, what: str) -> None:
        check_tokens(self.session.model, tokens, what)

    def _read_before(self, before: Tensor) -> None:
        """Bring the cache to hold exactly these tokens."""
        common = _common(self._read, before)
        if self.ranks is not None:  # one may have failed when the others had read more
            common = min(self.ranks.all_values(common))
        self._cache.drop_columns(self._cache.columns - common)
        if self._cache.columns == len(before):
            return
        for first in range(self._cache.columns, len(before), self.pass_tokens):
            self._forward(before[first : first + self.pass_tokens])
        self._require_sample()  # before it is kept for other chunks

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> None:
        """A pass of the decoder alone, without logits."""
        ids = tokens[None].to(self.session.model.device)
        with in_pass(self.ranks):
            self._decoder(input_ids=ids, past_key_values=self._cache, use_cache=True)

    def _all_heads(self, shard: HeadShard, x: Tensor) -> Tensor:
        """[G, T, D] of this rank's KV heads -> of all."""
        return x if self.ranks is None or shard.count == shard.total else self.ranks.gathered(x)

    @contextmanager
    def _noting(self, found: _ChunkBuffer) -> Iterator[None]:
        """Within this block every layer's keys and values are noted as it is about to attend."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if probing():
                return
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            pair = kwargs.get("position_embeddings")
            if not (isinstance(pair, tuple) and len(pair) == 2):
                raise Unsupported(f"{type(module).__name__} (layer {layer}) gets no pair (cos, sin) to rotate by")
            cos, sin = pair
            plain = captured(module, args, kwargs, torch.ones_like(cos), torch.zeros_like(sin))
            if layer not in self._checked:
                _check_rotation(module, args, kwargs, plain.key)
                self._checked.add(layer)
            shard = self.session.facts.shard(layer, module, plain.key.shape[1])
            found.add(layer, *(self._all_heads(shard, x[0]) for x in (plain.key, plain.value)))

        hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in self._attending]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _common(one: Tensor, other: Tensor) -> int:
    """Number of tokens in the common prefix of two sequences."""
    both = min(len(one), len(other))
    differ = (one[:both] != other[:both]).nonzero()
    return int(differ[0]) if len(differ) else both


class _ChunkBuffer:
    """Keys and values of a chunk of `length` tokens, layer by layer, filled pass by pass from token `first`."""

    def __init__(self, length: int):
        self.length, self.first = length, 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.passing: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key, value [G, T, D] of the pass's tokens; they stay on the device until it is through."""
        self.passing[layer] = key, value

    def to_host(self) -> None:
        """The pass is through."""
        for layer, pair in self.passing.items():
            if layer not in self.kept:
                shapes = ((x.shape[0], self.length, x.shape[2]) for x in pair)
                self.kept[layer] = tuple(  # type: ignore[assignment]
                    torch.empty(shape, dtype=x.dtype) for shape, x in zip(shapes, pair, strict=True)
                )
            for whole, part in zip(self.kept[layer], pair, strict=True):
                whole[:, self.first : self.first + part.shape[1]].copy_(part)
        self.passing.clear()

    def layers(self, count: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(keys, values), a tensor [G, N, D] a layer."""
        if sorted(self.kept) != list(range(count)):
            raise Unsupported(f"keys were seen in layers {sorted(self.kept)}; expected all of {count}")
        keys, values = (tuple(self.kept[layer][i] for layer in range(count)) for i in (0, 1))
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            if not all(bool(torch.isfinite(x).all()) for x in pair):
                raise Unsupported(
                    f"layer {layer} makes keys or values of {keys[layer].dtype} that are no finite numbers, which are "
                    f"not stored; load the model in another dtype (--dtype bfloat16)"
                )
        return keys, values


def _check_rotation(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: Tensor) -> None:
    """Raise Unsupported unless the layer's own key is this one, rotated or as it is: else it is no key to reuse."""
    cos, sin = kwargs["position_embeddings"]
    own = captured(module, args, kwargs, cos, sin).key
    rotation = find_rotation(module, args, kwargs)
    if isinstance(rotation, Rotation):
        turned = rotate(key, rotation.pairs(cos)[:, None], rotation.pairs(sin)[:, None], layout=rotation.layout)
    elif "does not rotate" in rotation:
        turned = key
    else:
        raise Unsupported(f"chunks need keys before rotation: {rotation}")
    # cos, sin, two products and a sum round; a position that enters otherwise shows at a size of its own
    if not (own.float() - turned.float()).norm() <= 4 * torch.finfo(own.dtype).eps * turned.float().norm():
        raise Unsupported(
            f"{type(module).__name__} (layer {module.layer_idx}) makes keys that depend on their position otherwise "
            f"than by rotation, so that they cannot be reused elsewhere"
        )
