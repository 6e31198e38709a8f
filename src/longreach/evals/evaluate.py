"""Tasks asked of a model with every method: prompts are read once for all decode methods that share a prefill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from longreach.adapters.transformers import (
    BatchReader,
    Session,
    attach,
    check_host,
    check_method,
    context_limit,
    planned_shape,
    shape_of,
    stop_tokens,
    unapplied,
)
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, UnknownName
from longreach.evals.failures import failure
from longreach.evals.fusion.chunks import BEHIND, Behind, FusedPrompts, prefix_tokens
from longreach.evals.methods import NAMED, Spec, by_reading, refuse_slots
from longreach.evals.plans import plans_of, to_json
from longreach.evals.progress import Progress, counted, unseen
from longreach.evals.prompt_workers import Workers
from longreach.evals.prompting import Maker, PromptSample, at_lengths, samples_of
from longreach.evals.read_shares import kernels_used, phase_bytes
from longreach.evals.sampling import bars_of, sampling_of
from longreach.methods.fusion import PIE
from longreach.tasks.base import Task

Keep = Callable[[str, Any], None]
CHUNK_ENDS = ("text", "tokens")
QUESTION = ("prefill", "decode")


@dataclass(frozen=True)
class Settings:
    """lengths: tokens of prompt and answer together, each task asked at each. samples: of each task at a length, None
    for all of a data set and 20 of what is made; limit: at most. draws: answers to each prompt, more than one where
    temperature > 0 draws them. batch: prompts at a time. chunk: prompt tokens per pass. graph: see generate.
    question: "prefill": read with the prompt; "decode": fed token by token through the decode steps of each method.
    chunk_tokens: cut the documents of prompts into chunks of at most this many tokens, for fusion; None to tokenise
    each prompt as one text. chunks: what they are computed behind, where a method fuses them. chunk_ends: "text", with
    a paragraph or sentence if possible, or "tokens", when a chunk is full.
    """

    lengths: tuple[int, ...]
    samples: int | None = None
    limit: int | None = None
    seed: int = 0
    draws: int = 1
    temperature: float = 0.0
    batch: int = 1
    chunk: int = 512
    graph: bool | None = None
    chunk_tokens: int | None = None
    chunks: Behind = "system"
    chunk_ends: str = CHUNK_ENDS[0]
    question: str = QUESTION[0]

    def __post_init__(self) -> None:
        if not self.lengths or len({*self.lengths}) < len(self.lengths):
            raise InvalidInput(f"lengths: expected some, each once, got {list(self.lengths)}")
        if self.chunks not in BEHIND:
            raise UnknownName("prefix of chunks", self.chunks, BEHIND)
        if self.chunk_ends not in CHUNK_ENDS:
            raise UnknownName("end of chunks", self.chunk_ends, CHUNK_ENDS)
        if self.question not in QUESTION:
            raise UnknownName("way to read questions", self.question, QUESTION)
        if not 0 <= self.temperature < float("inf"):
            raise InvalidInput(f"temperature: expected a number >= 0 (0 for greedy), got {self.temperature}")
        if self.draws > 1 and not self.temperature:
            raise InvalidInput(f"{self.draws} draws of a greedy answer are all the same; give a temperature above 0")

    @property
    def longest(self) -> int:
        """The room that every prompt is read in."""
        return max(self.lengths)


def failed(part: Sequence[dict[str, Any]]) -> int:
    """Answers of a part that failed with an error."""
    return sum(answer["error"] is not None for answers in part for answer in answers["answers"])


class Evaluation:
    """A model, tasks and methods; `run` yields parts, in batches, which `scores.results` puts together.

    tasks: what is asked, by the name it goes by in parts and record; see `at_lengths`.

    workers: processes that make prompts while the model answers; with 0 all are made before it does. `close` ends them.
    cache: its place in memory; its capacity is the longest length.
    Raises InvalidInput for a length beyond the model's context and for a task that cannot be built at that length,
    Unsupported for eviction from host memory.
    """

    def __init__(
        self, model: Any, tokenizer: Any, tasks: Sequence[Task], specs: Sequence[Spec], settings: Settings,
        workers: int = 0, cache: CacheConfig | None = None,
    ):  # fmt: skip
        limit = context_limit(model)
        if limit is not None and settings.longest > limit:
            raise InvalidInput(
                f"length {settings.longest} exceeds the model's context of {limit} tokens; lower --length"
            )
        self.room = replace(cache or CacheConfig(), capacity=settings.longest)
        for spec in specs:
            check_method(model, spec.prefill, "prefill")
            check_method(model, spec.decode)
            if spec.fuse is not None:
                spec.fuse.check(shape_of(model))
            check_host(self.room, spec.evict, shape_of(model))
        if any(spec.fuse for spec in specs) and settings.chunk_tokens is None:
            raise InvalidInput("fusion takes documents cut into chunks; give chunk_tokens, such as 512")
        if settings.question == "decode":
            refuse_slots(specs, NAMED, "the question must be read with the documents; take question prefill")
        if any(spec.fuse for spec in specs) and settings.chunks == "bos":
            prefix_tokens(tokenizer, "bos", (), 0)
        self.model, self.tokenizer, self.specs, self.settings = model, tokenizer, list(specs), settings
        self.tasks = at_lengths(tasks, settings.lengths)
        self.stop = stop_tokens(model, tokenizer)
        self.not_applied = unapplied(model, sampled=settings.temperature > 0)
        self.asked: dict[str, Sequence[PromptSample]] = {}
        self.workers = workers
        self._making: Workers | None = None
        self._warmed = set[str]()  # labels of methods that ran a decode step

    def build(self, progress: Progress = unseen) -> None:
        """Make all prompts; they are the same for every method.

        Worker processes make them while the model answers: then this returns when the first prompt of each task is
        made, so that a task that cannot be built is refused before anything is asked, and `close` ends them.
        """
        totals = {name: samples_of(t.task, self.settings.samples, self.settings.limit)
                  for name, t in self.tasks.items()}  # fmt: skip
        maker = Maker(
            self.tasks, self.tokenizer, self.settings.seed, self.settings.chunk_tokens,
            anywhere=self.settings.chunk_ends == "tokens", question=self.settings.question == "decode",
        )  # fmt: skip
        if self.workers:
            self._making = Workers(maker, totals, self.workers)
            self.asked = dict(self._making.samples)
            with progress("making the first prompts", len(totals)) as advance:
                for asked in self.asked.values():
                    advance(len(asked[:1]))
            return
        with progress("making prompts", sum(totals.values())) as advance:
            for name, total in totals.items():
                made = list[PromptSample]()
                for number in range(total):
                    made.append(maker.make(name, number, total))
                    advance(1)
                self.asked[name] = made

    def close(self) -> None:
        """End the worker processes, if any; prompts they have not made are lost."""
        if self._making is not None:
            self._making.close()

    def run(self, done: dict[str, Any], keep: Keep, progress: Progress = unseen) -> dict[str, Any]:
        """All parts: those in `done`, and new ones, for which `keep` is called. Parts are JSON values.

        `keep` is not called for a part with a failed answer, so that a resumed run computes it again.
        Raises MeasurementFailed where the device is lost.
        """
        parts = dict(done)
        for specs in by_reading(self.specs, fused_together=True):
            open_parts = [p for p in self._parts(specs[0].label) if p[0] not in done]
            if not open_parts:
                continue
            prefill, fuse = specs[0].prefill, None if specs[0].fuse is None else PIE()  # fused: each read takes its own
            evict = None if fuse else specs[0].evict
            what = "fusion" if fuse else f"{prefill.name} prefill{f', {evict.name}' if evict else ''}"
            with (
                attach(self.model, fuse=fuse, prefill=prefill, evict=evict, cache=self.room) as session,
                progress(f"{what}, {counted(len(specs), 'method')}", len(open_parts)) as advance,
            ):
                session.prepare(*(spec.decode for spec in specs))
                # eviction moves memory, so every batch would need a new capture
                reader = BatchReader(session, self.settings.chunk, graph=False if evict else self.settings.graph)
                prompts = self._fused_prompts(session) if fuse else None
                for key, name, first in open_parts:
                    asked, task = self.asked[name][first : first + self.settings.batch], self.tasks[name].task
                    if prompts is None:
                        parts[key] = self._part(session, reader, specs, task, asked)
                    else:
                        parts[key] = [a for one in asked for a in self._fused(prompts, specs, task, one)]
                    if not failed(parts[key]):
                        keep(key, parts[key])
                    advance(1)
        return parts

    def _parts(self, group: str) -> Iterator[tuple[str, str, int]]:
        """(its name, its task's, first prompt's number) of each batch under a prefill, which its first method's label
        names."""
        for name, asked in self.asked.items():
            for first in range(0, len(asked), self.settings.batch):
                yield f"{group}|{name}|{first}", name, first

    def _part(
        self, session: Session, reader: BatchReader, specs: list[Spec], task: Task, asked: Sequence[PromptSample]
    ) -> list[dict[str, Any]]:
        """Answers of all methods to a batch. If it fails, prompt by prompt: only those that crash are failures."""
        try:
            session.reset_report()
            read, fed = self._split(asked)
            logits = reader.read(read)
            reports = [session.report(spec.decode) for spec in specs]
        except Exception as error:
            what = failure(error, self.model.device)
            if len(asked) == 1:
                return [self._failed(spec, asked[0], what) for spec in specs]
            return self._one_by_one(session, reader, specs, task, asked)
        found = []
        for spec, report in zip(specs, reports, strict=True):
            try:
                answered = self._answers(session, reader, spec, task, asked, logits, fed)
            except Exception as error:
                what = failure(error, self.model.device)
                if len(asked) > 1:
                    return self._one_by_one(session, reader, specs, task, asked)
                answered = self._failed(spec, asked[0], what)
            bytes_read, how = phase_bytes(report, "prefill"), kernels_used(report, "prefill")
            found.append({**answered, "prefill_bytes": bytes_read, "prefill_ran": how})
        return found

    def _split(self, asked: Sequence[PromptSample]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]] | None]:
        """(what is read, what decode steps are fed before the answer: as many tokens of each prompt as the longest
        question of the batch has)."""
        if self.settings.question == "prefill":
            return [a.prompt for a in asked], None
        count = max(a.question_tokens or 0 for a in asked)
        return [a.prompt[:-count] for a in asked], [a.prompt[-count:] for a in asked]

    def _one_by_one(
        self, session: Session, reader: BatchReader, specs: list[Spec], task: Task, asked: Sequence[PromptSample]
    ) -> list[dict[str, Any]]:
        found = [answers for one in asked for answers in self._part(session, reader, specs, task, [one])]
        return [{**answers, "alone": True} for answers in found]

    def _fused_prompts(self, session: Session) -> FusedPrompts:
        settings, dependence = self.settings, any(s.fuse and s.fuse.needs_dependence for s in self.specs)
        return FusedPrompts(
            session, self.tokenizer, settings.chunks, settings.chunk, graph=settings.graph, dependence=dependence
        )

    def _fused(self, prompts: FusedPrompts, specs: list[Spec], task: Task, one: PromptSample) -> list[dict[str, Any]]:
        """Answers of all fusion methods to a prompt, with its chunks computed once. A method that refuses the prompt
        (InvalidInput) fails in this prompt alone."""
        device, session = self.model.device, prompts.session
        try:
            prompt = prompts.of(one.prompt, one.chunks)
        except Exception as error:
            what = failure(error, device, of_sample=True)
            return [self._failed(spec, one, what) for spec in specs]
        found, read = list[dict[str, Any]](), None
        for spec in sorted(specs, key=lambda s: [(o.fuse, o.evict) for o in specs].index((s.fuse, s.evict))):
            try:
                if read is None or read[0] != (spec.fuse, spec.evict):
                    assert spec.fuse is not None
                    read = (spec.fuse, spec.evict), *prompts.read(prompt, spec.fuse, spec.evict)
                    reports = {s.decode: session.report(s.decode) for s in specs}
                _, reader, logits, became = read
                answered = self._answers(session, reader, spec, task, [one], logits)
            except Exception as error:
                read = None
                found.append(self._failed(spec, one, failure(error, device, of_sample=True)))
                continue
            report = reports[spec.decode]
            found.append({
                **answered, "prefill_bytes": phase_bytes(report, "prefill"),
                "prefill_ran": kernels_used(report, "prefill"), "fusion": asdict(became),
            })  # fmt: skip
        return found

    def _failed(self, spec: Spec, one: PromptSample, what: str) -> dict[str, Any]:
        answer = {"number": one.number, "text": "", "score": 0.0, "tokens": 0, "stopped": False, "ids": [],
                  "error": what}  # fmt: skip
        answers = [{**answer, "draw": draw} for draw in range(self.settings.draws)]
        return {"label": spec.label, "answers": answers, "prefill_bytes": None, "decode_bytes": None, "seconds": None}

    def _answers(
        self,
        session: Session,
        reader: BatchReader,
        spec: Spec,
        task: Task,
        asked: Sequence[PromptSample],
        logits: Tensor,
        fed: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        session.switch(spec.decode)
        if spec.label not in self._warmed:  # else the first method's times would include what is compiled once
            reader.warm_up(logits, task.max_new_tokens)
            self._warmed.add(spec.label)
        answers, took, steps, setup, why = list[dict[str, Any]](), 0.0, 0, 0.0, None
        for draw in range(self.settings.draws):
            got = reader.answer(
                logits, task.max_new_tokens, self.stop, temperature=self.settings.temperature,
                seed=self._seed(task, asked[0].number, draw), fed=fed,
            )  # fmt: skip
            took, steps, setup = took + got.decode_seconds, steps + got.steps, setup + got.setup_seconds
            why = why or got.not_captured
            for one, tokens, stopped in zip(asked, got.tokens, got.stopped, strict=True):
                text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
                answers.append({
                    "number": one.number, "draw": draw, "text": text.strip(), "score": task.score(text, one.sample),
                    "tokens": len(tokens), "stopped": stopped, "ids": list(tokens), "error": None,
                })  # fmt: skip
        report = session.report()
        return {
            "label": spec.label,
            "answers": answers,
            "decode_bytes": phase_bytes(report, "decode"),
            "decode_ran": kernels_used(report, "decode"),
            "sampling": sampling_of(report),
            "error_bars": bars_of(report),
            "plans": to_json(plans_of(report, spec, planned_shape(self.model))),
            "not_captured": why,
            "seconds": {"read": reader.read_seconds, "decode": took, "steps": steps, "setup": setup},
        }

    def _seed(self, task: Task, number: int, draw: int) -> int:
        name = f"{self.settings.seed}/{task.name}/{number}/{draw}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])

    def config(self) -> dict[str, Any]:
        """The settings, as records keep them; not_applied: settings of the model's generation config left out."""
        names = {"chunk": "prefill_chunk_size"}
        left_out = {"graph", *(() if any(spec.fuse for spec in self.specs) else ("chunks",))}
        left_out |= {"chunk_tokens", "chunk_ends"} if self.settings.chunk_tokens is None else set()
        kept = {names.get(k, k): v for k, v in asdict(self.settings).items() if k not in left_out}
        lengths = {"length": self.settings.longest, "lengths": list(self.settings.lengths)}
        return {**kept, **lengths, "no_graph": self.settings.graph is False, "not_applied": self.not_applied}
