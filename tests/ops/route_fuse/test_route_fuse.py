"""route_fuse: the same as scan, router and mixture, what it leaves alone, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName
from longreach.mka.config import EDGE, MKAConfig
from longreach.mka.levels import Levels
from longreach.ops.carry import CarryMemory, ScanCarry
from longreach.ops.route_fuse import RouterLayer, first_layer, route_fuse
from longreach.ops.scan import scan
from tests.ops.route_fuse.cases import ROUTINGS, SEQ, Case, case, run

REAL = torch.tensor(SEQ) >= 0


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("forgets", [True, False])
@torch.no_grad()
def test_it_is_scan_router_and_mixture(routing: str, forgets: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"routing": routing, "summary": "ema" if forgets else "mean"}
    width = {} if routing == "fixed" else {"router_width": 5}
    levels = Levels(MKAConfig.make("fastmka", **options, **width), 0, 6, 2, 8, gate=0.6).double()
    q = torch.randn(len(SEQ), 6, 8, dtype=torch.float64)
    some = case(dtype=torch.float64)._replace(router=levels.router.second_layer(q), decay=levels.decay_logits())
    got = run(some, "reference")
    before = some.memory.read()
    y, after = scan(torch.cat([some.k, some.v], -1), levels.rate(), some.seq, some.pos, before)
    weights = levels.router(q)
    for mixed, x, mean in ((got.k, some.k, y[..., :8]), (got.v, some.v, y[..., 8:])):
        want = weights[:, :1, None] * x + weights[:, 1:, None] * mean
        torch.testing.assert_close(mixed, want.masked_fill(~REAL[:, None, None], 0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got.weights, weights.masked_fill(~REAL[:, None], 0), rtol=1e-12, atol=1e-14)
    at = some.memory.slots, some.memory.after
    torch.testing.assert_close((got.mean[at], got.weight[at]), (after.mean, after.weight), rtol=1e-12, atol=1e-14)


def leaves_the_rest(some: Case, impl: str) -> None:
    """Entries that no sequence of the pass writes keep their bits; a sequence without a row keeps its carry."""
    got, memory = run(some, impl), some.memory
    mean, weight = memory.mean.clone(), memory.weight.clone()
    at = memory.slots, memory.after
    mean[at], weight[at] = got.mean[at], got.weight[at]
    torch.testing.assert_close((got.mean, got.weight), (mean, weight), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mean[3, 0], memory.mean[3, 1]) and torch.equal(weight[3, 0], memory.weight[3, 1])
    assert not any(bool(x.isnan().any()) for x in (got.k, got.v, got.weights, mean[at], weight[at]))
    for x in got[:3]:
        assert not x[~REAL].any()


def is_the_input_at_gate_0(some: Case, impl: str) -> None:
    got = run(some, impl)
    assert torch.equal(got.k[REAL], some.k[REAL]) and torch.equal(got.v[REAL], some.v[REAL])
    assert got.weights[REAL].tolist() == [[1.0, 0.0]] * int(REAL.sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_other_memory_is_not_touched(dtype: torch.dtype) -> None:
    leaves_the_rest(case(dtype=dtype), "reference")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gate_0(dtype: torch.dtype, routing: str) -> None:
    is_the_input_at_gate_0(case(dtype=dtype, routing=routing, gate=0.0), "reference")


def test_a_first_token_is_its_own_mean() -> None:
    some = case(dtype=torch.bfloat16)
    got, row = run(some, "reference"), SEQ.index(0)
    assert torch.equal(got.mean[5, 0], torch.cat([some.k, some.v], -1)[row].float())
    assert torch.equal(got.weight[5, 0], torch.ones(2))


def test_the_reference_is_differentiable() -> None:
    some, learnt = case(dtype=torch.float64), case(dtype=torch.float64).router
    learnt = replace(learnt, hidden=torch.nan_to_num(learnt.hidden))  # type: ignore[arg-type]

    def outputs(k: Tensor, decay: Tensor, gate: Tensor, hidden: Tensor) -> Any:
        memory = CarryMemory(**{name: x.clone() for name, x in vars(some.memory).items()})
        router = replace(learnt, gate=gate, hidden=hidden)
        return route_fuse(k, some.v, router, decay, some.seq, some.pos, memory, limit=EDGE)

    leaves = torch.nan_to_num(some.k), torch.tensor([0.3, -0.2], dtype=torch.float64), learnt.gate, learnt.hidden
    assert torch.autograd.gradcheck(outputs, [x.clone().requires_grad_() for x in leaves if x is not None])


def test_no_rows_and_no_sequences() -> None:
    some = case()
    none = some._replace(
        k=some.k[:0], v=some.v[:0], router=RouterLayer(some.router.gate), seq=some.seq[:0], pos=some.pos[:0]
    )
    got, memory = run(none, "reference"), some.memory
    assert got.k.shape == (0, 2, 8) and got.weights.shape == (0, 2)
    assert torch.equal(got.mean[memory.slots[1:], memory.after[1:]], memory.mean[memory.slots[1:], memory.before[1:]])
    empty = CarryMemory.copy_of(ScanCarry.empty(0, 2, 16))
    k, _, weights = route_fuse(*none[:-1], empty, limit=EDGE)
    assert k.shape == (0, 2, 8) and weights.dtype == torch.float32


MEMORY = case().memory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(6, 8)}, r"k: expected \[R, G, D\]"),
        ({"k": torch.zeros(6, 2, 8).long()}, "k: expected bf16, fp16, fp32 or fp64"),
        ({"v": torch.zeros(6, 2, 4)}, r"v: expected float32\[6, 2, 8\] on cpu like k"),
        ({"seq": torch.zeros(5).long()}, r"seq: expected int32 or int64 \[R=6\]"),
        ({"pos": torch.zeros(6)}, r"pos: expected int32 or int64 \[R=6\]"),
        ({"router": None}, "router: expected a RouterLayer"),
        ({"router": replace(case().router, hidden=torch.zeros(5, 5))}, r"hidden layer \[R=6, W\]"),
        ({"decay": torch.zeros(3)}, r"decay: expected float \[G=2\]"),
        ({"memory": None}, "memory: expected a CarryMemory"),
        ({"memory": case(dim=4).memory}, r"memory: expected means torch.float32 \[S, E, 2, 16\]"),
        ({"memory": case(dtype=torch.float64).memory}, "memory: expected means torch.float32"),
        ({"seq": torch.tensor([5, 0, 1, 2, 3, 4])}, r"seq: expected in \[0, 5\), got 0 to 5"),
        ({"seq": torch.tensor([0, -1, 1, -1, 1, 2])}, r"seq: expected each number once, got \[0, 1, 1, 2\]"),
        ({"memory": replace(MEMORY, slots=torch.tensor([0, 1, 2, 3, 7]))}, r"slots: expected in \[0, 7\)"),
        ({"memory": replace(MEMORY, slots=torch.tensor([0, 1, 2, 3, 0]))}, "slots: expected each number once"),
        ({"memory": replace(MEMORY, before=torch.tensor([0, 1, 3, 0, 0]))}, r"before: expected in \[0, 3\)"),
        ({"memory": replace(MEMORY, after=torch.tensor([0, 1, -1, 0, 0]))}, r"after: expected in \[0, 3\), got -1"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given = case()._replace(**change)
    with pytest.raises(InvalidInput, match=message):
        route_fuse(*given, limit=EDGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4)}, r"x: expected float \[R, K\]"),
        ({"x": torch.zeros(3, 4).long()}, r"x: expected float \[R, K\]"),
        ({"weight": torch.zeros(2, 5)}, r"weight: expected torch.float32 \[W, 4\]"),
        ({"weight": torch.zeros(2, 4).half()}, r"weight: expected torch.float32 \[W, 4\]"),
        ({"weight": torch.zeros(4, 2).T}, r"weight: expected torch.float32 \[W, 4\]"),
        ({"bias": torch.zeros(3)}, r"bias: expected torch.float32 \[2\]"),
    ],
)
def test_bad_first_layer(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": torch.zeros(3, 4), "weight": torch.zeros(2, 4), "bias": torch.zeros(2), **change}
    with pytest.raises(InvalidInput, match=message):
        first_layer(**given)
    with pytest.raises(UnknownName, match="impl of first_layer"):
        first_layer(torch.zeros(3, 4), torch.zeros(2, 4), None, impl="numba")


def test_bad_parts_and_unknown_impl() -> None:
    some = case()
    with pytest.raises(InvalidInput, match=r"gate: expected float \[2\]"):
        RouterLayer(torch.zeros(3))
    with pytest.raises(InvalidInput, match="hard: expected a hidden layer"):
        RouterLayer(torch.zeros(2), hard=True)
    with pytest.raises(InvalidInput, match=r"weight: expected torch.float32 \[2, 5\]"):
        replace(some.router, weight=torch.zeros(2, 4))
    with pytest.raises(InvalidInput, match=r"bias: expected torch.float32 \[2\]"):
        replace(some.router, bias=torch.zeros(2).half())
    with pytest.raises(InvalidInput, match=r"mean: expected fp32 \(or fp64\) \[S, E, G, D\]"):
        replace(MEMORY, mean=MEMORY.mean[0])
    with pytest.raises(InvalidInput, match=r"weight: expected \[7, 3, 2\] with dtype and device of mean"):
        replace(MEMORY, weight=MEMORY.weight[:, :1])
    with pytest.raises(InvalidInput, match="expected contiguous memory"):
        replace(MEMORY, mean=MEMORY.mean.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(InvalidInput, match=r"after: expected int32 or int64 \[B\]"):
        replace(MEMORY, after=MEMORY.after[:2])
    with pytest.raises(InvalidInput, match="limit: expected a finite number > 0, got 0"):
        route_fuse(*some, limit=0.0)
    with pytest.raises(UnknownName, match="impl of route_fuse"):
        route_fuse(*some, limit=EDGE, impl="numba")
