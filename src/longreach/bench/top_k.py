"""Run a case of top_k: scores like those of Kascade's anchors, compared with torch.topk and sorted columns."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.targets import judge
from longreach.bench.timing import Timing, copies_needed, measure
from longreach.ops.top_k import top_k

GROUP = 4  # query heads whose probabilities are summed


def run_top_k(case: Case, device: torch.device, *, replays: int = 21, seed: int = 0) -> dict[str, Any]:
    """Measure a case; the result as a record's part. Raises WrongResult for other columns than the largest.

    Rows are softmax probabilities of normal logits of deviation 3, summed over GROUP heads.
    """
    shape, most = case.shape, case.reads.keys(case.shape.context)
    size = shape.batch, shape.kv_heads, shape.context
    needed = 4 * shape.batch * shape.kv_heads * (shape.context + most)
    draw = torch.Generator(device).manual_seed(seed)
    scores = [_scores(size, draw, device) for _ in range(copies_needed(needed, device))]
    count = torch.full(size[:2], most, dtype=torch.int32, device=device)
    length = torch.full(size[:1], shape.context, dtype=torch.int32, device=device)
    impl = case.impls[0]
    ours = [partial(top_k, x, count, length, capacity=most, impl=impl) for x in scores]
    theirs = [partial(_torch, x, most) for x in scores]
    check(ours[0]()[0], scores[0], most)
    times = measure({"longreach": ours, "torch": theirs}, device, replays=replays)
    check(ours[0]()[0], scores[0], most)  # again: what calls leave behind would show now
    names = {"longreach": ("top_k", impl), "torch": ("torch.topk, columns sorted", "torch")}
    entries = [_entry(*names[who], who, times[who], needed) for who in names]
    return {
        "shape": asdict(shape),
        "reads": asdict(case.reads),
        "bytes_needed": needed,
        "copies": len(scores),
        "seed": seed,
        "error_bound": 0.0,
        "timing": {"how": times["longreach"].how, "replays": replays, "warm_up": 3},
        "baselines": {"versions": {}, "left_out": [], "tried": {}},
        "entries": entries,
        "targets": judge(case, entries),
    }


def _scores(size: tuple[int, int, int], draw: torch.Generator, device: torch.device) -> Tensor:
    total = torch.zeros(size, device=device)
    for _ in range(GROUP):
        total += torch.empty(size, device=device).normal_(generator=draw).mul_(3.0).softmax(-1)
    return total


def _torch(x: Tensor, most: int) -> Tensor:
    return torch.topk(x, most, dim=-1, sorted=False).indices.sort(-1).values


def check(index: Tensor, x: Tensor, most: int) -> None:
    """Raise WrongResult unless each row names its `most` largest columns, ascending, ties to the lower one."""
    want = x.sort(dim=-1, descending=True, stable=True).indices[..., :most].sort(-1).values
    if not torch.equal(index[..., :most].long(), want):
        rows = int((index[..., :most].long() != want).any(-1).sum())
        raise WrongResult(f"top_k: {rows} of {want.shape[0] * want.shape[1]} rows name other columns than the largest")


def _entry(name: str, impl: str, who: str, timing: Timing, needed: int) -> dict[str, Any]:
    return {
        "name": name,
        "who": who,
        "settings": {"impl": impl},
        **timing.recorded(),
        "tb_per_s": needed / timing.median / 1e12,
        "error": 0.0,
    }
