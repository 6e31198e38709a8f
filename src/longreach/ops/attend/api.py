"""The front door of attend: checks what every implementation relies on, then hands over to one."""

from __future__ import annotations

import math

from torch import Tensor

from longreach.ops.impl import Implementations
from longreach.ops.selection import Selection
from longreach.ops.types import KVView, Partial, Rows, describe, require

implementations = Implementations("attend", {"reference": "longreach.ops.attend.reference:attend"})


def check_logits(scale: float, softcap: float | None, sink_logit: Tensor | None, rows: Rows) -> None:
    """Raise InvalidInput where what shapes the logits is not usable with `rows`."""
    require(isinstance(scale, (int, float)) and math.isfinite(scale), f"scale: expected a finite number, got {scale!r}")
    ok = softcap is None or (isinstance(softcap, (int, float)) and 0 < softcap < math.inf)
    require(ok, f"softcap: expected None or a number > 0, got {softcap!r}")
    if sink_logit is not None:
        heads = rows.q.shape[1]
        ok = isinstance(sink_logit, Tensor) and sink_logit.shape == (heads,) and sink_logit.is_floating_point()
        ok = ok and sink_logit.device == rows.q.device
        require(ok, f"sink_logit: expected float [H={heads}] on {rows.q.device}, got {describe(sink_logit)}")


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

    rows: q [R, H, D]; kv: k, v [P, G, page, D] of the same dtype and device, H a multiple (1 to 16) of G.
    sink_logit: float [H], an extra logit per head that takes probability and gives no value, i.e. a merge
        with Partial(out=0, lse=sink_logit).
    impl: "auto" or one of `implementations.names()`.

    Returns Partial (out [R, H, D], lse [R, H], fp32); over no keys out is 0 and lse -inf.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, SelectionError for slots out of range
    or named twice (where reading them costs no device sync), UnknownName for an unknown impl.
    """
    compute = implementations.get(impl, rows.q.device)
    kv.group(rows)
    selection.check(rows, kv)
    check_logits(scale, softcap, sink_logit, rows)
    sequences = kv.sequences
    if rows.q.device.type == "cpu" and rows.seq.numel():
        low, high = int(rows.seq.min()), int(rows.seq.max())
        require(low >= 0 and high < sequences, f"seq: expected values in [0, {sequences}), got {low} to {high}")
        deepest = int(kv.filled.max())
        require(deepest <= kv.capacity, f"filled: {deepest} exceeds the {kv.capacity} slots a sequence can address")
    return compute(rows, kv, selection, scale=scale, softcap=softcap, sink_logit=sink_logit)
