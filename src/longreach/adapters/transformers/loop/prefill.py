"""Read the prompts of a batch, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from longreach.adapters.transformers.hf_cache import LongreachCache

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session


def prefill(
    session: Session,
    cache: LongreachCache,
    ids: Tensor,
    mask: Tensor,
    chunk: int | None = None,
    progress: Callable[[int], None] = lambda columns: None,
) -> Tensor:
    """Logits [B, V] after prompts ids [B, T], padded on the left where mask [B, T] is 0.

    Columns that the cache holds are passed over. chunk: columns per pass, None for all; progress is called for each.
    """
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for first in range(cache.columns, ids.shape[1], chunk or ids.shape[1]):
        part = slice(first, first + (chunk or ids.shape[1]))
        out = session.model(
            input_ids=ids[:, part],
            attention_mask=mask[:, : part.stop],
            position_ids=positions[:, part],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        progress(ids[:, part].shape[1])
    return out.logits[:, -1]
