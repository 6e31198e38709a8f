"""How well attention can be sampled in a model, measured on the last rows of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from longreach.adapters.transformers import CHUNK, Advance, Reader, Session, attach, check_length, shape_of
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.evals.progress import Progress, unseen
from longreach.evals.prompting import Maker, at_lengths
from longreach.evals.sampling_study.geometry import KeyGeometry
from longreach.evals.sampling_study.panel import BITS, PAPER_4, TABLES, Trial, fitting, others, pairs, presets
from longreach.evals.sampling_study.probe import AngleProbe, FirstKeys, SamplingProbe
from longreach.methods.magicpig import MagicPIG
from longreach.runtime.forward import LayerHook
from longreach.tasks.base import Task

DIGITS = 6  # significant
CENTRE = MagicPIG.centre
EQUAL = 0.04  # share of the keys that a query head samples, at which pairs of bits and tables are compared
TOKENS = 16  # with which short texts begin, for the direction of the first key


def _unseen(done: int) -> None:
    """Progress that is not shown."""


class SamplingStudy:
    """Prompts of tasks at a length, read densely; the last `rows` rows of each are measured in every layer.

    samples: prompts of each task. centre: keys of MagicPIG's centre; None: its default, or a quarter of `length` where
    that is less. ablations: measure further pairs of bits and tables: those of Tables 11 and 12 of the paper, and for
    each number of bits as many tables as sample EQUAL of the keys in this model. seed: of prompts and of random draws.
    Raises InvalidInput where prompts do not fit or are too short for hash tables.
    """

    def __init__(
        self, model: Any, tokenizer: Any, tasks: Sequence[Task], *, length: int = 4096, samples: int = 2,
        rows: int = 8, seed: int = 0, centre: int | None = None, ablations: bool = True,
    ):  # fmt: skip
        for name, value in (("samples", samples), ("rows", rows)):
            if value < 1:
                raise InvalidInput(f"{name}: expected at least 1, got {value}")
        check_length(model, length, 0)
        self.model, self.length, self.rows, self.seed, self.ablations = model, length, rows, seed, ablations
        self.centre = min(CENTRE, length // 4) if centre is None else centre
        self.shape = shape_of(model)
        self.schedule = MagicPIG(centre=self.centre).schedule
        trials = [*presets(self.centre, seed), *others(seed)]
        self.trials, self.left_out = fitting(trials, self.shape)
        maker = Maker(at_lengths(tasks, [length]), tokenizer, seed)
        self.prompts = {task.name: [maker.make(task.name, n, samples) for n in range(samples)] for task in tasks}
        for name, some in self.prompts.items():
            for one in some:
                self._check(name, len(one.prompt))

    def _check(self, task: str, tokens: int) -> None:
        """Raise InvalidInput unless all complete blocks of a prompt are in the tables before its measured rows."""
        needs = self.schedule.start + (tokens - self.schedule.local) // self.schedule.seal
        if tokens - self.rows < needs:
            raise InvalidInput(
                f"{task}: expected a prompt of at least {needs + self.rows} tokens, of which {self.rows} are measured "
                f"rows, got {tokens}; raise --length, or lower --rows or --centre (now {self.centre})"
            )

    def run(self, chunk: int = CHUNK, progress: Progress = unseen) -> dict[str, Any]:
        """{"samples", "results"} of a record. chunk: prompt tokens per pass.

        Results. Lists are [layers] or [layers][heads], with None for a layer with a sliding window. Errors are
        |o - o_exact| / |o_exact|, means over rows.
        windows: of layers. shares, mass: `mass_of_best`, [layers][query heads][shares].
        estimators: by name: budgets (shares of the context); read, the mean share of the context that is read; errors
        [layers][query heads][budgets]; mean, median over all rows, layers and heads.
        ranges: see `geometry.ranges`. geometry: see `KeyGeometry.results`.
        methods: by label: method; line (methods of one line differ in their budget); weights; errors, mean, median;
        reads, shares of dense attention's bytes; layer_reads. For MagicPIG sampled_head and sampled_group, shares of
        the context, [layers][KV heads]; search and attention, shares of dense attention's bytes; table_share, memory
        over that of keys and values.
        top_k_same_keys: by label of a method with share=group, errors of the exact best keys, as many as that method
        reads for each row and KV head. top_k_in_place: the same, with the method's exact part and as many of the best
        other keys as it samples. left_out: why methods were not run, by name. fitted: {"share", "pairs"}.
        """
        samples, room = list[dict[str, Any]](), CacheConfig(capacity=self.length)
        with attach(self.model, cache=room) as session:
            fitted = self._fitted(session, chunk, progress) if self.ablations else []
            trials = self._all(fitted)
            asked = [(task, one) for task, some in self.prompts.items() for one in some]
            reader, passes = Reader(session, chunk, graph=False), -(-self.rows // chunk) * len(asked)
            with progress("measuring", passes * self.shape.layers) as advance:
                probe = SamplingProbe(self.shape, trials, self.seed, advance)
                for task, one in asked:
                    probe.begin(len(one.prompt) - self.rows, len(one.prompt))
                    self._read(reader, one.prompt, probe)
                    probe.finish()
                    samples.append({"task": task, **one.to_json(), "first_token": one.prompt[0]})
            if all(window is not None for window in probe.windows):
                raise Unsupported("all layers of this model have a sliding window; there is nothing to sample")
            self._first_keys(reader, probe.geometry)
        found = {**probe.results(), "left_out": self.left_out, "fitted": {"share": EQUAL, "pairs": fitted}}
        return {"samples": samples, "results": rounded(found)}

    def _all(self, fitted: Sequence[tuple[int, int]]) -> list[Trial]:
        """The trials, those on the same tables side by side."""
        more = [*PAPER_4, *((bits, TABLES) for bits in BITS), *fitted] if self.ablations else []
        trials = {t.label: t for t in (*self.trials, *pairs(more, self.centre, self.seed))}
        return list(trials.values())

    def _fitted(self, session: Session, chunk: int, progress: Progress) -> list[tuple[int, int]]:
        """For each number of bits the tables with which a query head samples EQUAL of the first prompt's keys."""
        prompt = next(iter(self.prompts.values()))[0].prompt
        probe, reader = AngleProbe(self.schedule), Reader(session, chunk, graph=False)
        probe.first = len(prompt) - self.rows
        with progress("finding tables", len(prompt)) as advance:
            self._read(reader, prompt, probe, advance)
        return [(bits, probe.angles.tables_for(bits, EQUAL)) for bits in BITS]

    def _read(self, reader: Reader, tokens: Sequence[int], hook: LayerHook, advance: Advance = _unseen) -> None:
        """Read a prompt, the measured rows in passes of their own. advance: by tokens."""
        with reader.rollback(), hooked(reader.session, hook):
            reader.read(tokens[: -self.rows], advance, then=self.rows)
            reader.read(tokens[-self.rows :], advance)

    def _first_keys(self, reader: Reader, geometry: KeyGeometry) -> None:
        """First keys of texts that begin with other tokens. The first key follows from the first token alone."""
        texts = [one.prompt for some in self.prompts.values() for one in some]
        tokens = sorted({token for text in texts for token in text})
        for token in Random(self.seed).sample(tokens, min(TOKENS, len(tokens))):
            with reader.rollback(), hooked(reader.session, FirstKeys(geometry)):
                reader.read([token])


@contextmanager
def hooked(session: Session, hook: LayerHook) -> Iterator[None]:
    """The session calls `hook` within this block."""
    session.on_layer = hook
    try:
        yield
    finally:
        session.on_layer = None


def rounded(value: Any) -> Any:
    """A record's values, floats to DIGITS significant digits."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
