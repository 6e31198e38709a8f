"""How a layer calls an op: the arguments it fills in, the implementation, and the bytes that the op reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from longreach.errors import UnknownName
from longreach.ops.impl import Implementations
from longreach.ops.selection import Selection, Spans
from longreach.ops.types import KVView, Rows

EVERYTHING = Spans.dense()

OPS = {
    "attend_amend": "longreach.ops.attend:AMEND",
    "attend_from_logits": "longreach.ops.attend:FROM_LOGITS",
    "attend_blocks": "longreach.ops.mix:ATTEND_BLOCKS",
    "attend_summaries": "longreach.ops.recall:ATTEND_SUMMARIES",
    "attend_with_logits": "longreach.ops.attend:WITH_LOGITS",
    "bound_and_score": "longreach.ops.block_bounds:BOUND_AND_SCORE",
    "code_completed": "longreach.ops.recall:CODE_COMPLETED",
    "code_rows": "longreach.ops.recall:CODE_ROWS",
    "draw": "longreach.ops.sample:DRAW",
    "largest_log_prob": "longreach.ops.across_heads:LARGEST_LOG_PROB",
    "match": "longreach.ops.match:MATCH",
    "pack_lists": "longreach.ops.top_k:PACK",
    "pooled_scores": "longreach.ops.pooled_scores:POOLED_SCORES",
    "project": "longreach.ops.project:PROJECT",
    "rank_round_robin": "longreach.ops.across_heads:RANK_ROUND_ROBIN",
    "recall": "longreach.ops.recall:RECALL",
    "recall_and_attend": "longreach.ops.recall:RECALL_AND_ATTEND",
    "sample": "longreach.ops.sample:SAMPLE",
    "sampling_variance": "longreach.ops.variance:SAMPLING_VARIANCE",
    "score_and_pool": "longreach.ops.attend:SCORE_AND_POOL",
    "score_keys": "longreach.ops.attend:SCORE_KEYS",
    "simhash_attend": "longreach.ops.simhash:ATTEND_SAMPLED",
    "simhash_build": "longreach.ops.simhash:BUILD",
    "simhash_codes": "longreach.ops.simhash:CODES",
    "simhash_collide": "longreach.ops.simhash:COLLIDE",
    "simhash_seal": "longreach.ops.simhash:SEAL",
    "simhash_weigh": "longreach.ops.simhash:WEIGH",
    "spread_logits": "longreach.ops.across_heads:SPREAD_LOGITS",
    "tile_log_sums": "longreach.ops.tile_scores:TILE_LOG_SUMS",
    "tile_scores": "longreach.ops.tile_scores:TILE_SCORES",
    "top_k": "longreach.ops.top_k:TOP_K",
}


class Later(NamedTuple):
    """Bytes of each row that are computed at the end of a pass, for all of its layers in the same kernels.

    of(*numbers [L, ...], *shared) -> int [L, R]. numbers: the layer's own, which nobody changes until then. shared:
    tensors of the pass. Layers with the same function (`is`) and the same shared tensors are computed together.
    """

    of: Callable[..., Tensor]
    numbers: tuple[Tensor, ...]
    shared: tuple[Tensor, ...] = ()

    def now(self) -> Tensor:
        """int [R]."""
        return self.of(*(x[None] for x in self.numbers), *self.shared)[0]


class Read(NamedTuple):
    """One pass over memory.

    selection: the slots read, None for memory that no selection names. key_bytes, value_bytes, metadata_bytes: bytes
    read of each slot in each KV head. counted: int [R, G], the slots that each KV head streams, if a kernel has
    counted them; it must equal the selection's own count. A number (int): the slots of all rows and KV heads together,
    if the host has them; such a read is counted without the device. other: further bytes of metadata, of each row, [R]
    or [R, ...] to be summed over a row, or of all rows together (int), or of each row but `Later`. overflowed: int
    [R, ...], lists that were too long, if the selection does not show them.
    """

    selection: Selection | None = None
    key_bytes: int = 0
    value_bytes: int = 0
    metadata_bytes: int = 0
    counted: Tensor | int | None = None
    other: int | Tensor | Later = 0
    overflowed: Tensor | None = None

    @classmethod
    def of(
        cls,
        kv: KVView,
        selection: Selection,
        *,
        keys: bool = True,
        values: bool = True,
        counted: Tensor | int | None = None,
    ) -> Read:
        """Keys or values of a view, or both in one pass. Values that lie in the keys are read with them."""
        vector = kv.k.shape[3] * kv.k.element_size()
        values = values and not (keys and kv.values_in_keys)
        return cls(selection, vector * keys, vector * values, counted=counted)


def nothing(rows: Rows, kv: KVView, result: Any, *args: Any, **given: Any) -> tuple[Read, ...]:
    """The reads of an op that consumes only outputs of other ops in the same call."""
    return ()


@dataclass(frozen=True)
class Op:
    """An op as layers call it.

    run: its front door. implementations: who computes it. layer: names of the arguments that the layer gives, of rows,
    kv, slots, rotary (positional, in this order) and scale, softcap, sink_logit (by keyword).
    reads(rows, kv, result, *args, **given): the passes over memory that the call made.
    """

    run: Callable[..., Any]
    implementations: Implementations
    layer: tuple[str, ...] = ("rows", "kv")
    reads: Callable[..., tuple[Read, ...]] = nothing


def op_named(name: str) -> Op:
    """The op registered as `name`. Raises UnknownName with the known ones."""
    if name not in OPS:
        raise UnknownName("op", name, OPS)
    module, _, attribute = OPS[name].partition(":")
    return getattr(import_module(module), attribute)
