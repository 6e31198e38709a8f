"""What a method notes of a prompt as it is read, noted of keys that were drawn, which nobody read."""

from __future__ import annotations

from dataclasses import replace

import torch

from longreach.cache import KVCache, SequenceState
from longreach.methods.base import AttentionMethod, LayerCall, ModelShape, state_of
from longreach.ops import Rows
from longreach.ops.types import Run

AT_ONCE = 1 << 26  # numbers of keys that are noted at a time: what that makes of them is a few times as large


@torch.no_grad()
def follow_all(method: AttentionMethod, call: LayerCall, state: SequenceState | None) -> None:
    """Let a method that follows take note of all keys of the call's layer, piece by piece; queries are the first row's.

    Without it a state that is made of the prompt holds what its memory happened to hold.
    """
    if not method.follows:
        return
    kv, device = call.kv, call.rows.q.device
    piece = max(1, AT_ONCE // (kv.heads * kv.k.shape[3]))
    for seq, length in enumerate(kv.filled.tolist()):
        for first in range(0, length, piece):
            pos = torch.arange(first, min(first + piece, length), device=device)
            q = call.rows.q[:1].expand(len(pos), -1, -1)
            rows = Rows(q, torch.full_like(pos, seq), pos, (Run(len(pos), seq, first),))
            method.follow(replace(call, rows=rows, phase="prefill", passed={}), state)


def note_filled(cache: KVCache, method: AttentionMethod, model: ModelShape) -> None:
    """follow_all in each layer of a cache that was filled, on the states that decoding will find there."""
    slots = range(len(cache.lengths))
    step = cache.begin(slots, [0 for _ in slots])
    for layer in range(model.layers):
        kv = cache.view(layer, step)
        none = kv.filled.new_zeros(1)
        rows = Rows(kv.k.new_zeros((1, model.query_heads, model.head_dim)), none, none)
        call = LayerCall(layer, rows, kv, step.slots, model.head_dim**-0.5, model=model)
        follow_all(method, call, state_of(method, cache, call))
    cache.commit(step)
