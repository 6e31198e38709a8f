"""Free-running generation: each method goes on from its own words, which dense attention then judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import Answer, Reader, Session, attach, check_length, planned_shape, stop_tokens
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.dialogue import noted
from longreach.evals.methods import NAMED, Spec, by_prefill, refuse_slots
from longreach.evals.perplexity import Curve, Text, windows_of
from longreach.evals.progress import Progress, counted, unseen
from longreach.evals.read_shares import phase_bytes, shares
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from longreach.records import bootstrap

NGRAM = 8  # tokens: rarely said twice by chance
QUARTERS = 4
Keep = Callable[[str, Any], None]


def _forget(name: str, part: Any) -> None:
    """Keeps nothing."""


def repeated(tokens: Sequence[int]) -> float:
    """The share of tokens that end NGRAM tokens which came before, in this order."""
    grams = [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
    return (len(grams) - len(set(grams))) / len(tokens)


def first_divergence(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first place at which two texts differ; None if they do not."""
    return next((at for at, (mine, theirs) in enumerate(zip(tokens, others, strict=True)) if mine != theirs), None)


class Generation:
    """Texts cut into windows of `length` tokens; after each every method draws `steps` tokens, going on from its own.

    All draw with the same random numbers, made of seed and window: as long as a method's distributions are dense
    attention's, so is its text. No stop token is drawn. temperature: 0 for the likeliest tokens.
    specs: methods, dense first. cache: its place in memory; its capacity is that of a window and its steps.
    Raises InvalidInput where no window is whole, or window and steps exceed the model's context.
    """

    def __init__(
        self, model: Any, tokenizer: Any, texts: Sequence[Text], specs: Sequence[Spec], *, length: int = 4096,
        steps: int = 2048, temperature: float = 1.0, limit: int | None = None, seed: int = 0, graph: bool | None = None,
        cache: CacheConfig | None = None,
    ):  # fmt: skip
        if steps < 1:
            raise InvalidInput(f"steps: expected at least 1, got {steps}")
        if not 0 <= temperature < math.inf:
            raise InvalidInput(f"temperature: expected a finite number above 0, or 0 for greedy, got {temperature}")
        check_length(model, length, steps)
        refuse_slots(specs, NAMED, "windows of a text hold no documents, and stay whole for the next method")
        for spec in specs:
            for method in (spec.prefill, spec.decode):
                method.check(planned_shape(model))
        self.model, self.tokenizer, self.specs, self.graph = model, tokenizer, specs, graph
        self.length, self.steps, self.temperature, self.seed = length, steps, temperature, seed
        self.windows = windows_of(texts, tokenizer, length, limit)
        self.room = replace(cache or CacheConfig(), capacity=length + steps)

    def run(
        self, chunk: int, progress: Progress = unseen, *, done: Mapping[str, Any] | None = None, keep: Keep = _forget
    ) -> dict[str, dict[str, Any]]:
        """Each method's part of a record by its label.

        Windows are read once for methods that share a prefill.
        done: windows after which an interrupted run drew, by name; `keep` is called with each new one.
        """
        drawn = dict[str, list[dict[str, Any]]]()
        for prefill, specs in by_prefill(self.specs):
            parts = self._drawn(prefill, specs, chunk, progress, done or {}, keep)
            drawn |= {spec.label: [part[spec.label] for part in parts] for spec in specs}
        sums = self._judged(drawn, chunk, progress)
        dense = self.specs[0].label
        return {
            spec.label: self._result(drawn[spec.label], drawn[dense], sums[spec.label], sums[dense])
            for spec in self.specs
        }

    def _drawn(
        self, prefill: AttentionMethod, specs: Sequence[Spec], chunk: int, progress: Progress, done: Mapping[str, Any],
        keep: Keep,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The texts that these methods draw after each window, by their labels."""
        parts = []
        with attach(self.model, prefill=prefill, cache=self.room) as session:
            session.prepare(*(spec.decode for spec in specs))
            reader = Reader(session, chunk, graph=self.graph)
            for number in range(len(self.windows)):
                name = f"{specs[0].label}|{number}"
                part = done.get(name)
                if part is None:
                    part = self._after(number, session, reader, specs, progress)
                    keep(name, part)
                parts.append(part)
        return parts

    def _after(
        self, number: int, session: Session, reader: Reader, specs: Sequence[Spec], progress: Progress
    ) -> dict[str, Any]:
        """Of one window, by label: tokens, bytes read while decoding (`phase_bytes`), seconds_per_token, and what the
        method noted (`noted`)."""
        found, which = dict[str, Any](), f"{number + 1} of {counted(len(self.windows), 'window')}"
        with reader.rollback():
            with progress(f"{which}, {session.prefill.name} prefill", self.length) as advance:
                first = reader.read(self.windows[number], advance, then=self.steps)
            for spec in specs:
                session.switch(spec.decode)
                answer, choose = Answer(), self._sampler(number, first)
                with (
                    reader.rollback(spec.decode),
                    progress(f"{which}, {spec.label}", self.steps) as advance,
                    closing(reader.decode(first, self.steps, answer, choose=choose)) as chosen,
                ):
                    tokens = []
                    for token in chosen:
                        tokens.append(token)
                        advance(1)
                found[spec.label] = {
                    "tokens": tokens, "bytes": phase_bytes(session.report(), "decode"),
                    "seconds_per_token": answer.seconds_per_token, "noted": noted(session),
                }  # fmt: skip
        return found

    def _sampler(self, number: int, first: Tensor) -> Callable[[Tensor], Tensor]:
        """The sampler of a text after a window; first: its logits [V]."""
        draw = torch.Generator(first.device).manual_seed(Random(f"{self.seed}/generation/{number}").getrandbits(63))
        ends = [token for token in stop_tokens(self.model, self.tokenizer) if token < len(first)]
        stop = torch.tensor(ends, dtype=torch.int64, device=first.device)

        def choose(logits: Tensor) -> Tensor:
            goes_on = logits.float().index_fill(-1, stop, -torch.inf)
            if not self.temperature:
                return goes_on.argmax(-1)
            return torch.multinomial((goes_on / self.temperature).softmax(-1), 1, generator=draw)[:, 0]

        return choose

    def _judged(
        self, drawn: Mapping[str, Sequence[dict[str, Any]]], chunk: int, progress: Progress
    ) -> dict[str, list[list[float]]]:
        """By label, the sums of each of a method's texts (`Curve.sums_of`) under dense attention."""
        total = len(drawn) * len(self.windows) * (self.length + self.steps)
        with (
            attach(self.model, prefill=Dense(), cache=self.room) as session,
            progress("judging, dense prefill", total) as advance,
        ):
            reader = Reader(session, chunk)

            def sums(window: list[int], tokens: list[int]) -> list[float]:
                with reader.rollback():
                    return self._curve().sums_of(reader.score([*window, *tokens], advance)[self.length - 1 :].cpu())

            return {
                label: [sums(window, part["tokens"]) for window, part in zip(self.windows, parts, strict=True)]
                for label, parts in drawn.items()
            }

    def _curve(self) -> Curve:
        return Curve(self.length, self.length + self.steps, QUARTERS)

    def _result(
        self, parts: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]], sums: Sequence[list[float]],
        dense_sums: Sequence[list[float]],
    ) -> dict[str, Any]:  # fmt: skip
        """`Curve.to_json` of a method's texts; over_dense, nats a token above dense attention's own texts, window by
        window, with its interval; repeated, the mean of texts; samples, the texts."""
        over = [(sum(mine) - sum(theirs)) / self.steps for mine, theirs in zip(sums, dense_sums, strict=True)]
        samples = [
            {
                "text": self.tokenizer.decode(part["tokens"]), "repeated": repeated(part["tokens"]),
                "first_divergence": first_divergence(part["tokens"], control["tokens"]),
                **{name: part[name] for name in ("bytes", "seconds_per_token", "noted")},
            }
            for part, control in zip(parts, dense, strict=True)
        ]  # fmt: skip
        return {
            **self._curve().over(sums),
            "over_dense": sum(over) / len(over), "over_dense_interval_95": bootstrap(over),
            "repeated": sum(sample["repeated"] for sample in samples) / len(samples),
            "decode_reads": shares([part["bytes"] for part in parts]), "samples": samples,
        }  # fmt: skip
