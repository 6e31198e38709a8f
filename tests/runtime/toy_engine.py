"""An engine of the least kind: packed ragged rows, paged buffers of its own, rows that change place in every step.

It drives methods through longreach.runtime alone. Each step takes chunks of prompts and single decode tokens of several
sequences in one pass, in an order of its own. A request keeps one slot for all its steps: methods address state of
sequences by slot, and a StateStore moves none from slot to slot. So an engine gives a request a slot for its state and
is free to permute rows, block tables and pages, as this one does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape
from longreach.methods.dense import Dense
from longreach.ops import HeadShard, KVView, RowRange, Rows, angles
from longreach.ops.rope import RotaryAngles
from longreach.runtime import Ledger, Pass, Segment, StateStore, attend_layer
from tests.methods.drive import FREQUENCIES, KV_HEADS, LAYERS, LOGITS, MODEL, SCALE, Text

PAGE = 8


@dataclass
class Request:
    """One sequence: its text, the slot of its state, its pages, how many tokens are read, and its results so far."""

    text: Text
    prompt: int
    slot: int
    pages: list[int] = field(default_factory=list)
    read: int = 0
    out: list[Tensor] = field(default_factory=list)  # [L, n, H, D] of each pass

    @property
    def length(self) -> int:
        return self.text.q.shape[1]


class ToyEngine:
    """K and V of every layer in pages [P, PAGE, G, 2 D], as some engines pack them; views of these are strided."""

    def __init__(self, prefill: AttentionMethod, decode: AttentionMethod, slots: int, pages: int, seed: int = 0,
                 shared_pages: bool = True, model: ModelShape = MODEL,
                 logits: Sequence[dict[str, Any]] = LOGITS):  # fmt: skip
        self.model, self.logits = model, logits
        self.prefill, self.decode, self.dice = prefill, decode, random.Random(seed)
        dim = FREQUENCIES.shape[0] * 2
        self.memory = [torch.full((pages, PAGE, KV_HEADS, 2 * dim), torch.nan) for _ in range(LAYERS)]
        self.free = list(range(pages))
        self.dice.shuffle(self.free)
        self.states, self.ledger = StateStore(slots, shared_pages=shared_pages), Ledger()

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        """One pass: the next `count` tokens of each request, in an order of the engine's own."""
        work = self.dice.sample(work, len(work))
        for request, count in work:
            if not request.out:  # the slot begins anew; what is read already lies in shared pages
                self.states.reset(torch.tensor([request.slot]))
                self.states.mark_observed([self.decode], [request.slot], [0], [request.read])
            while len(request.pages) * PAGE < request.read + count:
                request.pages.append(self.free.pop())
        slots = torch.tensor([request.slot for request, _ in work])
        pos = torch.cat([torch.arange(r.read, r.read + n) for r, n in work])
        seq = torch.arange(len(work)).repeat_interleave(torch.tensor([n for _, n in work]))
        width = max(len(r.pages) for r, _ in work)
        table = torch.tensor([r.pages + [0] * (width - len(r.pages)) for r, _ in work])
        filled = torch.tensor([r.read + n for r, n in work])
        deciding = torch.tensor([r.read >= r.prompt for r, _ in work])
        segments = []
        for phase in (False, True):
            index = (deciding[seq] == phase).nonzero()[:, 0]
            if len(index):
                mine = [(b, r, n) for b, (r, n) in enumerate(work) if bool(deciding[b]) == phase]
                runs = tuple(RowRange(n, b, r.read) for b, r, n in mine)
                observers = (self.decode,) if self.decode.observes_prompt and not phase else ()
                method = self.decode if phase else self.prefill
                segments.append(Segment("decode" if phase else "prefill", method, observers, index, runs))
        p = Pass(tuple(segments), self.model, self.states, self.ledger)
        found = [self._layer(p, layer, work, seq, pos, slots, table, filled) for layer in range(LAYERS)]
        self.ledger.commit()
        for b, (request, count) in enumerate(work):
            request.out.append(torch.stack([out[seq == b] for out in found]))
            before, request.read = request.read, request.read + count
            observed = [] if bool(deciding[b]) else [self.decode]
            self.states.mark_observed([self.decode] if bool(deciding[b]) else observed, [request.slot], [before],
                                      [request.read])  # fmt: skip

    def _layer(
        self, p: Pass, layer: int, work: Sequence[tuple[Request, int]], seq: Tensor, pos: Tensor, slots: Tensor,
        table: Tensor, filled: Tensor,
    ) -> Tensor:  # fmt: skip
        """[R, H, D]: one layer's results."""
        q, k, v = (
            torch.cat([getattr(r.text, x)[layer, r.read : r.read + n] for r, n in work]) for x in ("q", "k", "v")
        )
        dim = k.shape[2]
        packed = self.memory[layer].transpose(1, 2)  # [P, G, PAGE, 2 D]
        keys, values = packed[..., :dim], packed[..., dim:]
        page, offset = table[seq, pos // PAGE], pos % PAGE
        keys[page, :, offset], values[page, :, offset] = k, v
        cos, sin = angles(pos, FREQUENCIES)
        call = p.call(
            layer, Rows(q, seq, pos), KVView(keys, values, filled, table), slots, SCALE,
            shard=HeadShard.whole(KV_HEADS), rotary=lambda: RotaryAngles(cos, sin), **self.logits[layer],
        )  # fmt: skip
        return attend_layer(p, call).partial.out

    def release(self, request: Request) -> None:
        """The sequence is over: its pages go to others, with what they hold."""
        self.free += request.pages
        self.dice.shuffle(self.free)
        request.pages = []


def outputs(request: Request) -> Tensor:
    """[L, N, H, D]: the results of all tokens of a request."""
    return torch.cat(request.out, 1)


def prefill_for(method: AttentionMethod) -> AttentionMethod:
    return method if "prefill" in method.phases else Dense()
