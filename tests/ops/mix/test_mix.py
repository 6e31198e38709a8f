"""mix: its definition, its gradients, also at weights of 0, and what it refuses; the Triton kernels too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported
from longreach.ops import Partial, mix
from tests.ops.attend.kernels import here
from tests.ops.compiler import SHARED_MEMORY, printed
from tests.ops.test_partial import D, H, R, close, doubles, many, partial, seeds, union

both = pytest.mark.parametrize("impl", ["reference", "triton"])

FACTOR = {"reference": 1.0, "triton": 4.0}  # the hardware's exp and log


def run(parts: list[Partial], weights: Tensor, impl: str) -> Partial:
    """On the device that kernels run on; the result on the CPU."""
    got = mix([here(p) for p in parts], here(weights), impl=impl)
    return Partial(got.out.cpu(), got.lse.cpu())


@both
def test_mix_with_weights_of_one_is_a_merge(impl: str) -> None:
    a, b, c = (partial(seed) for seed in (1, 2, 3))
    close(run([a, b, c], torch.ones(R, 3), impl), union(a, b, c), factor=FACTOR[impl])


@both
@many
@given(seed=seeds)
def test_mix_weighs_each_set(impl: str, seed: int) -> None:
    """As shifting by the logs of the weights does, where these are above 0; weights of a head and of a row."""
    a, b = partial(seed), partial(seed + 1)
    weights = torch.rand(R, H, 2, generator=torch.Generator().manual_seed(seed)) + 0.01
    want = union(
        *(Partial(p.out, p.lse.double().add(weights[..., s].double().log()).float()) for s, p in enumerate((a, b)))
    )
    close(run([a, b], weights, impl), want, factor=2 * FACTOR[impl])
    same = run([a, b], weights[:, :1].expand(R, H, 2), impl)
    rows = run([a, b], weights[:, 0], impl)
    assert torch.equal(rows.out, same.out) and torch.equal(rows.lse, same.lse)


@both
def test_mix_leaves_out_sets_of_weight_zero(impl: str) -> None:
    """Also one that would outweigh all others by more than exp can hold."""
    a, b = partial(1, empty=0.0), partial(2, empty=0.0)
    far = Partial(b.out, b.lse + 200)
    got = run([a, far], torch.tensor([1.0, 0.0]).expand(R, 2), impl)
    assert torch.equal(got.out, a.out) and torch.equal(got.lse, a.lse)
    none = run([a, b], torch.zeros(R, 2), impl)
    assert bool(none.is_empty.all()) and not none.out.any()
    assert bool(run([Partial.empty(R, H, D)], torch.ones(R, 1), impl).is_empty.all())


def test_gradients_of_mix() -> None:
    a, b, c = doubles(4), doubles(5), doubles(6)
    weights = torch.rand(R, H, 3, dtype=torch.float64).requires_grad_()

    def mixed(weights: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        got = mix([Partial(*parts[i : i + 2]) for i in (0, 2, 4)], weights)
        return got.out, got.lse

    assert torch.autograd.gradcheck(mixed, (weights, *a, *b, *c))


@both
def test_a_weight_of_zero_keeps_its_gradient(impl: str) -> None:
    """The one-sided derivative; through the log of the weight there is none."""
    a, b = partial(1, empty=0.0), partial(2, empty=0.0)
    weights = torch.tensor([1.0, 0.0]).repeat(R, 1).requires_grad_()
    got = run([a, b], weights, impl)
    (grad,) = torch.autograd.grad(got.lse.sum(), weights, retain_graph=True)
    torch.testing.assert_close(grad[:, 1], torch.exp(b.lse - a.lse).sum(1), rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(got.out.sum(), weights)
    want = torch.exp(b.lse - a.lse) * (b.out - a.out).sum(-1)
    torch.testing.assert_close(grad[:, 1], want.sum(1), rtol=1e-4, atol=1e-4)
    far = Partial(b.out, b.lse + 200)
    (grad,) = torch.autograd.grad(run([a, far], weights, impl).lse.sum(), weights)
    assert bool(grad.isfinite().all()) and bool((grad[:, 1] > 1e30).all())


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("per_head", [True, False])
def test_gradients_of_the_kernels(sets: int, per_head: bool) -> None:
    """Against the reference in fp64: empty Partials, weights of 0, and rows of nothing else."""
    parts = [partial(seed, empty=0.3) for seed in range(sets)]
    draw = torch.Generator().manual_seed(1)
    weights = torch.rand((R, H, sets) if per_head else (R, sets), generator=draw)
    weights[0] = 0
    weights[1, ..., 0] = 0

    def gradients(impl: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [here(x.to(dtype)).requires_grad_() for x in (weights, *(y for p in parts for y in (p.out, p.lse)))]
        w, *rest = leaves
        got = mix([Partial(*rest[n : n + 2]) for n in range(0, 2 * sets, 2)], w, impl=impl)
        given = [
            here(torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype)) for x in vars(got).values()
        ]
        loss = (got.out * given[0]).sum() + (got.lse.masked_fill(got.is_empty, 0.0) * given[1]).sum()
        return [x.detach().cpu() for x in (got.out, got.lse, *torch.autograd.grad(loss, leaves))]

    for got, want in zip(gradients("triton", torch.float32), gradients("reference", torch.float64), strict=True):
        size = float(want.nan_to_num(neginf=0.0).abs().max())
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * size)


def test_no_rows_and_refusals() -> None:
    none = here(Partial.empty(0, H, D))
    assert mix([none], here(torch.ones(0, 1)), impl="triton").out.shape == (0, H, D)
    wide = here(Partial.empty(R, H, D, dtype=torch.float64))
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        mix([wide], here(torch.ones(R, 1)), impl="triton")


TOGETHER = """
import json
from unittest.mock import patch
import torch
from longreach.ops import KVView, Rows, Span, Spans, absolute, relative
from longreach.ops.attend import triton as attention, triton_backward_kernels, triton_kernels as pieces, triton_merging
from longreach.ops.attend.triton_tuning import Tuning
from longreach.ops.mix import KeySet, triton, triton_attended, triton_kernels
from longreach.testing.compile import compiling

