"""MagicPIG's attention step in one call and by longreach's ops part by part, and its check against fp64."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longreach.bench.cpu.inputs import SINKS, Preset, Problem
from longreach.ops import Lists, Partial, Span, Spans, absolute, attend, merge, relative
from longreach.ops.simhash import HashTables, attend_sampled, codes, collide, weigh

PARTS = ("codes", "collide", "weigh", "attend", "merge")


@dataclass(frozen=True)
class Result:
    """A step's output, its lists, and its seconds."""

    whole: Partial
    lists: Lists
    seconds: float


class Step:
    """The attention step of one preset over a problem, with tables that hold all its keys.

    made: directions and tables, shared by presets that differ in `share` alone. impl: who computes.
    """

    def __init__(self, problem: Problem, preset: Preset, made: tuple[Tensor, HashTables], impl: str = "numba"):
        self.problem, self.preset, self.impl = problem, preset, impl
        self.directions, self.tables = made
        stop = int(self.tables.stop[0])
        self.always = Spans((Span(absolute(0), absolute(SINKS)), Span(absolute(stop), relative(1))))
        self.slots, self.limit = torch.tensor([0]), torch.tensor([problem.shape.context // 2])

    @torch.no_grad()
    def run(self) -> Result:
        """In one call, as the method does."""
        problem = self.problem
        started = time.perf_counter()
        found = attend_sampled(
            problem.rows, problem.kv, self.slots, self.tables, self.directions, problem.centre, self.limit,
            share=self.preset.share, sinks=SINKS, scale=problem.shape.scale, impl=self.impl,  # type: ignore[arg-type]
        )  # fmt: skip
        seconds = time.perf_counter() - started
        assert found.lists is not None
        return Result(found.partial, found.lists, seconds)

    @torch.no_grad()
    def parts(self) -> tuple[float, ...]:
        """Seconds of each of PARTS, by an op each."""
        problem, preset, impl = self.problem, self.preset, self.impl
        rows, kv, scale = problem.rows, problem.kv, problem.shape.scale
        marks = [time.perf_counter()]
        found_codes = codes(rows.q, self.directions, impl=impl)
        marks.append(time.perf_counter())
        found = collide(
            rows, self.tables, found_codes, capacity=problem.shape.context // 2,
            share=preset.share, impl=impl,  # type: ignore[arg-type]
        )  # fmt: skip
        room = max(1, int(found.count.max()))  # shorter lists are checked and counted faster
        found = replace(found, index=found.index[..., :room].contiguous(), met=found.met[..., :room].contiguous())
        marks.append(time.perf_counter())
        lists = found.lists(weigh(rows, kv, self.tables, found, problem.centre, impl=impl).log_weight)
        marks.append(time.perf_counter())
        sampled = attend(rows, kv, lists, scale=scale, impl=impl)
        kept = attend(rows, kv, self.always, scale=scale, impl=impl)
        marks.append(time.perf_counter())
        merge(kept, sampled)
        marks.append(time.perf_counter())
        return tuple(b - a for a, b in pairwise(marks))

    def reads(self, lists: Lists) -> dict[str, Any]:
        """rows: of keys that attend gathers, as often as it does. keys_read: share of all keys that a KV head reads at
        least once."""
        problem, union = self.problem, 0
        group = problem.shape.heads // problem.shape.kv_heads
        width = 1 if lists.per == "kv" else group
        for head in range(problem.shape.kv_heads):
            some = [lists.index[0, h, : int(lists.count[0, h])] for h in range(head * width, (head + 1) * width)]
            union += torch.cat(some).unique().numel()
        return {
            "rows": int(lists.count.sum()),
            "keys_read": union / (problem.shape.kv_heads * problem.shape.context),
        }


@torch.no_grad()
def exact(problem: Problem, lists: Lists | None, stop: int) -> Tensor:
    """fp64 [H, D]: softmax over the lists with their weights, sinks and keys from `stop` on; lists None: over all."""
    shape, kv = problem.shape, problem.kv
    group, found = shape.heads // shape.kv_heads, list[Tensor]()
    q = problem.rows.q[0].double().view(shape.kv_heads, group, shape.dim) * shape.scale
    for head in range(shape.kv_heads):
        logits = q[head] @ kv.k[0, head].double().T
        if lists is not None:
            logits += torch.stack([_weights(lists, head * group + i, group, stop, shape.context) for i in range(group)])
        found.append(torch.softmax(logits, -1) @ kv.v[0, head].double())
    return torch.cat(found)


def _weights(lists: Lists, h: int, group: int, stop: int, context: int) -> Tensor:
    """fp64 [N]: what is added to the logits of query head h, -inf for keys that it does not attend to."""
    assert lists.log_weight is not None
    mine = h if lists.per == "query" else h // group
    n = int(lists.count[0, mine])
    weight = torch.zeros(context, dtype=torch.float64)
    weight[SINKS:stop] = -torch.inf
    weight[lists.index[0, mine, :n].long()] = lists.log_weight[0, mine, :n].double()
    return weight


def distance(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| / |want| of each head."""
    return (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
