"""Whose failure an error is, and when a GPU is lost."""

from __future__ import annotations

import pytest
import torch

from longreach.errors import InvalidInput, MeasurementFailed, OutOfMemory, Unsupported
from longreach.evals.failures import failure

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_crashes_are_told_in_a_line_and_what_is_asked_wrongly_is_raised() -> None:
    assert failure(RuntimeError("a kernel\nfailed"), CPU) == "RuntimeError: a kernel failed"
    assert failure(OutOfMemory("too much"), CPU) == "OutOfMemory: too much"
    with pytest.raises(InvalidInput, match="no such"):
        failure(InvalidInput("no such"), CPU)
    assert failure(InvalidInput("too long"), CPU, of_sample=True) == "InvalidInput: too long"
    with pytest.raises(Unsupported, match="changed"):
        failure(Unsupported("changed"), CPU, of_sample=True)


def test_a_gpu_that_still_works_goes_on_and_one_that_does_not_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", probed.append)
    assert failure(RuntimeError("CUDA error: invalid argument"), GPU) == "RuntimeError: CUDA error: invalid argument"
    assert probed == [GPU]

    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(MeasurementFailed, match=r"\(CUDA error: device-side assert triggered\) and no longer works"):
        failure(IndexError("out of range"), GPU)
    assert failure(IndexError("out of range"), CPU) == "IndexError: out of range"
