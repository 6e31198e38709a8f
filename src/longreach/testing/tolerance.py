"""How far a result may be from the fp64 oracle's: derived bounds, no tuned constants.

Inputs are exact: bf16 and fp16 are upcast without rounding and the oracle starts from the same bits. So what
remains is rounding in the accumulator (fp32, or fp64), of unit roundoff u = eps / 2, over n keys of D channels.
To first order, with P the largest sum_i |scale q_i k_i| of a key and X the largest |logit| (cap, log-weight and
sink included), and summation in any order:

* logit: one rounding for the scale, one per product, D - 1 per sum, so u (D + 1) P; dividing by the cap, tanh
  (2 ulp), the product with the cap and adding the log-weight: at most 8 u X. d = u ((D + 1) P + 8 X).
* exp(logit - max): an absolute error of the exponent is a relative one of the result. The difference is at most
  2 X, exp has 2 ulp: e = d + u (2 X + 4).
* lse = max + log(sum): relative error of the sum e + n u, log (2 ulp of at most log n <= n) and the addition:
  e + u (3 n + 4 + |lse|).
* out = sum(p v) / sum(p): numerator and denominator each e + n u, one product, one division:
  (2 e + u (2 n + 4)) sum softmax |v|, per channel.
* Weights rounded to the inputs' dtype before they meet the values (as tensor cores want them), with unit roundoff w:
  the numerator changes by at most w sum p |v|, so out by w sum softmax |v|; the sum of weights is taken unrounded.
* A sink is one merge more: of the lse, max and log once more, u (2 X + 2 |lse| + 8); out is multiplied by
  exp(lse - lse'), whose relative error is that of both lse: twice the bound of lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops import Partial
from longreach.testing.oracle import Exact

UNDERFLOW = 1e-30  # below it, fp32 results may be flushed


def bounds(want: Exact, unit: float, weights: float = 0.0) -> tuple[Tensor, Tensor]:
    """Bounds on |out - want.out| [R, H, D] and |lse - want.lse| [R, H] for unit roundoffs `unit` and w = `weights`."""
    keys, size = want.keys.double(), want.logit
    logit = unit * ((want.out.shape[2] + 1) * want.products + 8 * size)
    weight = logit + unit * (2 * size + 4)
    finite = want.lse.nan_to_num(neginf=0.0).abs()
    lse = weight + unit * (3 * keys + 4 + finite)
    out = 2 * weight + unit * (2 * keys + 4)
    if want.sunk:
        lse = lse + unit * (2 * size + 2 * finite + 8)
        out = out + 2 * lse
    return (out + weights)[..., None] * want.mass + UNDERFLOW, lse + UNDERFLOW


def pooled_bound(pooled: Tensor, dense: Exact, unit: float) -> Tensor:
    """Bound on |pooled_scores - pooled| for exact `pooled` [T, G, N]; `dense` is attend's oracle on the same rows.

    Each score exp(logit - lse) has the relative error of its exponent: that of the logit, of lse and of their
    difference, and exp; at most R H of them are added.
    """
    _, lse = bounds(dense, unit)
    logit = unit * ((dense.out.shape[2] + 1) * dense.products + 8 * dense.logit)
    difference = unit * (dense.logit + dense.lse.nan_to_num(neginf=0.0).abs() + 4)
    relative = (logit + lse + difference).max() if lse.numel() else torch.zeros(())
    return (relative + unit * dense.lse.numel()) * pooled + UNDERFLOW


def logits_bound(dense: Exact, unit: float) -> Tensor:
    """Bound on the error of each logit [R, H]; `dense` is attend's oracle over all that the rows see."""
    return unit * ((dense.out.shape[2] + 1) * dense.products + 8 * dense.logit) + UNDERFLOW


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def assert_close(got: Partial, want: Exact, *, unit: float | None = None, weights: float = 0.0) -> None:
    """Fail unless `got` is within the derived bound of `want`, and exactly out 0, lse -inf where there are no keys.

    unit: unit roundoff of the accumulator; default that of got's dtype. weights: that of the attention weights where
        they are rounded, else 0.
    """
    empty = want.lse == -torch.inf
    out, lse = got.out.detach().double().cpu(), got.lse.detach().double().cpu()
    assert out.shape == want.out.shape, f"out: expected {list(want.out.shape)}, got {list(out.shape)}"
    assert torch.equal(lse == -torch.inf, empty), "lse is -inf where keys are seen, or finite where none are"
    assert not bool(out[empty].any()), "out over no keys must be 0"
    out_bound, lse_bound = bounds(want, unit_roundoff(got.out.dtype) if unit is None else unit, weights)
    within("lse", lse[~empty], want.lse[~empty], lse_bound[~empty])
    within("out", out, want.out, out_bound)


def within(name: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Fail unless |got - want| <= bound everywhere (NaN fails)."""
    ratio = (got - want).abs() / bound
    bad = ~(ratio <= 1)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} beyond the bound, first at {where}: got {float(got[where])}, "
            f"want {float(want[where])}, bound {float(bound[where]):.3g}"
        )
