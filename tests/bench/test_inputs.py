"""Inputs: layouts are views of the same numbers, pages are permuted, lists differ and ascend, bytes add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench.case import Case, Memory, Reads, Shape
from longreach.bench.check import exact
from longreach.bench.inputs import Inputs, bytes_needed, flops_needed
from longreach.errors import InvalidInput
from longreach.ops import attend

CPU = torch.device("cpu")
SHAPE = Shape(2, 64, 2, 4, 2, 16, "float32")


def inputs(reads: Reads, shape: Shape = SHAPE) -> Inputs:
    return Inputs(Case("it", "group", shape, reads), CPU, seed=3)


def test_pages_are_a_permutation_of_the_pool() -> None:
    table = inputs(Reads()).table(16)
    assert table.shape == (2, 4)
    assert sorted(table.flatten().tolist()) == list(range(8)) != table.flatten().tolist()


def test_lists_ascend_without_repetition_and_differ() -> None:
    (lists,) = inputs(Reads("list", share=0.25)).lists
    assert lists.shape == (2, 2, 16)
    assert bool((lists.diff(dim=-1) > 0).all())
    assert len({tuple(x) for x in lists.flatten(0, 1).tolist()}) == 4


def test_layouts_share_memory() -> None:
    made = inputs(Reads())
    pointers = {made.kv(0, Memory(page, order))[0].data_ptr() for page in (None, 16) for order in ("heads", "tokens")}
    assert len(pointers) == 1


@pytest.mark.parametrize("memory", [Memory(), Memory(16), Memory(32, "tokens")])
@pytest.mark.parametrize("reads", [Reads(), Reads("window", 4, 20), Reads("window", 0, 9), Reads("list", share=0.25)])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_yardstick_agrees_with_attend(memory: Memory, reads: Reads, rows: int) -> None:
    made = inputs(reads)
    out = attend(made.rows(0, rows), made.view(0, memory), made.selection(0, rows), scale=made.scale).out
    want = torch.stack(
        [torch.cat([exact(made, memory, rows, 0, b, g, r) for g in range(2)]) for b in range(2) for r in range(rows)]
    )
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "context"), [(4, 4), (2, 4)])
def test_operations_are_those_of_the_keys_that_rows_see(rows: int, context: int) -> None:
    seen = sum(context - rows + 1 + row for row in range(rows))
    case = Case("it", "prefill", Shape(2, context, rows, 4, 2, 16))
    assert flops_needed(case) == 2 * 4 * seen * 16 * 4  # sequences, heads, keys, channels, two multiply-adds
    assert all(run.first == context - rows for run in Inputs(case, CPU).rows(0, rows).runs or ())


@pytest.mark.parametrize(
    ("reads", "rows", "keys"),
    [
        (Reads(), 1, 64),
        (Reads("window", 4, 20), 1, 24),
        (Reads("window", 4, 20), 2, 25),
        (Reads("list", share=0.25), 1, 16),
    ],
)
def test_bytes_needed_are_keys_and_values_once_a_kv_head(reads: Reads, rows: int, keys: int) -> None:
    case = Case("it", "group", Shape(2, 64, rows, 4, 2, 16, "bfloat16"), reads)
    assert bytes_needed(case) == 2 * 2 * 2 * keys * 16 * 2


@pytest.mark.parametrize(
    ("reads", "shape", "message"),
    [
        (Reads(), {"context": 1000}, "context: expected a multiple of 16, the page size, got 1000"),
        (Reads(), {"context": 16, "rows": 17}, r"rows: expected at most 16, the context, got 17"),
        (Reads(), {"heads": 5}, r"heads: expected 1 to 16 times the 2 KV heads, got 5"),
        (Reads(), {"heads": 34}, r"heads: expected 1 to 16 times the 2 KV heads, got 34"),
        (Reads("list", share=0.01), {}, r"list: 0\.01 of 64 keys is none"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_measured_are_named(reads: Reads, shape: dict[str, Any], message: str) -> None:
    case = Case("it", "group", replace(SHAPE, **shape), reads, (Memory(), Memory(16)))
    with pytest.raises(InvalidInput, match=message):
        Inputs(case, CPU)
