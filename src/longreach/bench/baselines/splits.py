"""Number of parts into which baselines cut a sequence, if they take it as an option."""

from __future__ import annotations

import torch

from longreach.bench.inputs import Inputs

WAVES = (0.5, 1, 2, 4)  # parts of all sequences over multiprocessors


def split_counts(inputs: Inputs, most: int) -> list[int]:
    """Parts per sequence and KV head, so that all together fill the GPU's multiprocessors a whole number of times."""
    units = inputs.shape.batch * inputs.shape.kv_heads
    gpu = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    return sorted({min(most, max(1, round(waves * gpu / units))) for waves in WAVES})
