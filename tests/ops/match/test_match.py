"""match against the plain loops of brute.py: the reference, and the kernels, interpreted where there is no GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.ops import Rows, rotate
from longreach.ops.match import DEPTHS, NOTES, Ring, Rule, match, recovered
from longreach.ops.match import triton as kernels
from longreach.ops.match.triton_tuning import Tuning
from tests.ops.attend.kernels import HALF, PLACE, here, on_cpu
from tests.ops.match.brute import Brute, agrees, random_rows, random_turn
from tests.tiers import swept

SEQUENCES, HEADS, KV_HEADS, DIM, WINDOW = 3, 6, 2, 16, 9
BASE = Rule(WINDOW, 2, limit=9.0, patience=3.0, rest=5, price=0.4)
RULES = {
    "plain": replace(BASE, patience=math.inf),
    "sinks": replace(BASE, sinks=2, patience=math.inf),
    "depth": replace(BASE, deepest=2, patience=math.inf),
    "guard": replace(BASE, limit=4.0, price=1.5),
    "reuses": replace(BASE, limit=4.0, price=1.4973, reuses=1.2, sinks=1),
    "minimum": replace(BASE, min_context=14, patience=math.inf),
    "band": replace(BASE, band=1000),
    "gaps": replace(BASE, near=2, far=5, patience=math.inf),
    "forced": replace(BASE, near=4, far=4, limit=math.inf, patience=math.inf),
    "never": replace(BASE, limit=0.0),
    "all": replace(BASE, deepest=3, sinks=1, min_context=7, limit=4.5, price=1.5),
}
TUNED = {  # as the kernels are launched elsewhere: there is one piece of one block where nothing is said
    "two kernels": Tuning(4, 2, 1, 2, joined=False),
    "blocks": Tuning(4, 1, 1, 2),
    "pieces": Tuning(4, 3, 1, 1),
}
NUMBA = pytest.param("numba", marks=on_cpu)
impls = pytest.mark.parametrize("impl", ["reference", "triton", NUMBA])


def ring(dtype: torch.dtype = torch.float32, window: int = WINDOW, spare: int = 3) -> Ring:
    """Nothing in it but NaN."""
    made = Ring.new(SEQUENCES, KV_HEADS, (HEADS, window + spare, DIM), torch.empty(0, dtype=dtype, device=PLACE))
    made.query.fill_(torch.nan)
    made.credit.fill_(torch.nan)
    return made


def run(impl: str, rows: Rows, slots: torch.Tensor, held: Ring, rule: Rule, **options: Any) -> Any:
    if impl in TUNED:
        tune = replace(TUNED[impl], warps=1 if PLACE == "cpu" else 4, chained=PLACE == "cuda")
        turn, weight = options.get("turn"), options.get("weight")
        return kernels.match(here(rows), here(slots), held, rule, here(turn), here(weight), tune=tune)
    given = {name: here(x) for name, x in options.items()}
    return match(here(rows), here(slots), held, rule, impl=impl, **given)


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        *((name, "reference") for name in RULES),
        *(pytest.param(name, "numba", marks=on_cpu) for name in RULES),
        *(("all", tuned) for tuned in ("triton", "two kernels")),
        ("reuses", "triton"),
        ("gaps", "blocks"),
        *swept([("all", "pieces"), ("all", "blocks")], 0),
        *swept([(name, "triton") for name in ("guard", "band", "gaps", "forced", "never")], 0),
    ],
)
def test_many_steps(name: str, impl: str) -> None:
    """Ragged sequences in any order, past where the ring wraps: what is decided, noted and counted."""
    rule, held, draw = RULES[name], ring(), torch.Generator().manual_seed(1)
    brute = Brute(rule, HEADS, KV_HEADS, held.size)
    slots, first = torch.tensor([2, 0]), torch.tensor([0, 40])
    reused = searched = rested = 0
    for step in range(60 if PLACE == "cuda" else 14 if impl not in ("reference", "numba") else 44):
        rows = random_rows(2, HEADS, DIM, first + step, draw, torch.float32)
        wants = [brute.row(int(slots[s]), int(p), q) for s, p, q in zip(rows.seq, rows.pos, rows.q, strict=True)]
        got = run(impl, rows, slots, held, rule)
        got = type(got)(*(x.cpu() for x in got))
        agrees(got, type(held)(*(getattr(held, n).cpu() for n in held.__dataclass_fields__)), rows, slots, wants, rule)
        notes = dict(zip(NOTES, got.notes.permute(2, 0, 1), strict=True))
        for r, want in enumerate(wants):
            context = int(rows.pos[r]) + 1
            gaps = [0 if p is None else context - 1 - p for p in want["found"]]
            assert notes["gap"][r].tolist() == gaps
            assert notes["accepted"][r].tolist() == [float(p is not None) for p in want["found"]]
            assert notes["reused"][r].tolist() == [float(p is not None) for p in want["take"]]
            skipped = [max(0, s - rule.sinks) / context if p is not None else 0.0
                       for s, p in zip(want["start"], want["take"], strict=True)]  # fmt: skip
            torch.testing.assert_close(notes["skipped_share"][r], torch.tensor(skipped))
            alone = [0 if p is None else max(0, p + 1 - rule.band - rule.sinks) / context for p in want["found"]]
            torch.testing.assert_close(notes["accepted_share"][r], torch.tensor(alone, dtype=torch.float32))
            depths = notes["depth_0"].new_tensor(want["depth"])
            for low, high in zip(DEPTHS, (*DEPTHS[1:], 1 << 30), strict=True):
                assert torch.equal(notes[f"depth_{low}"][r], ((depths >= low) & (depths < high)).float())
            reused += sum(p is not None for p in want["take"])
            searched += sum(want["searched"])
        rested += int(notes["resting"].sum())
        assert notes["matched"][:, ::3].sum() == sum(sum(w["searched"]) for w in wants)
    assert not bool(held.arrivals.any())
    if name in ("band", "never"):
        assert not reused
    else:
        assert reused > 10, "the rule should be seen at work"
    assert (rested > 0) == (name in ("guard", "reuses", "never", "all"))
    assert searched > 0 or name == "band"


@impls
def test_what_a_row_reads_of_the_ring(impl: str) -> None:
    """Each number counted once: keys and values of rows that are looked through, entries, the guard's account."""
    held, rule = ring(), replace(RULES["depth"], sinks=2, deepest=1000)
    row = Rows(torch.ones(1, HEADS, DIM), torch.tensor([0]), torch.tensor([0]))
    slots = torch.tensor([1])
    for pos in range(20):
        got = run(impl, replace(row, pos=torch.tensor([pos])), slots, held, rule)
        looked = max(0, min(WINDOW, pos - rule.sinks - rule.band))
        hit = int(got.read_entry[0, 0]) >= 0
        assert hit == (pos > rule.sinks + rule.band)
        want = 8 + looked * 3 * (DIM * 4 + 4 + 2) + (3 * ((DIM + 1) * 4 + 2) if hit else 0)
        assert got.reads[0, :, 1].tolist() == [want] * KV_HEADS


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [DIM // 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_queries_are_recovered_alike(layout: Any, pairs: int, weighted: bool, dtype: torch.dtype) -> None:
    """The kernel undoes rotations of all kinds: what it writes into the ring differs from the reference by rounding."""
    draw = torch.Generator().manual_seed(2)
    pos = torch.tensor([5, 100, 7])
    rows = random_rows(3, HEADS, DIM, pos, draw, dtype)
    rows = replace(rows, q=rows.q.transpose(0, 1).contiguous().transpose(0, 1))  # strides of a model's queries
    turn = random_turn(rows.pos, pairs, layout, dtype)
    weight = torch.rand(HEADS, DIM, generator=draw) if weighted else None
    slots, held = torch.arange(3), ring(dtype)
    run("triton", rows, slots, held, BASE, rotary=turn, weight=weight)
    want = recovered(rows.q, turn, weight, dtype)
    for r in range(3):
        found = held.query[int(rows.seq[r]), :, int(rows.pos[r]) % held.size].cpu()
        torch.testing.assert_close(found, want[r], rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    exact = recovered(rows.q.double(), type(turn)(turn.cos.double(), turn.sin.double(), layout),
                      None if weight is None else weight.double(), torch.float64)  # fmt: skip
    torch.testing.assert_close(want.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@impls
def test_nan_neither_matches_nor_spreads(impl: str) -> None:
    held, rule, draw = ring(), RULES["plain"], torch.Generator().manual_seed(3)
    slots = torch.tensor([0])
    clean, same = ring(), torch.randn(1, HEADS, DIM, generator=draw)
    for pos in range(20):
        rows = Rows(same, torch.tensor([0]), torch.tensor([pos]))
        spoilt = pos in (10, 12)
        bad = replace(rows, q=same.clone())
        bad.q[0, 4, 3] = torch.nan
        got = run(impl, bad if spoilt else rows, slots, held, rule)
        want = run(impl, rows, slots, clean, rule)
        if spoilt:  # its KV head attends exactly, the other one is as it was
            assert got.read_entry[0, 3:].tolist() == [-1] * 3 and torch.equal(
                got.read_entry[0, :3], want.read_entry[0, :3]
            )
            continue
        assert bool((got.read_entry >= 0).all()) == bool((want.read_entry >= 0).all())
        size = held.size
        places = (got.read_entry[0].cpu() % size).tolist()
        assert (10 % size not in places[4:5] and 12 % size not in places[4:5]) or int(got.read_entry[0, 4]) == -1
    held.query[0, :, 19 % held.size] = torch.inf
    assert (
        int(run(impl, replace(rows, pos=torch.tensor([20])), slots, held, rule).read_entry[0, 0]) % held.size == 18 % 12
    )


@impls
def test_ties_go_to_the_newest(impl: str) -> None:
    held, rule = ring(), RULES["plain"]
    query, slots = torch.randn(1, HEADS, DIM), torch.tensor([2])
    for pos in range(16):
        got = run(impl, Rows(query, torch.tensor([0]), torch.tensor([pos])), slots, held, rule)
        if pos > rule.band:
            assert got.start[0].tolist() == [pos - rule.band] * HEADS


@pytest.mark.parametrize(
    ("impl", "dtype", "weighted"),
    [
        *(("reference", dtype, weighted) for dtype in (torch.float32, HALF) for weighted in (False, True)),
        ("triton", torch.float32, True),
        ("triton", HALF, False),
        *(pytest.param("numba", dtype, dtype != HALF, marks=on_cpu) for dtype in (torch.float32, HALF, torch.bfloat16)),
    ],
)
def test_rotated_and_recovered_equal_queries_are_ties(impl: str, dtype: torch.dtype, weighted: bool) -> None:
    """Three queries that come again and again, rotated as a model rotates them. Recovered they differ by roundings, yet
    the newest is taken; where nothing is to be near enough, none is."""
    draw, slots = torch.Generator().manual_seed(4), torch.tensor([1])
    kinds = torch.randn(3, HEADS, DIM, generator=draw).to(dtype)
    half = torch.rand(HEADS, DIM // 2, generator=draw)
    weight = torch.cat([half, half], 1) if weighted else None
    held, shut, order = ring(dtype), ring(dtype), [0, 1, 0, 2, 1, 1, 0, 2, 0, 1, 2, 2, 0, 1]
    rule, noise = replace(RULES["plain"], limit=0.5), []
    for pos, kind in enumerate(order):
        turn = random_turn(torch.tensor([7 * pos]), DIM // 2, "half", dtype)
        q = rotate(kinds[kind][None], turn.cos[:, None], turn.sin[:, None])
        rows = Rows(q, torch.tensor([0]), torch.tensor([pos]))
        got = run(impl, rows, slots, held, rule, rotary=turn, weight=weight)
        back = [p for p in range(max(rule.band, pos - WINDOW), pos) if order[p] == kind]
        want = [max(back, default=-1)] * HEADS
        assert [-1 if at < 0 else at % held.size
        for at in got.read_entry[0].tolist()] == [p % held.size if p >= 0 else -1
                                                                                     for p in want]  # fmt: skip
        none = run(impl, rows, slots, shut, replace(rule, limit=0.0), rotary=turn, weight=weight)
        assert none.read_entry[0].tolist() == [-1] * HEADS
        for p in back:
            apart = held.query[1, :, p % held.size].double() - held.query[1, :, pos % held.size].double()
            noise += apart.square().sum(-1).tolist()
    assert len(set(noise)) > 3 and max(noise) < rule.limit, "some of them lie nearer than others"


@pytest.mark.parametrize("impl", ["reference", "triton", "blocks", NUMBA])
def test_a_tie_is_broken_within_the_limit_alone(impl: str) -> None:
    """Rows that 16 bits can hardly tell from equal: only those that are near enough are taken, the newest of them."""
    query, slots, held = torch.full((1, HEADS, DIM), 8.0, dtype=torch.bfloat16), torch.tensor([1]), ring(torch.bfloat16)
    squared = {3: 0.125, 4: 0.1875, 5: 0.0625, 6: 0.1875}  # of row and query; all below (4 u |q|)^2 = 0.25
    for pos in range(9):
        row = query.clone()
        row[..., : round(squared.get(pos, 9.0) / 0.0625)] += 0.25
        run(impl, Rows(row, torch.tensor([0]), torch.tensor([pos])), slots, held, replace(RULES["plain"], limit=0.0))
    for limit, want in ((0.05, -1), (0.1, 5), (0.15, 5), (0.19, 6), (1.0, 6)):
        rule = replace(RULES["plain"], limit=limit)
        found = (
            run(impl, Rows(query, torch.tensor([0]), torch.tensor([9])), slots, held, rule).read_entry[0] % held.size
        )
        assert found.tolist() == [want % held.size] * HEADS or want == -1
        if want == -1:
            assert (
                int(run(impl, Rows(query, torch.tensor([0]), torch.tensor([9])), slots, held, rule).read_entry.max())
                == -1
            )


@pytest.mark.parametrize("impl", ["reference", "triton", "blocks", NUMBA])
def test_a_row_exactly_at_the_threshold_is_not_taken(impl: str) -> None:
    """Equation 3 is strict. The squared distance is 4, and so are all sums on the way there."""
    query, slots, held = torch.zeros(1, HEADS, DIM), torch.tensor([1]), ring()
    query[..., 3] = 8.0
    near = query.clone()
    near[..., 5] = 2.0
    shut, rule = replace(RULES["plain"], limit=0.0), RULES["plain"]
    for pos in range(8):
        row = near if pos == 5 else torch.full_like(query, 50.0 * pos)
        run(impl, Rows(row, torch.tensor([0]), torch.tensor([pos])), slots, held, shut)
    last = Rows(query, torch.tensor([0]), torch.tensor([8]))
    found = run(impl, last, slots, held, replace(rule, limit=4.0)).read_entry
    assert found[0].tolist() == [-1] * HEADS
    found = run(impl, last, slots, held, replace(rule, limit=4.0 + 2.0**-20))
    assert (found.read_entry[0] % held.size).tolist() == [5] * HEADS


@impls
def test_no_row_gives_nothing(impl: str) -> None:
    rows = Rows(torch.empty(0, HEADS, DIM), *torch.empty(2, 0, dtype=torch.int64))
    got = run(impl, rows, torch.empty(0, dtype=torch.int64), ring(), BASE)
    assert [list(x.shape) for x in got] == [[0, HEADS]] * 3 + [[0, KV_HEADS, 2], [0, HEADS, len(NOTES)]]
