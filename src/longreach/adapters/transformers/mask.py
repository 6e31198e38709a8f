"""The mask function registered beside the attention function: it builds nothing and refuses what it does not know.

Causality, padding and windows are ours (positions, ragged rows, spans), so no [T, N] mask is needed. A model
whose mask is neither causal nor a sliding window is refused here, or its pattern would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longreach.errors import Unsupported


def no_mask(
    batch_size: int,
    q_length: int | Tensor,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    config: Any = None,
    device: Any = None,
    **kwargs: Any,
) -> None:
    """None, once the model's mask proved to be causal, or causal within a sliding window. Raises Unsupported."""
    length = int(q_length)
    if mask_function is None or length == 1:  # what a prompt was checked for holds for its next tokens
        return None
    first = int(q_offset)
    q = torch.linspace(first, first + length - 1, min(length, 33), device=device).round().long()
    last = kv_offset + kv_length - 1
    near = (q[:, None] + torch.arange(-2, 3, device=q.device)).flatten()  # the diagonal is where patterns differ
    spread = torch.linspace(kv_offset, last, min(kv_length, 65), device=device).round().long()
    window = getattr(config, "sliding_window", None)
    edges = [q - window + d for d in (-1, 0, 1, 2)] if isinstance(window, int) else []
    k = torch.cat([near, spread, *edges]).clamp(kv_offset, last).unique()
    zero = torch.zeros((), dtype=torch.long, device=q.device)
    got = torch.as_tensor(mask_function(zero, zero, q[:, None], k[None, :]), device=q.device).expand(len(q), len(k))
    causal = k[None, :] <= q[:, None]
    allowed = [causal]
    if isinstance(window, int):
        allowed.append(causal & (k[None, :] > q[:, None] - window))
    if not any(bool((got == a).all()) for a in allowed):
        raise Unsupported(
            "this model (or input) masks attention in a way that is neither causal nor a sliding window "
            "(packed sequences, chunked or bidirectional attention); longreach does not implement that pattern"
        )
    return None