with (
    patch.object(attention, "refuse", lambda *a, **k: None), patch.object(triton_attended, "refuse", lambda *a: None),
    patch.object(Tuning, "programs", lambda s, d: 132 * s.per_sm),
    patch.object(pieces, "attend_pieces"), patch.object(triton_merging, "merge_pieces"),
    compiling(triton_backward_kernels, "deltas", "spans_dq", "spans_dkv"),
    compiling(triton_kernels, "mixed", "given_to_sets") as made,
):
    q, k, v = (torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in ((64, 8, 128), *[(1, 2, 64, 128)] * 2))
    rows, kv = Rows(q, torch.zeros(64).long(), torch.arange(64)), KVView(k, v, torch.tensor([64]))
    sets = [KeySet(rows, kv, Spans((Span(absolute(0), relative(-n)),))) for n in range(3)]
    triton_attended.attend_mixed(sets, torch.ones(64, 3, requires_grad=True), 1.0).out.sum().backward()
print(json.dumps([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made]))
"""


COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops import Partial, mix
from longreach.ops.mix import triton, triton_kernels
from longreach.testing.compile import compiling

with patch.object(triton, "refuse", lambda *a: None), compiling(triton_kernels, "mixed", "gradients") as made:
    out, lse = torch.zeros(8, 4, 128, requires_grad=True), torch.zeros(8, 4, requires_grad=True)
    parts = [Partial(out, lse)] * 3
    mix(parts, torch.ones(8, 3, requires_grad=True), impl="triton").out.sum().backward()
print(json.dumps([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made]))
"""


@pytest.mark.parametrize(
    ("source", "names"), [(COMPILE, ["mixed", "gradients"]), (TOGETHER, ["mixed", "given_to_sets"])]
)
def test_compiles_for_an_h200(source: str, names: list[str]) -> None:
    found = printed(source)
    assert [name for name, _, _ in found] == names
    assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin in found), found


def test_bad_weights_of_mix() -> None:
    a = partial(0)
    for weights, message in (
        (torch.ones(R, 2), "weights: expected float"),
        (torch.ones(R, 1).long(), "weights: expected float"),
        (torch.full((R, 1), -0.1), "weights: expected numbers of at least 0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            mix([a], weights)
    with pytest.raises(InvalidInput, match="partials: expected at least one Partial"):
        mix([], torch.ones(R, 0))
    with pytest.raises(InvalidInput, match="partials: expected equal shape"):
        mix([a, Partial.empty(R, H, 2 * D)], torch.ones(R, 2))
