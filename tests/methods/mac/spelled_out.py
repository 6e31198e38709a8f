"""MAC, spelled out in fp64: an entry is a list of logits, one for each key it stands for. Shares no code with it.

A row that reuses the entry of an earlier one attends with that row's logits to the keys before the earlier row's band,
and with its own to all others; its own entry is what of these lies before its own band.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longreach.methods.mac import MAC
from longreach.ops.match import Rule
from tests.methods.drive import DIM, FREQUENCIES, HEADS, KV_HEADS, LAYERS, LOGITS, SCALE, Text
from tests.ops.match.brute import Brute

SPARE = 8


def rule_of(method: MAC, size: int) -> Rule:
    """What the options mean. size: bytes of a number."""
    assert method.window and method.band and method.tau is not None and method.min_context is not None
    return Rule(
        window=min(method.window, method.max_gap or method.window),
        band=method.band,
        limit=2 * DIM * (1 - method.tau) ** 2,
        sinks=method.sinks or 0,
        min_context=method.min_context,
        deepest=method.max_reuse_depth,
        patience=16.0 if method.rest_rows else math.inf,
        reuses=4.0,
        rest=method.rest_rows or 1,
        price=2 * (DIM * size + 4 + (2 if method.max_reuse_depth else 0)) / (2 * DIM * size),
    )


def before_rotation(q: Tensor, pos: int) -> Tensor:
    """fp64 [H, D] of a query [H, D] at a position, as complex numbers."""
    half = DIM // 2
    z = torch.complex(q[:, :half].double(), q[:, half:].double())
    z = z * torch.exp(-1j * pos * FREQUENCIES.double())
    return torch.cat([z.real, z.imag], 1)


@dataclass
class SpelledOut:
    """One cache. entries: (layer, slot, position, head) -> logits [N], -inf for keys that it does not stand for."""

    method: MAC
    size: int = 4
    entries: dict[tuple[int, int, int, int], Tensor] = field(default_factory=dict)
    reused: int = 0
    deepest: int = 0

    def __post_init__(self) -> None:
        self.rule = rule_of(self.method, self.size)
        self.layers = [Brute(self.rule, HEADS, KV_HEADS, self.rule.window + SPARE) for _ in range(LAYERS)]

    def logits(self, layer: int, text: Text, pos: int) -> Tensor:
        """fp64 [H, pos + 1]."""
        k = text.k[layer, : pos + 1].double().repeat_interleave(HEADS // KV_HEADS, 1)
        x = torch.einsum("nhd,hd->hn", k, text.q[layer, pos].double()) * SCALE
        cap = LOGITS[layer].get("softcap")
        return x if cap is None else cap * torch.tanh(x / cap)

    def read(self, slot: int, text: Text, first: int, count: int) -> None:
        """Tokens of a prompt."""
        for layer, brute in enumerate(self.layers):
            for pos in range(first, first + count):
                query = before_rotation(text.q[layer, pos], pos)
                history = brute.seen.setdefault(slot, {})
                brute.row(slot, pos, query)
                history[pos].depth[:] = [0] * HEADS
                history[pos].credit[:] = [math.inf] * KV_HEADS
                self._keep(layer, slot, pos, self.logits(layer, text, pos))

    def decode(self, slot: int, text: Text, pos: int) -> Tensor:
        """fp64 [L, H, D]: what a new token's row comes to."""
        outs = []
        for layer, brute in enumerate(self.layers):
            found = brute.row(slot, pos, before_rotation(text.q[layer, pos], pos))
            x = self.logits(layer, text, pos)
            for h, p in enumerate(found["take"]):
                if p is not None:
                    self.reused += 1
                    kept = self.entries[layer, slot, p, h]
                    upto = max(self.rule.sinks, p + 1 - self.rule.band)
                    x[h, self.rule.sinks : upto] = kept[self.rule.sinks : upto]
            self.deepest = max(self.deepest, *found["depth"])
            self._keep(layer, slot, pos, x)
            sink = LOGITS[layer].get("sink_logit")
            extra = torch.full((HEADS, 1), -torch.inf) if sink is None else sink[:, None].double()
            weight = torch.cat([x, extra.double()], 1).softmax(1)[:, :-1]
            v = text.v[layer, : pos + 1].double().repeat_interleave(HEADS // KV_HEADS, 1)
            outs.append(torch.einsum("hn,nhd->hd", weight, v))
        return torch.stack(outs)

    def _keep(self, layer: int, slot: int, pos: int, x: Tensor) -> None:
        for h in range(HEADS):
            entry = x[h].clone()
            entry[max(self.rule.sinks, pos + 1 - self.rule.band) :] = -torch.inf
            entry[: self.rule.sinks] = -torch.inf
            self.entries[layer, slot, pos, h] = entry

    def forget(self, slot: int, length: int = 0) -> None:
        """The sequence in `slot` ends after `length` tokens."""
        for brute in self.layers:
            history = brute.seen.get(slot, {})
            for pos in [p for p in history if p >= length]:
                del history[pos]
