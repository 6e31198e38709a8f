"""The launcher of ranks: results in order, errors told, nothing left running."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from longreach.testing.ranks import RankFailed, run_on_ranks


def add_up(rank: int, world: int, first: int, more: dict[str, Any]) -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(rank + first + more["second"])])
    dist.all_reduce(x)
    return rank, world, float(x)


def fail_on_one(rank: int, world: int, pids: str) -> None:
    import torch
    import torch.distributed as dist

    (Path(pids) / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        raise ValueError("this rank is out of sorts")
    dist.all_reduce(torch.zeros(1))  # waits for rank 1 for ever


@pytest.mark.sweep  # tests/adapters/transformers/test_shard.py takes the results of two ranks
def test_every_rank_returns_its_result() -> None:
    assert run_on_ranks("tests.testing.test_ranks:add_up", 10, {"second": 5}) == [(0, 2, 31.0), (1, 2, 31.0)]


@pytest.mark.sweep
def test_a_failing_rank_is_told_and_the_others_are_stopped(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1 ended with 1:.*ValueError: this rank is out of sorts"):
        run_on_ranks("tests.testing.test_ranks:fail_on_one", str(tmp_path), seconds=100)
    assert time.monotonic() - started < 60
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
