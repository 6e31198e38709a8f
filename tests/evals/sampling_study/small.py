"""One sequence of random queries, keys and values, and the same attention in fp64 by loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import KVView, Rows

HEADS, KV_HEADS, DIM, KEYS, ROWS = 4, 2, 16, 600, 3
SHAPE = ModelShape(1, HEADS, KV_HEADS, DIM, config="of a test")


def call(seed: int = 0, **terms: Any) -> LayerCall:
    """The last ROWS rows of KEYS tokens, in a view with room for more; its spare slots are NaN."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(ROWS, HEADS, DIM, generator=draw)
    memory = torch.full((2, 1, KV_HEADS, KEYS + 8, DIM), torch.nan)
    memory[..., :KEYS, :] = torch.randn(2, 1, KV_HEADS, KEYS, DIM, generator=draw)
    memory[..., :KEYS, :] += 0.5  # keys point the same way, and values
    k, v = memory
    pos = torch.arange(KEYS - ROWS, KEYS)
    given = {"scale": DIM**-0.5, "model": SHAPE, "phase": "prefill", **terms}
    kv = KVView(k, v, torch.tensor([KEYS]))
    return LayerCall(0, Rows(q, torch.zeros_like(pos), pos), kv, torch.tensor([0]), **given)


def weights(call: LayerCall, row: int, head: int) -> tuple[Tensor, Tensor, float]:
    """(attention weights of the visible keys, their values, what the virtual sink takes), fp64."""
    group, seen = HEADS // KV_HEADS, int(call.rows.pos[row]) + 1
    k, v = (x[0, head // group, :seen].double() for x in (call.kv.k, call.kv.v))
    logits = k @ call.rows.q[row, head].double() * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    sink = 0.0 if call.sink_logit is None else float(call.sink_logit[head].double().exp())
    whole = float(logits.exp().sum()) + sink
    return logits.exp() / whole, v, sink / whole
