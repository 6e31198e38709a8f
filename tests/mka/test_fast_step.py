"""A pass of one token each without gradients: as the general path, in few launches, and only where it may be taken."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from longreach.cache.mix_state import MixState
from longreach.mka import fast
from longreach.mka.config import MKAConfig
from longreach.mka.fast import FastMemory, fuse
from longreach.mka.levels import Levels
from longreach.ops import HeadShard
from longreach.ops.carry import CarryMemory, ScanCarry
from longreach.ops.route_fuse import triton, triton_kernels

HEADS, KV_HEADS, DIM = 4, 2, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {},
    "mean": {"summary": "mean"},
    "fixed": {"routing": "fixed"},
    "top1": {"routing": "top1"},
}
each = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Given(NamedTuple):
    levels: Levels
    q: Tensor
    k: Tensor
    v: Tensor
    memory: FastMemory


def given(options: dict[str, Any], dtype: torch.dtype = torch.float64, sequences: int = 4) -> Given:
    torch.manual_seed(0)
    levels = Levels(MKAConfig.make("fastmka", **options), 0, HEADS, KV_HEADS, DIM, gate=0.6).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    carry = ScanCarry(torch.randn(sequences, KV_HEADS, 2 * DIM, dtype=wide), 1 + torch.rand(4, KV_HEADS, dtype=wide))
    q = torch.randn(sequences, HEADS, DIM, dtype=dtype)
    return Given(levels, q, *torch.randn(2, sequences, KV_HEADS, DIM, dtype=dtype), FastMemory(carry, None))


def stepped(some: Given, memory: FastMemory, *, step: bool, counts: tuple[int, ...] = (1, 1, 1, 1), **more: Any) -> Any:
    """step: whether gradients are off."""
    levels, q, k, v, _ = some
    seq = torch.tensor([b for b, count in enumerate(counts) if count], dtype=torch.int64)
    pos = torch.tensor([5, 0, 2, 9])[seq]
    with torch.set_grad_enabled(not step):
        k, v, after, weights = fuse(levels, q[seq], k[seq], v[seq], seq, pos, counts, memory, scale=1.0, **more)
    carry = after.carry.read() if isinstance(after.carry, CarryMemory) else after.carry
    assert carry is not None
    return k, v, carry.mean, carry.weight, weights


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of route_fuse from here on."""
    calls, op = list[int](), fast.route_fuse
    monkeypatch.setattr(fast, "route_fuse", lambda k, *a, **kw: calls.append(len(k)) or op(k, *a, **kw))
    return calls


@each
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 0, 1, 0), (0, 0, 0, 0)])
def test_as_the_general_path(options: dict[str, Any], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    some, calls = given(options), counted(monkeypatch)
    carry = some.memory.carry
    assert isinstance(carry, ScanCarry)
    before = carry.mean.clone()
    want = stepped(some, some.memory, step=False, counts=counts)
    assert calls == []
    got = stepped(some, some.memory, step=True, counts=counts)
    assert calls == [sum(counts)] and torch.equal(carry.mean, before)  # the memory that was given is kept
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def placed(state: MixState, carry: ScanCarry) -> CarryMemory:
    """The memory of a state's next pass, which goes on from `carry`."""
    slots = torch.arange(4)
    turn = state.begin(slots, slots, torch.tensor([5, 0, 2, 9]))
    found, _ = state.read(0, slots, (0, 1, 2, 3), turn, KV_HEADS, 2 * DIM, 1, carry.mean.dtype)
    assert found is not None
    found.mean[slots, turn.before], found.weight[slots, turn.before] = carry.mean, carry.weight
    return found


@each
@pytest.mark.parametrize("step", [True, False])
def test_in_the_memory_of_a_cache(options: dict[str, Any], step: bool) -> None:
    some = given(options)
    assert isinstance(some.memory.carry, ScanCarry)
    memory = placed(MixState(4, "cpu", means=True, block=None), some.memory.carry)
    k, v, *_, weights = stepped(some, FastMemory(memory, None), step=step)
    want = stepped(some, some.memory, step=False)
    got = k, v, memory.mean[memory.slots, memory.after], memory.weight[memory.slots, memory.after], weights
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_ranks_agree_with_one() -> None:
    some = given({})
    want, parts = stepped(some, some.memory, step=True), list[Tensor]()
    assert isinstance(some.memory.carry, ScanCarry)
    for last in (False, True):  # the sum of what the other rank gives is known from a first round
        for rank in (0, 1):
            mean, weight = some.memory.carry.mean[:, rank : rank + 1], some.memory.carry.weight[:, rank : rank + 1]
            heads = slice(2 * rank, 2 * rank + 2)
            own = Given(some.levels, some.q[:, heads], *(x[:, rank : rank + 1] for x in some[2:4]), some.memory)

            def total(x: Tensor, last: bool = last) -> Tensor:
                parts.append(x)
                return parts[0] + parts[1] if last else x

            shard = HeadShard(rank, 1, 2, total)
            got = stepped(own, FastMemory(ScanCarry(mean, weight), None), step=True, shard=shard)
            if last:
                expected = *(x[:, rank : rank + 1] for x in want[:4]), want[4]
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("why", ["gradients", "several rows", "a hook", "a hook within", "an adapter", "level 3"])
def test_where_the_general_path_is_taken(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some, calls, seen = given({}), counted(monkeypatch), list[Tensor]()
    router = some.levels.router
    if why == "level 3":
        some = some._replace(
            levels=Levels(MKAConfig.make("fastmka", tiers=(1, 2, 3)), 0, HEADS, KV_HEADS, DIM).double()
        )
        memory = FastMemory(some.memory.carry, torch.zeros(4, 1, KV_HEADS, 2 * DIM, dtype=torch.float64))
        some = some._replace(memory=memory)
    if why == "a hook":
        router.register_forward_hook(lambda module, args, weights: seen.append(weights))
    if why == "a hook within":
        router.up.register_forward_hook(lambda module, args, out: seen.append(out))
    if why == "an adapter":
        router.down = nn.Sequential(router.down)
    if why == "several rows":
        with torch.no_grad():
            zeros, pos = torch.zeros(4, dtype=torch.int64), torch.arange(4)
            fuse(*some[:4], zeros, pos, (4, 0, 0, 0), some.memory, scale=1.0)
    else:
        stepped(some, some.memory, step=why != "gradients")
    assert calls == [] and len(seen) == why.startswith("a hook")


class _Computing(TorchDispatchMode):
    """Names of the operators that launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@each
def test_a_layer_launches_the_first_layer_of_the_router_and_one_kernel(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, launched = given(options, torch.bfloat16), list[tuple[int, ...]]()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launched.append(grid)

    for kernel in ("first_layer", "route_fuse"):
        monkeypatch.setattr(triton_kernels, kernel, Kernel())
    monkeypatch.setattr(triton, "refuse", lambda *x: None)
    monkeypatch.setattr("longreach.ops.route_fuse.api._check_values", lambda *x: None)
    assert isinstance(some.memory.carry, ScanCarry)
    memory = FastMemory(placed(MixState(4, "cpu", means=True, block=None), some.memory.carry), None)
    rows = torch.arange(4)
    with torch.no_grad(), _Computing() as computing:
        fuse(*some[:4], rows, rows, (1, 1, 1, 1), memory, scale=1.0, impl="triton")
    assert computing.names == []
    assert launched == ([] if options.get("routing") == "fixed" else [(64, 4)]) + [(4, KV_HEADS)]
