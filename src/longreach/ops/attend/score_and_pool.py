"""score_and_pool: scores of all keys, summed over the query heads of a KV head, from one pass over the keys."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.checks import check_logits, check_memory
from longreach.ops.doors import EVERYTHING, Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.types import KVView, Rows

IMPLEMENTATIONS = Implementations(
    "score_and_pool",
    {
        "reference": "longreach.ops.attend.score_and_pool_reference:score_and_pool",
        "triton": "longreach.ops.attend.triton_score_and_pool:score_and_pool",
        "numba": "longreach.ops.attend.numba_two_pass:score_and_pool",
    },
    few_rows=True,
)


def score_and_pool(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Post-softmax scores of all keys visible to each row, summed over the query heads of each KV head.

    `score_keys`, then `pooled_scores` with the lse and logits it gives, in two kernels on a GPU instead of three: the
    second one computes the lse that it needs itself. Values are never read.

    Returns fp32 [R, G, N], N = kv.capacity (fp64 for fp64 inputs); what lies past the slots that a row reaches may be
    anything, the reference leaves NaN there. Arguments and errors are as in `attend`.
    """
    check_memory(rows, kv)
    check_logits(scale, softcap, rows, sink_logit)
    compute = IMPLEMENTATIONS.get(impl, rows.q.device, rows, kv, sink_logit)
    scores: Tensor = compute(rows, kv, scale=scale, softcap=softcap, sink_logit=sink_logit)
    return scores


def _reads(rows: Rows, kv: KVView, result: Tensor) -> tuple[Read, ...]:
    return (Read.of(kv, EVERYTHING, values=False),)


SCORE_AND_POOL = Op(score_and_pool, IMPLEMENTATIONS, ("rows", "kv", "scale", "softcap", "sink_logit"), _reads)
