"""Measurements of each layer as prompts pass through it."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.evals.attention.agreement import Agreement
from longreach.evals.attention.masses import by_place, by_size, distances
from longreach.evals.attention.prompts import Prompt
from longreach.evals.attention.queries import RECENT, RecentQueries, likeness
from longreach.evals.attention.tally import Tally
from longreach.evals.attention.weights import blocks, weights, window_of
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape, Phase

KINDS = ("text", "answer")  # of rows
ABSENT, NOT_COPIED = -1, -2


class AttentionProbe:
    """An observer of a session that reads one prompt after another, each announced by `begin`.

    Of all rows only those of the prompt that were drawn are looked at, and of these no more weights at a time than fit.
    """

    def __init__(self, shape: ModelShape, length: int, tasks: tuple[str, ...], device: torch.device):
        self.edges, self.tasks, self.device = distances(length), tasks, device
        self.masses = Tally(len(KINDS), shape.layers, device)
        self.retrieval = Tally(len(tasks), shape.layers, device)
        self.agreement = Agreement(len(KINDS), shape.layers, shape.kv_heads, device)
        self.windows: list[int | None] = [None] * shape.layers
        self.rotations_unknown: dict[int, str] = {}

    def begin(self, prompt: Prompt) -> None:
        """The next passes are over this prompt, from its beginning, and over the answer after it."""
        self._prompt, self._recent = prompt, RecentQueries()
        self._layer = -1
        rows = sorted({*prompt.text, *prompt.rows})
        end = len(prompt.tokens) + len(prompt.answer)
        self._wanted = torch.zeros(end, dtype=torch.bool, device=self.device)
        self._wanted[torch.tensor(rows, device=self.device)] = True
        self._is_answer = torch.zeros(end, dtype=torch.int64, device=self.device)
        self._is_answer[torch.tensor(prompt.rows, device=self.device)] = 1
        self._first_query = rows[0] - RECENT
        start, stop = prompt.needle
        held = set(prompt.tokens[start:stop])
        self._needle = torch.full((end,), ABSENT, dtype=torch.int64, device=self.device)
        self._needle[start:stop] = torch.tensor(prompt.tokens[start:stop], device=self.device)
        self._next = torch.full((end,), NOT_COPIED, dtype=torch.int64, device=self.device)
        for row, token in zip(prompt.rows, prompt.answer, strict=True):
            if token in held:  # a tokenizer may split the answer differently on its own
                self._next[row] = token

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        pos = call.rows.pos.long()
        if call.layer <= self._layer or self._layer < 0:  # the first layer of a pass: values common to all layers
            self._last = int(pos[-1])
            inside = pos.clamp(max=len(self._wanted) - 1)  # decoding may run past the answer
            self._index = (self._wanted[inside] & (pos < len(self._wanted))).nonzero().flatten()
            self._kind = self._is_answer[pos[self._index]]
            self.agreement.start(self._kind)
        self._layer = call.layer
        self.windows[call.layer] = window_of(call)
        if self._last >= self._first_query:
            self._queries(call)
        if len(self._index):
            self._weights(call, pos)

    def _queries(self, call: LayerCall) -> None:
        if call.layer in self.rotations_unknown:
            return
        assert call.pre_rope is not None
        try:
            q, _ = call.pre_rope()
        except Unsupported as why:  # said in the record: the other measures do not need it
            self.rotations_unknown[call.layer] = str(why)
            return
        queries, kept = self._recent.extend(call.layer, q)
        if len(self._index):
            for name, values in likeness(queries, self._index + kept).items():
                self.masses.add(name, call.layer, self._kind, values)

    def _weights(self, call: LayerCall, pos: Tensor) -> None:
        keys, group = self._last + 1, call.kv.group(call.rows)
        pooled = []
        for index in blocks(self._index, group * call.kv.heads, keys):
            at, found = pos[index], list[dict[str, Tensor]]()
            total = torch.zeros(len(index), call.kv.heads, keys, device=index.device)
            for head in range(call.kv.heads):
                share, sink = weights(call, index, head, keys)
                found.append({**by_place(share, at, self.edges), **by_size(share), "virtual_sink": sink,
                              **self._retrieved(share, at)})  # fmt: skip
                total[:, head] = (share * (1 - sink[..., None])).sum(1)
            self._count(call.layer, at, {name: torch.cat([f[name] for f in found], 1) for name in found[0]})
            pooled.append(total)
        self.agreement.add(self._kind, torch.cat(pooled))

    def _retrieved(self, share: Tensor, at: Tensor) -> dict[str, Tensor]:
        """copies: 1 where the heaviest key is in the needle and the token that comes next. needle: weight on it."""
        start, stop = self._prompt.needle
        heaviest = self._needle[share.argmax(-1)]  # [r, group]
        copies = (heaviest == self._next[at][:, None]).double()
        return {"copies": copies, "needle": share[..., start:stop].sum(-1, dtype=torch.float64)}

    def _count(self, layer: int, at: Tensor, found: dict[str, Tensor]) -> None:
        kind = self._is_answer[at]
        copies, needle = found.pop("copies"), found.pop("needle")
        for name, values in found.items():
            self.masses.add(name, layer, kind, values)
        task = torch.full_like(kind, self.tasks.index(self._prompt.task))
        answers, copied = kind == 1, self._next[at] >= 0
        self.retrieval.add("needle", layer, task[answers], needle[answers])
        self.retrieval.add("copies", layer, task[copied], copies[copied])
