"""Into how many parts baselines are told to cut a sequence, where they let us choose."""

from __future__ import annotations

import torch

from longreach.bench.inputs import Inputs

WAVES = (0.5, 1, 2, 4)  # parts of all sequences over multiprocessors


def split_counts(inputs: Inputs, most: int) -> list[int]:
    """Parts a sequence and KV head, so that all together fill the GPU's multiprocessors so many times."""
    units = inputs.shape.batch * inputs.shape.kv_heads
    gpu = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    return sorted({min(most, max(1, round(waves * gpu / units))) for waves in WAVES})
