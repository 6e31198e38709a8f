"""top_k's kernels are exact: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops import top_k
from longreach.ops.top_k import triton as kernels
from longreach.ops.top_k.triton import Tuning
from longreach.ops.top_k.triton_sample import SEARCHED, drawn
from tests.ops.top_k.brute import hard_rows, held_to

PLACE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, Triton interprets
# rows of a few blocks go the way of long ones; a sample of a tenth of a row, candidates looked at in several rounds
LONG = Tuning(
    part=32, samples=256, words=32, bracket_warps=1, classify_warps=1, write_warps=1, at_once=256, searched=512,
    room=2, short=0, chained=PLACE == "cuda",
)  # fmt: skip


def check(x: Tensor, count: Tensor, length: Tensor, tune: Tuning | None = LONG, **options: Any) -> list[bool]:
    """Holds the kernels to brute force and to the reference; returns for which rows the slow path was taken."""
    options = {"first": 0, "last": 0, "capacity": x.shape[2], **options}
    index, used, space = kernels.launch(x.to(PLACE), count.to(PLACE), length.to(PLACE), **options, tune=tune)
    index, used = index.cpu(), used.cpu()
    held_to(index, used, x, count, length, options["first"], options["last"])
    wanted, also = top_k(x, count, length, **options, impl="reference")
    assert torch.equal(used, also)
    there = torch.arange(index.shape[2]) < torch.where(used <= index.shape[2], used, 0)[..., None]
    assert torch.equal(index[there], wanted[there])
    busy = (used > 0) & (used <= options["capacity"])
    marks = space.marks[:, SEARCHED.value].cpu() if space else torch.zeros(used.numel())
    return [bool(b) and int(m) == 1 for b, m in zip(busy.flatten(), marks, strict=True)]


@pytest.mark.parametrize("share", [0.1, 0.45])
def test_long_rows_of_all_kinds(share: float) -> None:
    """None of them takes the slow path but the one that is short of numbers; what lies past the length is poison."""
    x = torch.cat([hard_rows(1500), torch.full((1, 15, 104), torch.nan)], -1)
    count = torch.full((1, x.shape[1]), int(share * 1500))
    searched = check(x, count, torch.tensor([1500]), first=3, last=17)
    assert searched == [row == 8 and share > 0.4 for row in range(15)]


@triton.jit
def sample_of(out, size, SAMPLES: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SAMPLES)
    tl.store(out + i, drawn(i, size, SAMPLES))


def test_samples_that_mislead() -> None:
    """Rows made against the very columns that are looked at, and more candidates than there is room for."""
    columns = 1800
    sample = torch.empty(256, dtype=torch.int32, device=PLACE)
    sample_of[(1,)](sample, columns, SAMPLES=256)
    sample = sample.cpu().long()
    assert len(set(sample.tolist())) == 256 and int(sample.max()) < columns
    normal = torch.randn(columns)
    there = torch.zeros(columns, dtype=torch.bool).index_fill(0, sample, True)
    x = torch.stack(
        [
            torch.where(there, normal + 10, normal),  # all that is seen is large: the bracket lies too high
            torch.where(there, normal - 10, normal),  # too low
            torch.where(there, 5.0, normal),  # ties at a value that is not the k-th
            torch.where(there, 0.5, torch.nan),  # fewer numbers than are wanted
            normal,  # candidates without room
            torch.where(normal > 2, normal, 0.0),  # a row that is none of this
        ]
    )[None]
    count = torch.full((1, 6), 300)
    searched = check(x, count, torch.tensor([columns]), tune=replace(LONG, room=16))
    assert searched == [True, True, True, True, True, False]


def test_counts_and_lengths() -> None:
    """Each row its own: nothing wanted, everything, more than there is, more than fits, rows of one column or none."""
    x = torch.randn(4, 3, 1501)
    count = torch.tensor([[0, 1, 1501], [4000, 150, 400], [5, -2, 1], [7, 20, 0]], dtype=torch.int32)
    length = torch.tensor([[1501, 1501, 1501], [1500, 700, 1100], [4, 30, 1], [0, 33, 0]], dtype=torch.int32)
    check(x, count, length, capacity=450)
    check(x[:2], count[:2], length[:2, 0], first=100, last=120, capacity=2000)


@pytest.mark.parametrize("piece", [8, 16])
def test_ties_among_candidates(piece: int) -> None:
    """Values that several columns share, too few for marks of ties: the k-th cuts through those that hold it."""
    x = torch.stack([torch.randperm(1500) // ties for ties in (2, 3, 4, 6)]).float()[None]
    count = torch.tensor([[101, 151, 303, 700]])
    assert not any(check(x, count, torch.tensor([1500]), tune=replace(LONG, piece=piece, at_once=64), last=5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_memory_of_any_layout(dtype: torch.dtype) -> None:
    """Slices of larger tensors, heads outermost, counts and lengths that are columns of something else."""
    memory = torch.randn(2, 3, 1600).to(dtype)
    x = memory[:, 1:, 3:1503].transpose(0, 1)
    count = torch.tensor([[100, 7, 90], [20, 8, 300]])[:, ::2]
    length = torch.tensor([[1500, 0], [1203, 0]])[:, 0]
    check(x, count, length, last=2)
    check(x, count, length, tune=None)


def test_short_rows() -> None:
    for columns, heads in ((1, 2), (2, 2), (31, 4), (127, 4), (128, 3), (300, 6)):
        count = torch.randint(-1, columns + 3, (2, heads))
        length = torch.randint(0, columns + 1, (2, heads))
        check(torch.randn(2, heads, columns), count, length, tune=None, first=columns // 20, last=columns // 9)
    for k in (1, 40, 290, 300):
        x = hard_rows(300)
        check(x, torch.full((1, x.shape[1]), k), torch.tensor([300]), tune=None)


def test_nothing_at_all() -> None:
    for shape in ((0, 2, 5), (2, 0, 5), (2, 1, 0)):
        index, used, _ = kernels.launch(
            torch.zeros(shape, device=PLACE), torch.ones(shape[:2], dtype=torch.int64, device=PLACE),
            torch.zeros(shape[0], dtype=torch.int64, device=PLACE), first=1, last=1, capacity=3,
        )  # fmt: skip
        assert index.shape == (*shape[:2], 3) and not used.any()


def test_what_memory_held_before_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are equal to the bit, over zeros, ones and garbage in what is allocated, the results' memory included."""
    x, count, length = hard_rows(1300)[:, 2:6], torch.tensor([[100, 130, 40, 600]]), torch.tensor([1200])
    plain = torch.empty
    for filling in (0, -1, 0x55555555):
        monkeypatch.setattr(torch, "empty", lambda *size, filling=filling, **how: plain(*size, **how).fill_(filling))
        check(x, count, length, first=5)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    one = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(Unsupported, match="run on CUDA devices, got cpu; use impl='reference'"):
        top_k(torch.zeros(1, 1, 3), one, one, capacity=1, impl="triton")
