"""top_k's case: what is timed is checked, and a wrong column is found."""

from __future__ import annotations

import pytest
import torch

from longreach.bench.case import TOP_K
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.run import run_case
from longreach.bench.top_k import check
from longreach.ops.top_k import top_k

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.group == TOP_K])
def test_a_case_runs_beside_torch(name: str) -> None:
    case = tiny(CASES[name])
    result = run_case(case, CPU, replays=2)
    assert [(e["who"], e["error"]) for e in result["entries"]] == [("longreach", 0.0), ("torch", 0.0)]
    rows, most = case.shape.batch * case.shape.kv_heads, int(0.1 * case.shape.context)
    assert result["bytes_needed"] == 4 * rows * (case.shape.context + most)


def test_targets_are_the_times_that_must_be_reached() -> None:
    named = {name: case.targets for name, case in CASES.items() if case.group == TOP_K}
    assert {name: [(t.quantity, t.bound, t.of) for t in targets] for name, targets in named.items()} == {
        "top-k-128k-256": [("microseconds", 100.0, "top_k")],
        "top-k-128k-8": [("microseconds", 25.0, "top_k")],
    }


def test_other_columns_are_found() -> None:
    x = torch.rand(2, 3, 50)
    count, length = torch.full((2, 3), 5), torch.full((2,), 50)
    index, _ = top_k(x, count, length, capacity=5)
    check(index, x, 5)
    worst = x[1, 2].argmin()
    index[1, 2, 0] = worst
    with pytest.raises(WrongResult, match="1 of 6 rows"):
        check(index, x, 5)
    index, _ = top_k(x, count, length, capacity=5)
    with pytest.raises(WrongResult, match="of 6 rows"):
        check(index.flip(-1), x, 5)
