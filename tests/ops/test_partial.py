"""merge, shift and remove: their algebra, within bounds that are derived here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops import Partial, merge, remove, shift
from longreach.testing.tolerance import within

R, H, D = 3, 2, 8
U = 2.0**-24  # unit roundoff of fp32
seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=60, deadline=None)


def partial(seed: int, *, spread: float = 5.0, empty: float = 0.2) -> Partial:
    """Any Partial, some of it over no keys."""
    draw = torch.Generator().manual_seed(seed)
    none = torch.rand(R, H, generator=draw) < empty
    lse = torch.randn(R, H, generator=draw) * spread
    out = torch.randn(R, H, D, generator=draw)
    return Partial(out.masked_fill(none[..., None], 0.0), lse.masked_fill(none, -torch.inf))


@dataclass
class Exact:
    """The union in fp64, and how far fp32 arithmetic may be from it.

    X bounds every |lse|. exp(lse_i - max): difference u 2X, exp 4u. Their sum (n terms) and log: (n + 4) u, adding
    max: u X. So lse is within e = u (3 X + n + 8), and out, whose shares have twice that relative error (numerator
    and denominator) plus a product and n sums, within u (6 X + 4 n + 20) sum share |out|.
    """

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor


def union(*parts: Partial) -> Exact:
    lses = torch.stack([p.lse.double() for p in parts])
    weight = lses.exp()
    total = weight.sum(0)
    share = torch.where(total > 0, weight / total, 0.0)[..., None]
    outs = torch.stack([p.out.double() for p in parts])
    size, n = lses.masked_fill(lses.isinf(), 0.0).abs().amax(0), len(parts)
    mass = (share * outs.abs()).sum(0)
    out_bound = U * (6 * size + 4 * n + 20)[..., None] * mass + 1e-30
    return Exact((share * outs).sum(0), total.log(), out_bound, U * (3 * size + n + 8))


def close(got: Partial, want: Exact, factor: float = 1.0) -> None:
    empty = want.lse == -torch.inf
    assert torch.equal(got.is_empty, empty)
    assert not bool(got.out[empty].any())
    within("lse", got.lse.double()[~empty], want.lse[~empty], factor * want.lse_bound[~empty])
    within("out", got.out.double(), want.out, factor * want.out_bound)


@many
@given(seeds)
def test_merge_is_associative_and_commutative_up_to_rounding(seed: int) -> None:
    a, b, c = (partial(seed + n) for n in range(3))
    want = union(a, b, c)
    close(merge(a, b, c), want)
    for other in (merge(c, a, b), merge(b, a, c)):
        close(other, want)
    for nested in (merge(a, merge(b, c)), merge(merge(a, b), c), merge(merge(c, a), b)):
        close(nested, want, factor=2)  # two merges, each within the bound


@many
@given(seeds)
def test_the_empty_partial_changes_nothing(seed: int) -> None:
    a, none = partial(seed), Partial.empty(R, H, D)
    for same in (merge(a), merge(a, none), merge(none, a), merge(none, a, none), remove(a, none)):
        assert torch.equal(same.out, a.out) and torch.equal(same.lse, a.lse)


@many
@given(seeds)
def test_shift_reweights_the_keys(seed: int) -> None:
    a, b = partial(seed), partial(seed + 1)
    by = torch.randn(R, H, generator=torch.Generator().manual_seed(seed))
    moved = shift(a, by)
    assert torch.equal(moved.out, a.out)
    assert torch.equal(moved.lse, a.lse + by)
    close(merge(moved, b), union(Partial(a.out, a.lse + by), b))
    rowwise = shift(a, by[:, 0])
    assert torch.equal(rowwise.lse, a.lse + by[:, :1])


def test_shift_by_a_weight_of_zero_leaves_no_keys() -> None:
    a = partial(0, empty=0.0)
    gone = shift(a, torch.tensor([0.0, -torch.inf, 0.0]))
    assert gone.is_empty.tolist() == [[False] * H, [True] * H, [False] * H]
    assert not gone.out[1].any()
    assert torch.equal(gone.out[0], a.out[0])


def test_shift_keeps_the_partials_dtype() -> None:
    assert shift(partial(0), torch.zeros(R, dtype=torch.float64)).lse.dtype == torch.float32
    assert shift(partial(0), torch.zeros(R, dtype=torch.bfloat16)).lse.dtype == torch.float32


@many
@given(seeds)
def test_remove_undoes_merge_within_the_share_removed(seed: int) -> None:
    """With s the share removed, errors are those of the merge times 1 / (1 - s).

    Let w, o bound the errors of whole.lse and whole.out, and x those of part.lse - whole.lse: x = w + u 2X. Then
    1 - s = -expm1(x) has the relative error r = x s / (1 - s) + 4u (first order in x, r <= 0.1 is assumed), so
    lse is within w + r + u (X + 8) and out, (whole - s part) / (1 - s), within
    (o + (s x + 4u) |part| + 3u (|whole| + |part|)) / (1 - s) + (r + 2u) |out|.
    """
    keep, part = partial(seed, empty=0.0), partial(seed + 1)
    want = union(keep, part)
    whole = merge(keep, part)
    got = remove(whole, part)
    s = torch.exp(part.lse.double() - want.lse)
    size = torch.stack([keep.lse, part.lse.masked_fill(part.is_empty, 0.0), whole.lse]).abs().amax(0).double()
    x = want.lse_bound + U * 2 * size
    r = x * s / (1 - s) + 4 * U
    clear = r <= 0.1
    assume(bool(clear.any()))
    within("lse", got.lse.double()[clear], keep.lse.double()[clear], (want.lse_bound + 1.2 * r + U * (size + 8))[clear])
    p, w, k = (t.out.double().abs() for t in (part, whole, keep))
    share = s[..., None]
    top = want.out_bound + (share * x[..., None] + 4 * U) * p + 3 * U * (w + p)
    bound = 1.2 * (top / (1 - share) + (r[..., None] + 2 * U) * k)
    within("out", got.out.double()[clear], keep.out.double()[clear], bound[clear])


@many
@given(seeds)
def test_removing_everything_leaves_nothing(seed: int) -> None:
    a = partial(seed)
    gone = remove(a, a)
    assert bool(gone.is_empty.all()) and not gone.out.any()


@many
@given(seeds)
def test_what_two_roundings_differ_by_is_nothing(seed: int) -> None:
    """The same keys added up in two orders give lse that differ in their last digit, not a remainder."""
    a = partial(seed, empty=0.0)
    up = Partial(a.out, a.lse.nextafter(torch.tensor(torch.inf)))
    assert bool(remove(up, a).is_empty.all())
    assert not bool(remove(Partial(a.out, a.lse + 1e-3), a).is_empty.any())


@many
@given(seeds, st.floats(18.0, 100.0))
def test_what_is_below_rounding_is_said_to_be_nothing(seed: int, gap: float) -> None:
    """exp(-18) is below u: the merge no longer holds what the smaller part added."""
    a = partial(seed, empty=0.0)
    part = Partial(-a.out, a.lse + gap)
    gone = remove(merge(a, part), part)
    assert bool(gone.is_empty.all()) and not gone.out.any()


def test_removing_more_than_there_is_leaves_nothing() -> None:
    a = partial(0, empty=0.0)
    for more in (0.1, 50.0, 200.0):
        gone = remove(a, Partial(a.out, a.lse + more))
        assert bool(gone.is_empty.all()) and not gone.out.any()
    none = Partial.empty(R, H, D)
    assert bool(remove(none, a).is_empty.all())
    assert bool(remove(none, none).is_empty.all())


def doubles(seed: int) -> tuple[Tensor, Tensor]:
    """Leaves in fp64: out, and lse without -inf."""
    some = partial(seed, spread=1.0, empty=0.0)
    return some.out.double().requires_grad_(), some.lse.double().requires_grad_()


def test_gradients() -> None:
    a, b = doubles(0), doubles(1)
    by = torch.randn(R, H, dtype=torch.float64, requires_grad=True)

    def merged(*x: Tensor) -> tuple[Tensor, Tensor]:
        got = merge(Partial(*x[:2]), shift(Partial(*x[2:4]), x[4]))
        return got.out, got.lse

    def removed(*x: Tensor) -> tuple[Tensor, Tensor]:
        got = remove(merge(Partial(*x[:2]), Partial(*x[2:4])), shift(Partial(*x[2:4]), x[4].abs().neg()))
        return got.out, got.lse

    assert torch.autograd.gradcheck(merged, (*a, *b, by))
    assert torch.autograd.gradcheck(removed, (*a, *b, by))


@pytest.mark.parametrize("how", ["merge", "remove", "remove more", "shift"])
def test_gradients_of_the_empty_are_finite(how: str) -> None:
    (out, lse), (out2, lse2) = doubles(0), doubles(1)
    holes = (torch.arange(R) == 0)[:, None].expand(R, H)
    more = (torch.arange(R) <= (0 if how == "shift" else 1))[:, None].expand(R, H)
    first = Partial(out.masked_fill(holes[..., None], 0.0), lse.masked_fill(holes, -torch.inf))
    second = Partial(out2.masked_fill(more[..., None], 0.0), lse2.masked_fill(more, -torch.inf))
    got = {
        "merge": lambda: merge(first, second),
        "remove": lambda: remove(first, second),
        "remove more": lambda: remove(first, Partial(second.out, second.lse + 1e4)),
        "shift": lambda: shift(first, second.lse),
    }[how]()
    assert bool(got.is_empty.any())
    loss = got.out.sum() + got.lse.masked_fill(got.is_empty, 0.0).sum()
    for grad in torch.autograd.grad(loss, (out, lse, out2, lse2), allow_unused=True):
        assert grad is None or bool(grad.isfinite().all())


def test_fp64_stays_fp64() -> None:
    a = Partial(*(x.double() for x in (partial(0).out, partial(0).lse)))
    assert merge(a, a).lse.dtype == remove(a, a).out.dtype == torch.float64


META = torch.device("meta")
OTHERS = [
    (Partial.empty(R, H, D + 1), "equal shape, dtype and device, got float32\\[3, 2, 8\\].* and float32\\[3, 2, 9\\]"),
    (Partial.empty(R, 1, D), "equal shape"),
    (Partial.empty(R, H, D, dtype=torch.float64), "equal shape.* float64"),
    (Partial.empty(R, H, D, device=META), "equal shape.* meta"),
]


@pytest.mark.parametrize(("other", "message"), OTHERS)
def test_partials_that_differ_are_refused(other: Partial, message: str) -> None:
    for op in (merge, remove):
        with pytest.raises(InvalidInput, match=message):
            op(partial(0), other)
    with pytest.raises(InvalidInput, match=message):
        merge(partial(0), partial(1), other)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (torch.zeros(R, H, 1), "expected float \\[3\\] or \\[3, 2\\], got float32\\[3, 2, 1\\]"),
        (torch.zeros(H), "got float32\\[2\\]"),
        (torch.zeros(R, dtype=torch.int64), "got int64"),
        (torch.zeros(R, device=META), "got .*meta"),
        (0.5, "got float"),
    ],
)
def test_shifts_that_do_not_fit_are_refused(by: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        shift(partial(0), by)  # type: ignore[arg-type]
