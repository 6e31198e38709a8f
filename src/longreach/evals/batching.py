"""Number of prompts that fit into memory at a time."""

from __future__ import annotations

from typing import Any

import torch

from longreach.adapters.transformers import shape_of

MOST = 32
SHARE = 0.8  # of the memory free of weights; the rest is for kernels' workspaces and fragmentation
WIDTHS = 24  # vectors of the model's width that a layer holds for each token of a pass


def fitting_batch(model: Any, length: int, chunk: int) -> int:
    """A power of two: 1 on a CPU, which is busy with one prompt; on a GPU as many as fit into memory with the weights.

    What else is in that memory does not count: the same command is to give the same batch, for with the batch rounding
    changes, and with it an answer now and then. A batch that does not fit after all is asked prompt by prompt.
    length: tokens of prompt and answer. chunk: prompt tokens of a pass.
    """
    if model.device.type != "cuda":
        return 1
    shape, size = shape_of(model), torch.finfo(model.dtype).bits // 8
    keys_and_values = shape.token_numbers * length * size
    width = shape.query_heads * shape.head_dim
    vocabulary = model.get_output_embeddings().weight.shape[0]
    activations = chunk * width * WIDTHS * size + vocabulary * 12  # logits, and temporaries of sampling
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    room = torch.cuda.get_device_properties(model.device).total_memory - weights
    fitting = int(SHARE * room) // (keys_and_values + activations)
    return 1 << (max(1, min(MOST, fitting)).bit_length() - 1)
