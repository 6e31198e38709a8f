"""Last hidden states of a model, and logits of some tokens at a time: [B, T, V] is never held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longreach.errors import Unsupported

AT_ONCE = 1 << 26  # logits that are held together
PROBE = 4  # tokens


def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """The decoder's result [B, T, width] for tokens [B, T], without padding or past."""
    states: Tensor = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return states


def logits_of(model: Any, states: Tensor) -> Tensor:
    """Logits [N, V] of hidden states [N, width], in the dtype of the model's head."""
    logits: Tensor = model.get_output_embeddings()(states)
    return logits


def pieces(total: int, vocabulary: int) -> Iterator[slice]:
    """Slices of `total` tokens whose logits may be held together."""
    size = max(1, AT_ONCE // vocabulary)
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


def vocabulary_of(model: Any) -> int:
    """Number of logits of a token."""
    return int(model.get_output_embeddings().weight.shape[0])


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raise Unsupported if a model changes its logits after its head (soft caps, scales)."""
    ids = torch.arange(PROBE, device=model.device)[None]
    whole = model(input_ids=ids, use_cache=False).logits[0]
    ours = logits_of(model, hidden_states(model, ids)[0])
    if not torch.allclose(ours.float(), whole.float(), rtol=1e-3, atol=1e-3 * float(whole.float().abs().max())):
        raise Unsupported(
            f"{type(model).__name__} changes its logits after the output layer (a soft cap or a scale), and training "
            f"computes them piece by piece without that; use a model without it"
        )
