"""Peak memory of a GPU, in bytes that torch has allocated; None on the CPU."""

from __future__ import annotations

import gc

import torch


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes allocated now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int | None:
    """The most that was allocated since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def total_bytes(device: torch.device) -> int:
    """Bytes of a GPU's memory."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def reset_peak(device: torch.device) -> None:
    """Measure the peak from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release(device: torch.device) -> None:
    """Collect garbage and give cached memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
