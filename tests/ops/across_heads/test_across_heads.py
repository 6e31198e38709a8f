"""One score a key for all heads, reference, Triton and Numba, against plain loops and sorted lists."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops import KVView, Logits, Rows, attend_with_logits, top_k
from longreach.ops.across_heads import Ballot, largest_log_prob, rank_round_robin, spread_logits, triton
from longreach.testing.inputs import random_kv, random_rows
from tests.ops.attend.kernels import HALF, here, needs_gpu, on_cpu
from tests.tiers import swept

impls = pytest.mark.parametrize("impl", ["reference", "triton", pytest.param("numba", marks=on_cpu)])


def make_case(seed: int) -> tuple[Rows, KVView, Logits, Tensor]:
    """Rows, a view, the logits that a pass leaves (NaN past what rows reach), and lse."""
    dice = random.Random(seed)
    kv = random_kv(
        [dice.choice((0, 1, 7, 31, 40, 130)) for _ in range(dice.choice((1, 3)))],
        heads=dice.choice((1, 2, 3)), dim=16, page=dice.choice((None, 16)),
        dtype=dice.choice((HALF, torch.float32)), ints=dice.choice((torch.int32, torch.int64)), seed=seed,
    )  # fmt: skip
    rows = random_rows(kv, dice.choice((0, 1, 3)), group=dice.choice((1, 2, 3, 4, 7, 16)), seed=seed)
    rows = replace(rows, pos=torch.minimum(rows.pos, kv.seq_lens[rows.seq.long()].to(rows.pos.dtype)))
    whole, logits = attend_with_logits(rows, kv, scale=0.25, impl="reference")
    if kv.k.dtype != torch.float32:  # as kernels leave half precision: fp16 beside the largest of 4 slots
        x = torch.nn.functional.pad(logits.x / torch.log(torch.tensor(2.0)), (0, 0, 0, -kv.capacity % 4))
        top = x.nan_to_num(-1e4, neginf=-1e4).unflatten(2, (-1, 4)).amax(3)
        logits = Logits((x - top.repeat_interleave(4, 2))[:, :, : kv.capacity].half(), top, 4)
    return rows, kv, logits, whole.lse


def kept_for(impl: str, logits: Logits, kv: KVView) -> Logits:
    """As the implementation keeps them: Numba in fp32."""
    return Logits(logits.natural(kv.capacity)) if impl == "numba" else logits


def reach_of(rows: Rows, kv: KVView) -> list[int]:
    return [
        max(0, min(int(kv.seq_lens[seq]), pos + 1))
        for seq, pos in zip(rows.seq.tolist(), rows.pos.tolist(), strict=True)
    ]


def turns(x: Tensor, count: int, recent: int, first: int) -> list[int]:
    """Slots in the order in which a round robin names them; x: [H, reach] logits. Plain loops."""
    others = [n for n in range(first, x.shape[1] - recent)]
    orders = [sorted(others, key=lambda n, h=h: (-float(x[h, n]), n)) for h in range(x.shape[0])]
    named: dict[int, None] = {}
    for place in range(len(others)):
        for order in orders:
            named.setdefault(order[place])
    return list(named)


@impls
@pytest.mark.parametrize("seed", swept(range(16), 8))
def test_largest_log_prob(impl: str, seed: int) -> None:
    rows, kv, logits, lse = make_case(seed)
    logits = kept_for(impl, logits, kv)
    got = largest_log_prob(here(rows), here(kv), here(lse), here(logits), impl=impl).cpu()
    assert got.shape == (rows.q.shape[0], kv.capacity) and got.dtype == torch.float32
    x = logits.natural(kv.capacity).double()
    for r, reach in enumerate(reach_of(rows, kv)):
        want = (x[r, :, :reach] - lse[r].double().view(kv.heads, 1, -1)).amax((0, 2))
        torch.testing.assert_close(got[r, :reach].double(), want, rtol=1e-5, atol=1e-5)
        assert impl != "reference" or bool(got[r, reach:].isnan().all())


def run(rows: Rows, kv: KVView, logits: Logits, count: Tensor, recent: Tensor, first: int, impl: str) -> Tensor:
    most = max(1, *count.tolist()) if count.numel() else 1
    ballot = spread_logits(
        here(rows), here(kv), here(logits), here(count), here(recent), first=first, most=most, impl=impl
    )
    reach = torch.tensor(reach_of(rows, kv), dtype=torch.int64)
    index, used = top_k(ballot.logits, ballot.depth, here(reach), capacity=most, impl=impl)
    assert torch.equal(used, ballot.depth)
    return rank_round_robin(ballot, index, used, impl=impl).cpu()


@impls
@pytest.mark.parametrize("seed", swept(range(20, 44), 10))
def test_round_robin(impl: str, seed: int) -> None:
    """The first keys by score: recent ones, first ones, then by turns; and scores are negative turns."""
    rows, kv, logits, _ = make_case(seed)
    logits = kept_for(impl, logits, kv)
    if seed % 3 == 0:  # many equal logits: ties go to the older key
        logits = replace(logits, x=logits.x.round(), top=None if logits.top is None else logits.top.round())
    dice = random.Random(seed)
    reaches = reach_of(rows, kv)
    counts = [min(reach, dice.choice((0, 1, 3, 9, 60))) for reach in reaches]
    recents = [min(count, dice.choice((0, 1, 4, 60))) for count in counts]
    first = dice.choice((0, 1, 4, 50))
    count, recent = (torch.tensor(x, dtype=kv.seq_lens.dtype) for x in (counts, recents))
    scores = run(rows, kv, logits, count, recent, first, impl)
    x = logits.natural(kv.capacity).float().transpose(2, 3).flatten(1, 2)
    heads = x.shape[1]
    for r, reach in enumerate(reaches):
        late = set(range(reach - recents[r], reach))
        early = set(range(min(first, reach))) - late
        kept = sorted(late) + sorted(early)
        order = turns(x[r, :, :reach], counts[r], recents[r], first)
        want = set((kept + order)[: counts[r]])
        by_score = sorted(range(reach), key=lambda n, r=r: (-float(scores[r, n]), n))
        assert set(by_score[: counts[r]]) == want
        assert all(scores[r, n] == 2.0 for n in late) and all(scores[r, n] == 1.0 for n in early)
        for n in want - late - early:  # turn modulo heads is the head that names the key first
            head = -int(scores[r, n]) % heads
            better = [m for m in range(first, reach - recents[r]) if (-x[r, head, m], m) < (-x[r, head, n], n)]
            assert len(better) == -int(scores[r, n]) // heads


@impls
def test_ranks_together_choose_what_one_rank_would(impl: str) -> None:
    kv = random_kv([80, 33], heads=4, dim=16)
    rows = Rows(torch.randn(2, 8, 16), torch.arange(2), kv.seq_lens - 1)
    _, logits = attend_with_logits(rows, kv, scale=0.25, impl="reference")
    count, recent = torch.tensor([20, 9]), torch.tensor([5, 2])
    want = run(rows, kv, logits, count, recent, 2, impl)
    found = []
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        part = replace(kv, k=kv.k[:, mine], v=kv.v[:, mine])
        q = replace(rows, q=rows.q[:, 4 * rank : 4 * rank + 4])
        held = Logits(logits.x[:, mine])
        ballot = spread_logits(here(q), here(part), here(held), here(count), here(recent), first=2, most=20, impl=impl)
        index, used = top_k(ballot.logits, ballot.depth, here(kv.seq_lens), capacity=20, impl=impl)
        found.append(rank_round_robin(ballot, index, used, first_head=4 * rank, heads=8, impl=impl).cpu())
    together = torch.maximum(*found)
    for r, reach in enumerate((80, 33)):
        assert torch.equal(together[r, :reach], want[r, :reach])


@pytest.mark.parametrize("tune", [triton.Tuning(ranked=16, against=64, shares=1), triton.Tuning(ranked=32, against=16)])
def test_however_keys_are_compared(tune: triton.Tuning) -> None:
    x = torch.randint(0, 9, (2, 3, 200)).float()  # ties across blocks
    ballot = Ballot(here(x), here(torch.full((2, 3), 150).int()), here(torch.full((2, 200), -torch.inf)))
    index, used = top_k(ballot.logits, ballot.depth, here(torch.tensor([200, 180])), capacity=170)
    want = rank_round_robin(fresh(ballot), index, used, impl="reference").cpu()
    tune = replace(tune, chained=ballot.logits.is_cuda)
    got = triton.rank_round_robin(fresh(ballot), index, used, first_head=0, heads=3, tune=tune).cpu()
    assert torch.equal(got, want) and bool(torch.isinf(got).any())


def fresh(ballot: Ballot) -> Ballot:
    return ballot._replace(scores=ballot.scores.clone())


def wrong_calls() -> list[tuple[Any, dict[str, Any], str]]:
    kv = random_kv([9, 3], heads=2, dim=8)
    rows = random_rows(kv, 3)
    _, logits = attend_with_logits(rows, kv, scale=1.0)
    one = {"rows": rows, "kv": kv, "lse": torch.zeros(3, 4), "logits": logits}
    ints = torch.ones(3).long()
    two = {"rows": rows, "kv": kv, "logits": logits, "count": ints, "recent": ints, "first": 0, "most": 1}
    ballot = spread_logits(**two)
    three = {"ballot": ballot, "index": torch.zeros(3, 4, 2).int(), "used": ballot.depth}
    evicted = random_kv([9, 3], heads=2, dim=8, evicted=True)
    return [
        (largest_log_prob, one | {"lse": torch.zeros(3, 2)}, r"lse: expected float \[3, 4\] on cpu, got"),
        (largest_log_prob, one | {"logits": None}, "logits: expected Logits, got NoneType"),
        (largest_log_prob, one | {"kv": evicted}, "slot_pos: after eviction a slot holds another key in each head"),
        (spread_logits, two | {"count": ints[:2]}, r"count: expected int \[R=3\] on cpu, got int64\[2\]"),
        (spread_logits, two | {"recent": ints.float()}, "recent: .* got float32"),
        (spread_logits, two | {"first": -1}, "first: expected a count >= 0, got -1"),
        (spread_logits, two | {"most": 0}, "most: expected a count >= 1, got 0"),
        (rank_round_robin, three | {"ballot": None}, "ballot: expected a Ballot, got NoneType"),
        (rank_round_robin, three | {"index": ballot.depth}, r"index: expected int32 \[R=3, H=4, C\] on cpu, got"),
        (rank_round_robin, three | {"used": ballot.depth.long()}, r"used: expected int32 \[3, 4\] on cpu, got int64"),
        (
            rank_round_robin,
            three | {"first_head": 1},
            "first_head, heads: expected this rank's 4 heads in .* got 1 and 4",
        ),
        (rank_round_robin, three | {"heads": 1 << 24}, "index: expected lists of at most 1 keys for"),
    ]


@pytest.mark.parametrize("number", range(len(wrong_calls())))
def test_what_does_not_fit_is_refused(number: int) -> None:
    op, given, message = wrong_calls()[number]
    with pytest.raises(InvalidInput, match=message):
        op(**given)


def test_what_the_kernels_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, kv, logits, lse = make_case(1)
    with pytest.raises(UnknownName, match="unknown impl of largest_log_prob 'fast'; known: auto, reference, triton"):
        largest_log_prob(rows, kv, lse, logits, impl="fast")
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        largest_log_prob(rows, kv, lse, Logits(logits.natural(kv.capacity).double()), impl="triton")
    with pytest.raises(Unsupported, match="no backward pass"):
        largest_log_prob(rows, kv, lse.clone().requires_grad_(), logits, impl="triton")
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="run on CUDA devices, got cpu"):
        largest_log_prob(rows, kv, lse, logits, impl="triton")


@needs_gpu
@pytest.mark.gpu
def test_a_captured_graph_follows_lengths() -> None:
    kv = here(random_kv([200, 90], heads=2, dim=64, dtype=HALF))
    rows = Rows(*(here(x) for x in (torch.randn(2, 8, 64).to(HALF), torch.arange(2), torch.tensor([199, 89]))))
    count, recent = (here(torch.tensor(x)) for x in ([30, 10], [5, 3]))

    def step() -> Tensor:
        _, logits = attend_with_logits(rows, kv, scale=0.1)
        ballot = spread_logits(rows, kv, logits, count, recent, first=2, most=40)
        index, used = top_k(ballot.logits, ballot.depth, rows.pos + 1, capacity=40)
        return rank_round_robin(ballot, index, used)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for filled, counts in (((200, 90), (40, 5)), ((120, 1), (7, 1))):
        kv.seq_lens.copy_(torch.tensor(filled))
        rows.pos.copy_(kv.seq_lens - 1)
        count.copy_(torch.tensor(counts))
        recent.copy_(count // 4)
        graph.replay()
        want = step()
        for r, reach in enumerate(filled):
            assert torch.equal(got[r, :reach], want[r, :reach])
