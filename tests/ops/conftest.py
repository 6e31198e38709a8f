"""What tests of several ops use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 3])
def workers(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads of the CPU's kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
