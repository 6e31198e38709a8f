"""The front door of attend: checks what every implementation relies on, then hands over to one."""

from __future__ import annotations

from torch import Tensor

from longreach.ops.checks import check_logits, check_memory
from longreach.ops.impl import Implementations
from longreach.ops.selection import Selection
from longreach.ops.types import KVView, Partial, Rows, describe, require

implementations = Implementations(
    "attend",
    {"reference": "longreach.ops.attend.reference:attend", "triton": "longreach.ops.attend.triton:attend"},
)


def attend(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
) -> Partial:
    """Attention of each row over its selected keys.

    logit = softcap(scale * q.k) + log_weight, softcap(x) = c tanh(x / c); out = sum softmax(logit) v;
    lse = log sum exp(logit). A row sees only filled slots whose position does not exceed its own.
    Slots that no row of the call selects are never read; those that one selects must hold numbers for all.

    rows: q [R, H, D]; kv: k, v [P, G, page, D] of the same dtype and device, H a multiple (1 to 16) of G.
    sink_logit: float [H], an extra logit per head that takes probability and gives no value, i.e. a merge
        with Partial(out=0, lse=sink_logit).
    impl: "auto" or one of `implementations.names()`.

    Returns Partial (out [R, H, D], lse [R, H], fp32); over no keys out is 0 and lse -inf.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, SelectionError for slots out of range
    or named twice (where reading them costs no device sync), UnknownName for an unknown impl.
    """
    check_memory(rows, kv)
    require(isinstance(selection, Selection), f"selection: expected a Selection, got {describe(selection)}")
    selection.check(rows, kv)
    check_logits(scale, softcap, rows, sink_logit)
    compute = implementations.get(impl, rows.q.device)
    return compute(rows, kv, selection, scale=scale, softcap=softcap, sink_logit=sink_logit)
