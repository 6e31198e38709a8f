"""attend_blocks against the mixture of each level's attention in fp64; under Triton's interpreter without a GPU."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported
from longreach.ops import KVView, Partial, Rows
from longreach.ops.attend import attend
from longreach.ops.mix import attend_blocks
from longreach.ops.selection import Lists, Span, Spans, absolute, relative
from longreach.ops.types import Pieces
from longreach.testing.inputs import poison, random_kv, random_rows
from tests.ops.attend.kernels import HALF, here
from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

impls = pytest.mark.parametrize("impl", ["reference", "triton"])
COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import Rows
from longreach.ops.mix import attend_blocks, triton_blocks, triton_blocks_kernels
from longreach.ops.recall import attend_summaries, recall_and_attend, triton, triton_attending
from longreach.ops.recall import triton_attending_kernels, triton_kernels
from longreach.testing.compile import compiling, spilled
from longreach.testing.inputs import random_kv

dim, group, dtype, page, batch = json.loads(sys.argv[1])
refuse = lambda *a: None
with (
    patch.object(triton_attending, "refuse", refuse), patch.object(triton_blocks, "refuse", refuse),
    patch.object(triton.Tuning, "programs", lambda s, d: 132 * s.per_sm),
    patch.object(triton_blocks, "_multiprocessors", lambda d: 132),
    compiling(triton_attending_kernels, "attend") as summaries, compiling(triton_kernels, "choose") as choice,
    compiling(triton_blocks_kernels, "attend", "mix") as levels,
):
    kv = random_kv([300] * batch, heads=2, dim=dim, page=page, dtype=getattr(torch, dtype))
    means = random_kv([2040] * batch, heads=2, dim=dim, page=page, dtype=kv.k.dtype)
    seq = torch.arange(batch)
    rows = Rows(torch.zeros(batch, 2 * group, dim, dtype=kv.k.dtype), seq, seq)
    start, stop = torch.zeros_like(seq), torch.full_like(seq, 2040)
    index, used, pieces = recall_and_attend(rows, means, start, stop, count=8, scale=0.1, impl="triton")
    attend_summaries(rows, means, None, stop, scale=0.1, impl="triton")
    given = {"block": 64, "window": 576, "scale": 0.1, "impl": "triton"}
    index.zero_()
    attend_blocks(rows, kv, start, (index % 4, used), pieces, torch.ones(1, 3).expand(batch, 3), **given)
    attend_blocks(rows, kv, start, None, None, torch.ones(batch, 1), levels=(1,), **given)
print(json.dumps([[m.metadata.name, m.metadata.shared, spilled(m)] for m in (*summaries, *choice, *levels)]))
"""


@dataclass(frozen=True)
class Case:
    rows: Rows
    kv: KVView
    first: Tensor
    recalled: tuple[Tensor, Tensor] | None
    summaries: Pieces | None
    weights: Tensor
    options: dict[str, Any]


