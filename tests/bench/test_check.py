"""What is wrong has no time."""

from __future__ import annotations

import pytest
import torch

from longreach.bench.case import Case, Memory, Shape
from longreach.bench.check import WrongResult, require_right
from longreach.bench.inputs import Inputs
from longreach.ops import attend

MEMORY = Memory(16)


@pytest.fixture
def made() -> Inputs:
    return Inputs(Case("it", "group", Shape(2, 64, 1, 4, 2, 16, "float32")), torch.device("cpu"))


def output(made: Inputs) -> torch.Tensor:
    return attend(made.rows(0, 1), made.view(0, MEMORY), made.selection(0, 1), scale=made.scale).out


def test_a_right_output_passes(made: Inputs) -> None:
    assert require_right("it", made, MEMORY, 1, output(made)) < 1e-5


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_missing_key_is_seen(made: Inputs, sequence: int) -> None:
    out = output(made)
    made.seq_lens[sequence] -= 1
    wrong = output(made)
    assert not torch.equal(out, wrong)
    with pytest.raises(WrongResult, match="does not count"):
        require_right("it", made, MEMORY, 1, wrong)


def test_nan_anywhere_is_seen(made: Inputs) -> None:
    out = output(made)
    out[1, 3, 15] = torch.nan
    with pytest.raises(WrongResult, match="nan"):
        require_right("it", made, MEMORY, 1, out)
