"""What a plain prefill and stored chunks leave in the cache, layer by layer, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.adapters.transformers import FusedPrompt, LongreachCache, Reader, Session, read_fused
from longreach.methods.fusion import PIE

Memory = list[tuple[Tensor, Tensor]]  # keys as attended to and values [N, G, D] of each layer


def held(cache: LongreachCache) -> Memory:
    """Copies of the keys and values of a cache's only sequence, of which nothing was evicted."""
    count, found = cache.columns, Memory()
    for layer in range(len(cache.layers)):
        view = cache.kv.view_of_all(layer)
        slots = torch.arange(count, device=view.k.device)
        page, offset = view.locate(torch.zeros_like(slots), slots)
        found.append((view.k[page, :, offset].clone(), view.v[page, :, offset].clone()))
    return found


def middle(layers: int) -> range:
    """The layers between the first and the last quarter."""
    return range(layers // 4, max(layers // 4 + 1, layers - layers // 4))


def plain_memory(reader: Reader, ids: Sequence[int]) -> Memory:
    """What a plain prefill leaves of these tokens."""
    reader.cache.empty()
    reader.read(ids)
    return held(reader.cache)


def stored_memory(session: Session, reader: Reader, prompt: FusedPrompt) -> Memory:
    """What is there where nothing is recomputed: stored keys at their tokens' true positions."""
    before, session.fuse = session.fuse, PIE()
    try:
        reader.cache.empty()
        read_fused(session, reader.cache, prompt)
        return held(reader.cache)
    finally:
        session.fuse = before


def moved(session: Session, reader: Reader, prompt: FusedPrompt) -> Tensor:
    """fp32 [N]: by how much a plain prefill changes each token's stored keys and values in the middle layers.

    Squared distance of each layer's keys over the mean square of plain ones, values likewise, summed over layers. The
    session's fusion and prefill methods must be ones that run plainly; the reader's cache is overwritten.
    """
    truth, stored = plain_memory(reader, prompt.ids), stored_memory(session, reader, prompt)
    total = torch.zeros(len(prompt.ids), device=truth[0][0].device)
    for layer in middle(len(truth)):
        for was, now in zip(stored[layer], truth[layer], strict=True):
            off = (was.float() - now.float()).square().sum((1, 2))
            total += off / now.float().square().sum((1, 2)).mean()
    return total
