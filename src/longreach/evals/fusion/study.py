"""What fusion changes in a model, layer by layer, and which tokens each method chooses, beside a plain prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import FusedPrompt, Reader, Session, attach, check_length, shape_of
from longreach.adapters.transformers.prompt_tokens import uses_chunk_frequencies
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.attention.weights import blocks, weights
from longreach.evals.fusion.chunks import Behind, FusedPrompts, prefix_tokens
from longreach.evals.fusion.controls import RowOrder
from longreach.evals.fusion.memory import Memory, held, middle
from longreach.evals.methods import DENSE, NAMED, Spec, refuse_slots
from longreach.evals.progress import Progress, unseen
from longreach.evals.prompting import Maker, PromptSample, at_lengths
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, Phase
from longreach.methods.fusion import PIE
from longreach.methods.fusion.base import best
from longreach.methods.slots import PromptParts
from longreach.tasks.base import Task

TOP = 64  # tokens that the question attends to most
DIGITS = 6  # significant
LAYERS = ("attention", "key", "value", "key_recomputed", "value_recomputed", "key_reused", "value_reused")
CHOICES = ("chosen", "hits_change", "hits_attention", "attention_chosen")


class QuestionAttention:
    """An `on_layer` hook: attention weights of the last `rows` rows of each pass, [rows, H, N] fp32 by layer."""

    def __init__(self, rows: int, count: int):
        self.rows, self.count = rows, count
        self.maps = dict[int, Tensor]()

    def __call__(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        device, heads = call.rows.q.device, call.kv.heads
        index = torch.arange(len(call.rows.pos) - self.rows, len(call.rows.pos), device=device)
        parts = [
            torch.cat([weights(call, some, head, self.count).share for head in range(heads)], 1)
            for some in blocks(index, call.rows.q.shape[1], self.count)
        ]
        self.maps[call.layer] = torch.cat(parts)


@dataclass
class Truth:
    """A plain prefill of a prompt: keys and values, the question's attention, and how far it moves what is stored.

    change: [N], see `memory.moved`. attention: [N], of the question in the last third of the layers, summed over them,
    its rows and heads.
    """

    memory: Memory
    maps: dict[int, Tensor]
    change: Tensor
    attention: Tensor


@dataclass
class Means:
    """Means by name and layer, of what was there."""

    sums: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, name: str, layer: int, value: float | None) -> None:
        if value is not None:
            self.sums.setdefault((name, layer), []).append(value)

    def mean(self, name: str, layer: int = 0) -> float | None:
        """To DIGITS digits; None where there was nothing."""
        found = self.sums.get((name, layer))
        return float(f"{sum(found) / len(found):.{DIGITS}g}") if found else None


class FusionStudy:
    """Prompts of tasks at a length, read plainly and with each fusion method of `specs`.

    specs: fusion methods and controls, as `evals.methods.parse` reads them; dense is passed over. samples: prompts of
    each task. Raises InvalidInput for a decode, prefill or eviction method, for row_order (whose rows do not see what
    their positions say), and where prompts do not fit.
    """

    def __init__(
        self, model: Any, tokenizer: Any, tasks: Sequence[Task], specs: Sequence[Spec], *, length: int = 4096,
        samples: int = 4, seed: int = 0, chunk_tokens: int = 512, behind: Behind = "system",
    ):  # fmt: skip
        if samples < 1:
            raise InvalidInput(f"samples: expected at least 1, got {samples}")
        check_length(model, length, 0)
        refuse_slots(specs, NAMED[1:], "this looks at prompts as they are read, before keys are evicted")
        self.specs = [spec for spec in specs if spec.fuse is not None]
        for spec in specs:
            if isinstance(spec.fuse, RowOrder):
                raise InvalidInput(
                    f"{spec.label!r}: the rows of row_order do not see what their positions say, so this cannot "
                    f"compare them layer by layer; longreach eval takes it"
                )
            if spec.decode.name != DENSE or (not spec.fuse and spec.label != DENSE):
                raise InvalidInput(f"{spec.label!r}: expected 'dense fuse=NAME', of a method or random or oracle")
        if not self.specs:
            raise InvalidInput("no fusion method; give one, such as 'dense fuse=a3'")
        shape = shape_of(model)
        for spec in self.specs:
            assert spec.fuse is not None
            spec.fuse.check(shape)
        if behind == "bos":
            prefix_tokens(tokenizer, "bos", (), 0)
        self.model, self.tokenizer, self.length, self.behind = model, tokenizer, length, behind
        self.layers = shape.layers
        maker = Maker(at_lengths(tasks, [length]), tokenizer, seed, chunk_tokens)
        self.prompts = {task.name: [maker.make(task.name, n, samples) for n in range(samples)] for task in tasks}

    def run(self, chunk: int, progress: Progress = unseen) -> dict[str, Any]:
        """{"samples", "results"} of a record: see `results_of`. chunk: tokens per pass while chunks are computed."""
        samples, total = list[dict[str, Any]](), sum(map(len, self.prompts.values()))
        found = {spec.label: Means() for spec in self.specs}
        by_task = {task: {spec.label: Means() for spec in self.specs} for task in self.prompts}
        room = CacheConfig(capacity=self.length)
        with (
            attach(self.model, fuse=PIE(), cache=room) as session,
            progress("reading with each method", total * len(self.specs)) as advance,
        ):
            dependence = any(spec.fuse and spec.fuse.needs_dependence for spec in self.specs)
            prompts = FusedPrompts(session, self.tokenizer, self.behind, chunk, graph=False, dependence=dependence)
            for task, asked in self.prompts.items():
                for one in asked:
                    prompt = prompts.of(one.prompt, one.chunks)
                    truth = self._truth(session, prompts, prompt)
                    for spec in self.specs:
                        self._read(spec, prompts, prompt, truth, (found[spec.label], by_task[task][spec.label]))
                        advance(1)
                    samples.append(_told(task, one, prompt))
        return {"samples": samples, "results": {
            label: {**self.results_of(means), "tasks": {
                task: {name: mine[label].mean(name) for name in CHOICES} for task, mine in by_task.items()
            }} for label, means in found.items()
        }}  # fmt: skip

    def results_of(self, means: Means) -> dict[str, Any]:
        """Of a method, means over prompts.

        layers: by layer, attention: norm of the difference of the question's attention maps, over the plain map's;
        key, value: norm of the difference of keys and values from plain ones over the norm of these, over all stored
        tokens that are not exact; key_recomputed, value_recomputed, key_reused, value_reused: the same over those of
        them that were recomputed and over the others. None if there are no such tokens.
        chosen: recomputed tokens. hits_change: share of as many tokens that a plain prefill moves most that were
        chosen. hits_attention: share of the TOP tokens that were, to which the plain question attends most in the last
        third of the layers; attention_chosen: share of that attention on stored inexact tokens that is on chosen ones.
        """
        layers = {name: [means.mean(name, layer) for layer in range(self.layers)] for name in LAYERS}
        return {"layers": layers, **{name: means.mean(name) for name in CHOICES}}

    def _truth(self, session: Session, prompts: FusedPrompts, prompt: FusedPrompt) -> Truth:
        count, asking = len(prompt.ids), len(prompt.ids) - prompt.question
        reader, seen = Reader(session, count), QuestionAttention(asking, count)
        session.on_layer = seen
        try:
            reader.read(prompt.ids)  # in one pass, as fused prompts are
        finally:
            session.on_layer = None
        deep = range(self.layers - max(1, self.layers // 3), self.layers)
        attention = torch.stack([seen.maps[layer].sum((0, 1)) for layer in deep]).sum(0)
        return Truth(held(reader.cache), seen.maps, prompts.moved(prompt), attention)

    def _read(
        self, spec: Spec, prompts: FusedPrompts, prompt: FusedPrompt, truth: Truth, into: Sequence[Means]
    ) -> None:
        session, count = prompts.session, len(prompt.ids)
        seen, chosen = QuestionAttention(count - prompt.question, count), list[Tensor]()
        session.on_layer = seen
        try:
            assert spec.fuse is not None
            reader, _, _ = prompts.read(prompt, spec.fuse, noted=chosen)
        finally:
            session.on_layer = None
        assert reader.cache is not None
        parts = prompt.parts(self.model.device, chunk_frequencies=uses_chunk_frequencies(self.model, count))
        there = parts.candidates
        again = torch.zeros_like(there).index_fill(0, chosen[-1], True)
        for means in into:
            for name, value in _choices(again, parts, truth).items():
                means.add(name, 0, value)
        for layer, (mine, plain) in enumerate(zip(held(reader.cache), truth.memory, strict=True)):
            values = {"attention": _off(seen.maps[layer], truth.maps[layer])}
            for kind, a, b in zip(("key", "value"), mine, plain, strict=True):
                for where, mask in (("", there), ("_recomputed", again), ("_reused", there & ~again)):
                    values[f"{kind}{where}"] = _off(a[mask], b[mask]) if bool(mask.any()) else None
            for means in into:
                for name, value in values.items():
                    means.add(name, layer, value)


def _off(mine: Tensor, plain: Tensor) -> float | None:
    return float((mine.float() - plain.float()).norm() / plain.float().norm())


def _choices(again: Tensor, parts: PromptParts, truth: Truth) -> Mapping[str, float | None]:
    chosen, there = int(again.sum()), parts.candidates

    def hits(scores: Tensor, count: int) -> float | None:
        top = best(scores, parts, count / len(there))
        return int(again[top].sum()) / len(top) if len(top) else None

    on = float(truth.attention[there].sum())
    return {
        "chosen": float(chosen),
        "hits_change": hits(truth.change, chosen),
        "hits_attention": hits(truth.attention, TOP),
        "attention_chosen": float(truth.attention[again].sum()) / on if on else None,
    }


def _told(task: str, one: PromptSample, prompt: FusedPrompt) -> dict[str, Any]:
    return {"task": task, "question_tokens": len(prompt.ids) - prompt.question, **one.to_json()}


def deep_layers(layers: int) -> dict[str, list[int]]:
    """Layers that `hits_change` and `hits_attention` look at, as a record says it."""
    return {"change": list(middle(layers)), "attention": list(range(layers - max(1, layers // 3), layers))}
