"""The Triton kernel of route_fuse: in Python on a CPU, for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from longreach.errors import Unsupported
from longreach.mka.config import EDGE
from longreach.ops.carry import CarryMemory
from longreach.ops.route_fuse import RouterLayer, first_layer, route_fuse, triton, triton_kernels
from longreach.ops.triton_launches import Observed, observe_launches
from tests.ops.attend.kernels import HALF, here
from tests.ops.route_fuse.cases import ROUTINGS, Case, case, run, wide
from tests.ops.route_fuse.test_route_fuse import is_the_input_at_gate_0, leaves_the_rest


def agrees(some: Case) -> None:
    """With the reference in fp64, which rounds neither logits nor the mean."""
    got, want = run(some, "triton"), run(wide(some), "reference")
    dtype = some.k.dtype
    assert got.k.dtype == got.v.dtype == dtype and got.weights.dtype == torch.float32
    fine, coarse = 2.0**-20, 2.0**-20 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
    for a, b, unit in zip(got, want, (coarse, coarse, coarse, fine, fine), strict=True):
        near = torch.nan_to_num(a.double()), torch.nan_to_num(b)
        torch.testing.assert_close(*near, rtol=0, atol=unit * float(near[1].abs().max()))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize(("heads", "dim", "width"), [(2, 8, 5), (1, 20, 64), (3, 40, 1)])
@pytest.mark.covering
def test_as_the_reference(routing: str, dtype: torch.dtype, forgets: bool, heads: int, dim: int, width: int) -> None:
    some = case(heads=heads, dim=dim, width=width, dtype=dtype, routing=routing, forgets=forgets)
    agrees(some)
    leaves_the_rest(case(dtype=dtype, routing=routing, forgets=forgets), "triton")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gate_0(routing: str, dtype: torch.dtype) -> None:
    is_the_input_at_gate_0(case(dtype=dtype, routing=routing, gate=0.0), "triton")


def test_strided_rows_in_one_launch() -> None:
    some = case()
    both = torch.cat([some.k, some.k, some.v], -1).transpose(0, 1).contiguous().transpose(0, 1)
    launches = list[Observed]()
    with observe_launches(launches.append):
        got = run(some._replace(k=both[..., 8:16], v=both[..., 16:]), "triton")
    assert [x.function.__name__ for x in launches] == ["route_fuse"]
    want = run(some, "triton")
    for a, b in zip(got, want, strict=True):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def test_more_rows_than_are_searched_at_once() -> None:
    """Each row is of the next sequence; the first sequence has none."""
    rows = triton_kernels.LOOKED_AT.value + 3
    seq = torch.arange(1, rows + 1, dtype=torch.int32)
    slots, zeros = torch.arange(rows + 1).flip(0), torch.zeros(rows + 1, dtype=torch.int64)
    memory = CarryMemory(torch.randn(rows + 1, 2, 1, 16), torch.ones(rows + 1, 2, 1), slots, zeros, zeros + 1)
    k, v = torch.randn(2, rows, 1, 8)
    some = Case(k, v, RouterLayer(torch.tensor([0.5, 0.5])), torch.zeros(1), seq, seq, memory)
    agrees(some)
    assert torch.equal(run(some, "triton").mean[rows, 1], memory.mean[rows, 0])


def test_the_same_entry_before_and_after() -> None:
    some = case()
    entries = torch.tensor([0, 0, 1, 0, 1])
    memory = CarryMemory(torch.randn(7, 3, 2, 16), torch.rand(7, 3, 2), some.memory.slots, entries, entries)
    agrees(some._replace(memory=memory))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 32, 5), (3, 50, 1), (2, 200, 4), (0, 16, 2)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.covering
def test_first_layer(
    rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are some columns of a larger matrix; the longest rows take several parts."""
    monkeypatch.setattr(triton, "CHANNELS", 64)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs + 8), torch.randn(outputs)
    x, weight, bias = (here(t.to(dtype)) for t in (x, weight, bias))
    weight = weight[:, 4:-4]
    got = first_layer(x, weight, bias if biased else None, impl="triton")
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=inputs * 2.0**-20)


def test_refusals() -> None:
    some = Case(*(here(x) for x in case()))
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        route_fuse(*(here(x) for x in case(dtype=torch.float64)), limit=EDGE, impl="triton")
    gate = some.router.gate.clone().requires_grad_()
    with pytest.raises(Unsupported, match="route_fuse's Triton kernels have no backward"):
        route_fuse(*some._replace(router=RouterLayer(gate)), limit=EDGE, impl="triton")
    x = torch.zeros(1, 2, requires_grad=True)
    with pytest.raises(Unsupported, match="first_layer's Triton kernels have no backward"):
        first_layer(here(x), here(x.detach()), None, impl="triton")
