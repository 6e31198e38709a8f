"""Failures while a model is measured: their cause, and whether the device still works."""

from __future__ import annotations

import torch

from longreach.errors import InvalidInput, LongreachError, MeasurementFailed, OutOfMemory


def failure(error: Exception, device: torch.device, *, of_sample: bool = False) -> str:
    """A record's text for a crash of the model's code or ours: a failure of the sample that was measured.

    of_sample: whether InvalidInput is one too, as where methods refuse a prompt for its own lengths.
    Raises the error itself where the caller asked wrongly, MeasurementFailed where the device is lost with it.
    """
    counts = isinstance(error, OutOfMemory) or (of_sample and isinstance(error, InvalidInput))
    if isinstance(error, LongreachError) and not counts:
        raise error
    check_device(device, error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def check_device(device: torch.device, after: Exception) -> None:
    """Raise MeasurementFailed where a GPU no longer works: an error inside a kernel fails all later calls too."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        said = (str(lost).splitlines() or [type(lost).__name__])[0]
        raise MeasurementFailed(
            f"the GPU failed inside a kernel ({said}) and no longer works in this process, so nothing more is measured"
        ) from after