def make_case(seed: int, *, dim: int | None = None, group: int | None = None) -> Case:
    """Any combination of what attend_blocks promises, small; what no row reads is NaN."""
    dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    block, before, heads = dice.choice((1, 4, 5, 16)), dice.choice((1, 2, 4)), dice.choice((1, 2, 3))
    dim, group = dim or dice.choice((8, 24, 64)), group or dice.choice((1, 2, 3, 4, 8))
    kv = random_kv(
        [dice.choice((1, 2, 7, 16, 40, 90)) for _ in range(dice.choice((1, 2, 3)))], heads=heads, dim=dim,
        page=dice.choice((None, None, 1, 3, 16)), memory=dice.choice(("plain", "packed", "tokens")),
        dtype=dice.choice((HALF, torch.float32)), ints=dice.choice((torch.int32, torch.int64)), seed=seed,
    )  # fmt: skip
    rows = random_rows(kv, dice.choice((0, 1, 2, 5)), group=group, seed=seed)
    count, slot = rows.q.shape[0], rows.pos.long()
    first = (slot // block * block - before * block).clamp(min=0).to(rows.pos.dtype)
    levels = dice.choice(((1,), (1, 2), (1, 3), (1, 2, 3), (1, 2, 3)))
    recalled = summaries = None
    if 3 in levels and dice.random() < 0.9:
        capacity = dice.choice((1, 3, 8))
        used = torch.minimum(first.long() // block, torch.tensor(dice.choice((1, capacity))))
        index = torch.zeros(count, heads, capacity, dtype=torch.int32)
        for row in range(count):
            for head in range(heads):
                some = torch.randperm(int(first[row]) // block, generator=draw)[: int(used[row])].sort().values
                index[row, head, : len(some)] = some.int()
        recalled = index, used[:, None].expand(-1, heads).int().contiguous()
    if 2 in levels and dice.random() < 0.9:
        shape = dice.choice((1, 2, 5)), count, heads * group
        lse = torch.where(torch.rand(shape, generator=draw) < 0.3, -torch.inf, torch.randn(shape, generator=draw))
        out = torch.randn(*shape, dim, generator=draw).masked_fill((lse == -torch.inf)[..., None], torch.nan)
        summaries = Pieces(out, lse)
    weights = torch.randn(count, len(levels), generator=draw) + dice.choice((-1.0, 0.0, 1.0))
    hidden(kv, rows, first, recalled, block)
    options = {"block": block, "window": (before + 1) * block, "scale": dim**-0.5, "levels": levels}
    return Case(rows, kv, first, recalled, summaries, weights, options)


def hidden(kv: KVView, rows: Rows, first: Tensor, recalled: tuple[Tensor, Tensor] | None, block: int) -> None:
    """Poison the slots that no row reads."""
    for seq in range(kv.sequences):
        for head in range(kv.heads):
            read = set[int]()
            for row in (rows.seq == seq).nonzero()[:, 0].tolist():
                last = min(int(rows.pos[row]) + 1, int(kv.seq_lens[seq]))
                read |= set(range(int(first[row]), last))
                if recalled is not None:
                    for n in recalled[0][row, head, : int(recalled[1][row, head])].tolist():
                        read |= set(range(n * block, min((n + 1) * block, last)))
            poison(kv, seq, head, set(range(int(kv.seq_lens[seq]))) - read)


def exact(case: Case) -> Partial:
    """In fp64, by the formula."""
    rows, kv = replace(case.rows, q=case.rows.q.double()), replace(case.kv, k=case.kv.k.double(), v=case.kv.v.double())
    scale, levels = case.options["scale"], case.options["levels"]
    near = Spans((Span(absolute(case.first[:, None]), relative(1)),))
    parts = [(1, attend(rows, kv, near, scale=scale, impl="reference"))]
    if case.recalled is not None:
        listed = Lists(*case.recalled, block=case.options["block"])
        parts.append((3, attend(rows, kv, listed, scale=scale, impl="reference")))
    if case.summaries is not None:
        for out, lse in zip(case.summaries.out.double(), case.summaries.lse.double(), strict=True):
            parts.append((2, Partial(out.nan_to_num(0.0), lse)))
    total, values = torch.zeros(rows.q.shape[:2]).double(), torch.zeros_like(rows.q)
    for level, part in parts:
        w = case.weights.double().clamp(min=0)
        w = torch.where((w == 0).all(1, keepdim=True) & (torch.arange(w.shape[1]) == 0), 1.0, w)
        size = w[:, levels.index(level), None] * part.lse.exp()
        total, values = total + size, values + size[..., None] * part.out
    return Partial(values / total.masked_fill(total == 0, 1.0)[..., None], total.log())


def compared(case: Case, impl: str) -> None:
    got = attend_blocks(
        here(case.rows), here(case.kv), here(case.first), here(case.recalled), here(case.summaries),
        here(case.weights), **case.options, impl=impl,
    )  # fmt: skip
    want, half = exact(case), case.kv.k.dtype != torch.float32
    for mine, theirs in ((got.out, want.out), (got.lse, want.lse)):
        close = 4 * torch.finfo(case.kv.k.dtype).eps if half else 3e-5
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=close, atol=close)


@impls
@pytest.mark.parametrize("seed", swept(range(80), 24))
def test_any_case(impl: str, seed: int) -> None:
    compared(make_case(seed), impl)


@pytest.mark.parametrize(("group", "dim"), swept([(1, 80), (5, 128), (16, 64), (16, 256), (3, 256), (8, 80)], 3))
def test_groups_and_head_dims(group: int, dim: int) -> None:
    for seed in (1, 2):
        compared(make_case(seed, dim=dim, group=group), "triton")


@impls
def test_weights(impl: str) -> None:
    """A level of weight 0, or less, has no part, whatever its keys; none above 0 leaves level 1."""
    case = next(c for c in map(make_case, range(100)) if c.weights.shape[1] == 3 and len(c.weights) > 1)
    for weights in ((0.0, 0.0, 0.0), (-1.0, -2.0, -0.5), (0.0, 2.0, -1.0), (1e-30, 0.0, 1e30), (0.3, 8.0, 1.0)):
        row = torch.tensor(weights).expand(case.rows.q.shape[0], 3)
        compared(replace(case, weights=row), impl)


def wrong() -> list[tuple[dict[str, Any], str]]:
    ints = torch.zeros(1, dtype=torch.int64)
    index, used = torch.zeros(1, 2, 3, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    pieces = Pieces(torch.zeros(1, 1, 6, 8), torch.zeros(1, 1, 6))
    return [
        ({"first": ints.float()}, r"first: expected int \[R=1\] on cpu"),
        ({"first": ints - 1}, "first: expected >= 0, got -1"),
        ({"block": 0}, "block: expected a count of keys >= 1, got 0"),
        ({"window": 0}, "window: expected a count of keys >= 1, got 0"),
        ({"levels": (2, 3)}, "levels: expected 1 and then some of 2 and 3"),
        ({"weights": torch.ones(1, 2)}, r"weights: expected float \[1, 3\] on cpu"),
        ({"levels": (1, 2), "weights": torch.ones(1, 2)}, "recalled: expected 3 among levels"),
        ({"levels": (1, 3), "weights": torch.ones(1, 2)}, "summaries: expected 2 among levels"),
        ({"summaries": pieces}, r"summaries: expected pieces of \[1, 4, 8\]"),
        ({"recalled": (index.long(), used)}, r"recalled: expected int32 \[1, 2, C\]"),
        ({"recalled": (index, used.long())}, r"recalled: expected counts int32 \[1, 2\]"),
        ({"recalled": (index + 9, used)}, "recalled: expected blocks below 3, got 9"),
    ]


@pytest.mark.parametrize(("given", "message"), wrong(), ids=range(len(wrong())))
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    kv, ints = random_kv([7], heads=2, dim=8), torch.zeros(1, dtype=torch.int64)
    good: dict[str, Any] = {
        "rows": Rows(torch.zeros(1, 4, 8), ints, ints), "kv": kv, "first": ints,
        "recalled": (torch.zeros(1, 2, 3, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)),
        "summaries": Pieces(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4)), "weights": torch.ones(1, 3),
        "block": 4, "window": 8, "scale": 0.1,
    }  # fmt: skip
    with pytest.raises(InvalidInput, match=message):
        attend_blocks(**good | given)


def test_fp64_is_for_the_reference() -> None:
    kv, ints = random_kv([7], heads=2, dim=8, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    rows = Rows(torch.zeros(1, 4, 8).double(), ints, ints)
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        attend_blocks(here(rows), here(kv), here(ints), None, None, here(torch.ones(1, 1)), block=4, window=8,
                      scale=0.1, levels=(1,), impl="triton")  # fmt: skip


COMPILED = [
    (128, 4, "bfloat16", None, 1),
    (128, 4, "bfloat16", 16, 32),
    (128, 4, "bfloat16", None, 64),
    (64, 16, "float16", 48, 4),
    (256, 1, "float32", None, 16),
    (80, 8, "float32", 16, 1),
]


@pytest.mark.parametrize(("dim", "group", "dtype", "page", "batch"), swept(COMPILED, 2))
def test_compiles_for_an_h200(dim: int, group: int, dtype: str, page: int | None, batch: int) -> None:
    found = printed(COMPILE, json.dumps([dim, group, dtype, page, batch]))
    assert [name for name, _, _ in found] == ["attend", "attend", "choose", "attend", "mix", "attend", "mix"]
    for name, shared, spills in found:
        assert shared <= SHARED_MEMORY and spills <= 64, (name, shared, spills)


@impls
def test_nan_stays(impl: str) -> None:
    """Of a key that is read, a query, or a weight: in the rows that it concerns, and in these alone."""
    kv = random_kv([20, 20], heads=1, dim=16, dtype=torch.float32, seed=3)
    rows = Rows(torch.randn(2, 2, 16), torch.tensor([0, 1]), torch.tensor([19, 19]))
    given: dict[str, Any] = {"block": 4, "window": 8, "scale": 0.25, "levels": (1,), "impl": impl}
    for broken in ("key", "query", "weight"):
        q, k, weights = rows.q.clone(), kv.k.clone(), torch.ones(2, 1)
        if broken == "key":
            k[0, 0, 18, 3] = torch.nan
        elif broken == "query":
            q[0, 0, 5] = torch.nan
        else:
            weights[0] = torch.nan
        some = here(replace(rows, q=q)), here(replace(kv, k=k)), here(torch.tensor([12, 12]))
        got = attend_blocks(*some, None, None, here(weights), **given)
        assert bool(got.out[0, 0].isnan().all()), broken
        assert bool(got.out[1].isfinite().all() and got.lse[1].isfinite().all()), broken
