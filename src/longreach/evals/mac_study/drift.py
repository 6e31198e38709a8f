"""Errors from chains of reuse: MAC's own decoding over a long generation, with and without a limit on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.adapters.transformers import (
    Advance,
    Answer,
    Reader,
    attach,
    check_length,
    planned_shape,
    shape_of,
    stop_tokens,
)
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.layers import LayerErrors
from longreach.evals.progress import Progress, unseen
from longreach.evals.read_shares import ReadShares
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.call import LayerCall, Phase
from longreach.methods.dense import Dense

BINS = 16  # of steps
Choose = Callable[[Tensor], Tensor]
Keep = Callable[[str, Any], None]
TOP = 256  # likeliest tokens of a distribution that are kept


class Likeliest(NamedTuple):
    """A distribution of next tokens: log-probabilities fp64 [n + 1] of the likeliest and, last, of all others together;
    the likeliest are `tokens` [n]."""

    log_p: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Likeliest:
        """logits [V]."""
        tokens = logits.topk(min(TOP, len(logits))).indices
        return cls(cls.on(logits, tokens), tokens)

    @staticmethod
    def on(logits: Tensor, tokens: Tensor) -> Tensor:
        """[n + 1] of these tokens."""
        others = logits.double().index_fill(0, tokens, -torch.inf)
        parts = torch.cat([logits.double()[tokens], others.logsumexp(0, keepdim=True)])
        return parts - parts.logsumexp(0)

    def divergence(self, logits: Tensor) -> Tensor:
        """KL(this || that of logits [V]) in nats, all others being one token: no more than that of all tokens."""
        other = self.on(logits, self.tokens)
        return torch.where(self.log_p == -torch.inf, 0.0, self.log_p.exp() * (self.log_p - other)).sum().clamp(min=0)


def _forget(key: str, part: Any) -> None:
    """Keeps nothing."""


class Drift:
    """A prompt, and `steps` tokens after it that the model draws (temperature 1, `seed`, no stop token) under dense
    attention; then each method is fed the same tokens. Errors are those of `LayerErrors`, of every step.

    methods: by name. Raises InvalidInput where prompt and steps exceed the model's context.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompt: Sequence[int], methods: Mapping[str, AttentionMethod], *,
        steps: int, seed: int = 0,
    ):  # fmt: skip
        if steps < 1:
            raise InvalidInput(f"steps: expected at least 1, got {steps}")
        check_length(model, len(prompt), steps)
        for method in methods.values():
            method.check(planned_shape(model))
        self.model, self.prompt, self.methods, self.steps, self.seed = model, prompt, methods, steps, seed
        self.stop = torch.tensor(stop_tokens(model, tokenizer), dtype=torch.int64, device=model.device)
        self.edges = sorted({steps * n // min(BINS, steps) for n in range(min(BINS, steps) + 1)})
        self.tokens: list[Tensor] = []
        self.dense: list[Likeliest] = []
        self.nll_dense: list[Tensor] = []

    def run(
        self, chunk: int, progress: Progress = unseen, *, done: Mapping[str, Any] | None = None, keep: Keep = _forget
    ) -> dict[str, Any]:
        """{"prompt_tokens", "edges" of the bins of steps, "methods": {name: see `_told`}}.

        done: methods that an interrupted run measured, by `key`; `keep` is called with each new one.
        """
        found = {name: (done or {}).get(self.key(method)) for name, method in self.methods.items()}
        if None in found.values():
            self._measure(chunk, progress, found, keep)
        return {"prompt_tokens": len(self.prompt), "edges": self.edges, "methods": found}

    def key(self, method: AttentionMethod) -> str:
        """The key of a method's numbers."""
        return f"drift, {self.steps} steps, seed {self.seed}, {json.dumps(method.to_json(), sort_keys=True)}"

    def _measure(self, chunk: int, progress: Progress, found: dict[str, Any], keep: Keep) -> None:
        """Fill in those of `found` that are None."""
        room = CacheConfig(capacity=len(self.prompt) + self.steps + 1)
        with attach(self.model, prefill=Dense(), cache=room) as session, torch.inference_mode():
            session.prepare(*self.methods.values())
            reader = Reader(session, chunk, graph=False)
            with progress("reading, to generate", len(self.prompt)) as advance:
                first = reader.read(self.prompt, advance, then=self.steps + 1)
            with reader.rollback(session.decode), progress("generating, dense", self.steps) as advance:
                self._draw(reader, first, advance)
            for name, method in self.methods.items():
                if found[name] is not None:
                    continue
                session.switch(method)
                errors = self._watched()
                with reader.rollback(method), progress(f"generating, {name}", self.steps) as advance:
                    session.on_layer = self._observer(errors)
                    lost, same, nll = self._feed(reader, first, advance)
                    session.on_layer = None
                report = session.report()
                notes = {x.layer: x.notes for x in report.layers if x.phase == "decode" and x.notes}
                reads, (mine, theirs) = ReadShares.of(report, "decode"), (self._binned(x) for x in (nll, self._nll()))
                found[name] = {
                    "method": method.to_json(), "reads": reads and asdict(reads), "nll": mine, "nll_dense": theirs,
                    **self._told(lost, same, errors, notes),
                }  # fmt: skip
                keep(self.key(method), found[name])

    def _draw(self, reader: Reader, first: Tensor, advance: Advance) -> None:
        """The tokens, and dense attention's distribution after each."""
        draw = torch.Generator(first.device).manual_seed(self.seed)

        def choose(logits: Tensor) -> Tensor:
            self.dense.append(Likeliest.of(logits[0]))
            weight = logits[0].float().softmax(0).index_fill(0, self.stop, 0.0)
            self.tokens.append(torch.multinomial(weight, 1, generator=draw))
            self.nll_dense.append(_nll(logits[0], self.tokens[-1]))
            return self.tokens[-1]

        self._decode(reader, first, advance, choose)

    def _feed(self, reader: Reader, first: Tensor, advance: Advance) -> tuple[Tensor, Tensor, Tensor]:
        """(divergence, whether the likeliest token is dense attention's, nll of the token that comes next) after each
        of the tokens [steps]."""
        lost, same, nll = list[Tensor](), list[Tensor](), list[Tensor]()

        def choose(logits: Tensor) -> Tensor:
            at = min(len(lost), self.steps)  # it may be asked past the end
            lost.append(self.dense[at].divergence(logits[0]))
            same.append(logits[0].argmax() == self.dense[at].tokens[0])
            nll.append(_nll(logits[0], self.tokens[at]))
            return self.tokens[at]

        self._decode(reader, first, advance, choose)
        return self._after(lost), self._after(same).double(), self._after(nll)

    def _after(self, found: Sequence[Tensor]) -> Tensor:
        """[steps] on the CPU, of what each distribution gave: the first is the prompt's."""
        return torch.stack(list(found))[1 : self.steps + 1].cpu()

    def _nll(self) -> Tensor:
        """[steps]: as `_feed`, under dense attention."""
        return self._after(self.nll_dense)

    def _binned(self, values: Tensor) -> list[float]:
        """Means over bins of steps."""
        return [float(values[a:b].mean()) for a, b in pairwise(self.edges)]

    def _decode(self, reader: Reader, first: Tensor, advance: Advance, choose: Choose) -> None:
        with closing(reader.decode(first, self.steps + 1, Answer(), choose=choose)) as tokens:
            for _ in tokens:
                advance(1)

    def _watched(self) -> list[LayerErrors]:
        """One a bin of steps."""
        total, begin, made = len(self.prompt) + self.steps + 1, len(self.prompt), []
        for a, b in pairwise(self.edges):
            mask = torch.zeros(total, dtype=torch.bool, device=self.model.device)
            mask[begin + a : begin + b] = True
            made.append(LayerErrors(shape_of(self.model), self.model.device, "decode", mask))
        return made

    def _observer(self, errors: Sequence[LayerErrors]) -> Any:
        begin = len(self.prompt)
        bin_of = torch.bucketize(torch.arange(self.steps), torch.tensor(self.edges[1:]), right=True).tolist()

        def observe(phase: Phase, call: LayerCall, outcome: Outcome) -> None:
            step = int(call.rows.pos[0]) - begin
            if 0 <= step < self.steps:
                errors[bin_of[step]](phase, call, outcome)

        return observe

    def _told(
        self, lost: Tensor, same: Tensor, errors: Sequence[LayerErrors], notes: Mapping[int, dict[str, Any]]
    ) -> dict[str, Any]:
        """By bins of steps: error [bins][layers], mean over steps and heads; kl, nats (`Likeliest.divergence`); agree,
        share of steps with the same likeliest token. Of all steps, by layer: depth_bins, depths; reuse, skipped, means
        over heads; None for a layer that the method takes no part in."""
        layers = range(shape_of(self.model).layers)
        by_layer = [notes.get(n) for n in layers]
        return {
            "error": [_means(e.to_json()["mean"]) for e in errors],
            "kl": self._binned(lost),
            "agree": self._binned(same),
            "depth_bins": next((n["depth_bins"] for n in notes.values()), []),
            "depths": [None if n is None else _means(zip(*n["depths"], strict=True)) for n in by_layer],
            **{name: [None if n is None else sum(n[name]) / len(n[name]) for n in by_layer]
               for name in ("reuse", "skipped")},
        }  # fmt: skip


def _nll(logits: Tensor, token: Tensor) -> Tensor:
    """fp64, nats, of a token [1] under logits [V]."""
    return -logits.double().log_softmax(0)[token[0]]


def _means(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(row) / len(row) for row in rows]
