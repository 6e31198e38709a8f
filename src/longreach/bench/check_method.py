"""Whether a method's step is right: attention of every layer against fp64 over the keys that the method chose.

What a method leaves out is its own affair and no fault of a step. So one step is run as it is, uncaptured, and each
layer's output is compared with the textbook formula over exactly those keys; then the logits of captured steps, of one
whose parts are not compiled and of the one that is timed, are compared with that step's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.bench.check import WrongResult, bound
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.ops import Rows, Selection
from longreach.ops.types import require

UNSTEADY = ("loki", "magicpig")  # rounding changes what they choose: by random directions, by signs of projections
KeysOf = Callable[[LayerCall], tuple[Selection, ...]]


@dataclass(frozen=True)
class MethodVerdict:
    """layers: how many were compared. error: the largest relative error (norms) of a head's output, at most
    error_bound. of_captured: relative difference of the timed step's logits from the uncaptured step's, at most
    of_captured_bound; None where that is not judged. of_uncompiled: that of a step captured without compiled parts, at
    most of_uncompiled_bound; None where steps are not captured.
    """

    layers: int
    error: float
    error_bound: float
    of_captured: float
    of_captured_bound: float | None
    of_uncompiled: float | None
    of_uncompiled_bound: float

    def recorded(self) -> dict[str, Any]:
        return asdict(self)


def attended(call: LayerCall) -> tuple[Selection, ...]:
    """The keys with values in a layer's output, as the call has counted them: their union."""
    return call.meter.values


class LayerErrors:
    """A layer hook of a session (`Session.on_layer`) that compares attention with fp64. worst: layer -> its error.

    attended: the keys with values in a layer's output, with their log-weights.
    """

    def __init__(self, attended: KeysOf = attended) -> None:
        self.attended = attended
        self.worst: dict[int, float] = {}
        self.bound = 0.0

    def __call__(self, phase: str, call: LayerCall, outcome: Outcome) -> None:
        self.bound = max(self.bound, bound(call.rows.q.dtype))
        self.worst[call.layer] = layer_error(call, outcome.partial.out, self.attended(call))


@torch.no_grad()
def layer_error(call: LayerCall, out: Tensor, selections: tuple[Selection, ...]) -> float:
    """The largest relative error (norms) of the sampled rows' query heads; NaN where any output is not finite.

    out: [R, H, D], one row a sequence. Compared are the first and the last row, each with its first and last KV heads.
    A key that several selections name counts once, with its largest log-weight.
    """
    kv, group = call.kv, call.kv.group(call.rows)
    require(
        call.softcap is None and call.sink_logit is None, "the check supports neither soft caps nor sinks; add them"
    )
    if not bool(torch.isfinite(out).all()):
        return float("nan")
    worst = 0.0
    for row in sorted({0, len(out) - 1}):
        index = torch.tensor([row], device=out.device)
        rows = call.rows.take(index)
        stop = int(rows.pos[0]) + 1
        slots = torch.arange(stop, device=out.device)
        weights = [_log_weights(selection.take(index), call, rows, stop) for selection in selections]
        weight = torch.stack(weights).amax(0)
        page, offset = kv.locate(rows.seq.long().expand_as(slots), slots)
        for head in sorted({0, kv.heads - 1}):
            mine = slice(head * group, (head + 1) * group)
            logits = rows.q[0, mine].double() @ kv.k[page, head, offset].double().T * call.scale
            want = (logits + weight[mine]).softmax(-1) @ kv.v[page, head, offset].double()
            off = (out[row, mine].double() - want).norm(dim=-1) / want.norm(dim=-1)
            worst = max(worst, float(off.max()))
    return worst


def _log_weights(selection: Selection, call: LayerCall, rows: Rows, stop: int) -> Tensor:
    """fp64 [H, stop]: log-weights of the slots that a row's query heads attend to, -inf for the other slots."""
    heads = call.rows.q.shape[1]
    mask, (_, weight) = selection.mask(rows, call.kv, stop)[0], selection.chosen(rows, call.kv, stop)
    found = mask.new_zeros((), dtype=torch.float64) if weight is None else weight[0].double()
    found = torch.where(mask, found, -torch.inf)
    return found.expand(heads, -1) if len(found) == 1 else found.repeat_interleave(heads // len(found), 0)


def judge_method(
    name: str, layers: LayerErrors, eager: Tensor, captured: Tensor, most: float, expected: int, *, steady: bool = True,
    uncompiled: Tensor | None = None,
) -> MethodVerdict:  # fmt: skip
    """Raises WrongResult where a layer was not compared, or rounding does not explain a difference.

    eager, captured: logits [B, V] of the same step; uncompiled: of the same step captured without compiled parts.
    most: the error bound of a step of this model (relative, norms): each of two steps may err so much. steady: whether
    equal inputs but for rounding make equal choices. A method that scores drawn keys by a few of their coordinates
    makes others, and the captured step, whose parts are compiled, rounds otherwise: there that difference is recorded,
    and the one of `uncompiled`, with the same rounding, is judged.
    """

    def apart(other: Tensor) -> float:
        return float(((other.double() - eager.double()).norm(dim=-1) / eager.double().norm(dim=-1)).max())

    error = max(layers.worst.values(), default=float("nan"))
    off, off_uncompiled = apart(captured), None if uncompiled is None else apart(uncompiled)
    wrong = None
    if len(layers.worst) != expected:
        wrong = f"attention of {len(layers.worst)} of {expected} layers was compared"
    elif not all(one <= layers.bound for one in layers.worst.values()):
        layer = max(layers.worst, key=lambda n: (layers.worst[n] != layers.worst[n], layers.worst[n]))
        wrong = (
            f"attention of layer {layer} is off by {layers.worst[layer]:.2e} over the keys it chose, more than "
            f"{layers.bound:.1e}"
        )
    elif steady and not off <= 2 * most:
        wrong = f"the captured step's logits differ from the uncaptured step's by {off:.2e}, more than {2 * most:.1e}"
    elif off_uncompiled is not None and not off_uncompiled <= 2 * most:
        wrong = f"logits of a step captured uncompiled differ from the uncaptured step's by {off_uncompiled:.2e}"
    if wrong:
        raise WrongResult(f"{name}: {wrong}; its time does not count")
    bound_of_captured = 2 * most if steady else None
    return MethodVerdict(len(layers.worst), error, layers.bound, off, bound_of_captured, off_uncompiled, 2 * most)
