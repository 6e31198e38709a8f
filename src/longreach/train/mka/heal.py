"""Healing of a converted model: divergence from its original, or the next token, on given sequences.

Master weights are fp32, a GPU computes in bf16. An interrupted training continues with the sequences, learning rates
and budgets that it would have got; with a budget in steps, on a CPU, to the same bits.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from longreach.adapters.transformers import context_limit
from longreach.adapters.transformers.oom import out_of_memory
from longreach.errors import InvalidInput, LongreachError, OutOfMemory
from longreach.evals.progress import Progress, unseen
from longreach.records import environment
from longreach.train.mka import checkpoint
from longreach.train.mka.budgets import Budget, budget, check_budgets, drawn
from longreach.train.mka.data import Batch, Cycle, Source, stream
from longreach.train.mka.distance import compare, states_of
from longreach.train.mka.logits import check_head, vocabulary_of
from longreach.train.mka.options import HealOptions
from longreach.train.mka.trainer import StepResult, Trainer

MAX_BAD_STEPS = 20  # in a row
MEASURED = 8  # held-out sequences of each length that the distance is measured on
EQUAL = 1e-6  # nats a token: a divergence from the teacher that is rounding
FORMAT = 1


@dataclass(frozen=True)
class Done:
    """How far training has come: steps, target tokens, seconds, steps that were skipped."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0


def heal(
    model: Any,
    sources: Sequence[Source],
    options: HealOptions,
    *,
    teacher: Any = None,
    folder: Path | None = None,
    save: Callable[[Path], None] | None = None,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    workers: int = 0,
    save_every: float = 300.0,
    progress: Progress = unseen,
    on_step: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
) -> dict[str, Any]:
    """Train a converted model, in place; the record of it, as JSON.

    teacher: the original, for `options.kl`. folder: for the state to resume, a journal (a line a step), the record, and
    the model, which `save` writes there; None to keep nothing on disk. resume: continue from the folder's state, with
    the same options; begin if it is empty. about: entries of the record on models and data. workers: processes that
    make batches; 0: a thread does. save_every: seconds between checkpoints. on_step: called with each step's number
    and line.

    The first Ctrl-C ends training after the step, with a checkpoint; the second at once.
    Raises InvalidInput for options, lengths or a teacher that do not fit the model, and LongreachError after
    MAX_BAD_STEPS steps in a row whose loss or gradient is not finite.
    """
    _check(model, teacher, sources, options)
    resume = resume and folder is not None and not checkpoint.is_free(folder)
    if folder is not None and not resume:
        checkpoint.free_folder(folder)
    trainer, done = Trainer(model, teacher, options), Done()
    before: dict[str, Any] | None = None
    run = {"options": options.to_json(), "sources": [source.describe() for source in sources], **(about or {})}
    with trainer.running():
        if resume:
            assert folder is not None
            state, kept = checkpoint.load_state(folder)
            _check_same(folder, kept["run"], run)
            done, before = Done(**kept["done"]), kept["before"]
            trainer.restore(state, done.steps - done.skipped)
        held = [source.held_out(length, MEASURED) for source in sources for length in dict.fromkeys(options.lengths)]
        original = None
        if teacher is not None:
            with progress("reading with the original", _tokens(held)) as advance:
                original = states_of(teacher, held, advance)

        def measured() -> dict[str, Any]:
            with progress("measuring", _tokens(held)) as advance, _evaluating(model):
                return compare(states_of(model, held, advance, trainer.autocast()), original).to_json()

        before = before or measured()
        if teacher is not None and not options.nll and not done.steps and before["kl"] < EQUAL:
            warnings.warn(
                f"model and teacher give the same distributions (KL {before['kl']:.1g}), so there is nothing to learn "
                f"but rounding; give a weight to the next-token loss (nll), or longer sequences",
                stacklevel=2,
            )
        out = Output(folder, save, trainer, run, before)
        done = _loop(trainer, sources, options, done, out, workers, save_every, progress, on_step)
        after = measured()
    return out.finish(done, after)


class Output:
    """What training writes into its folder."""

    def __init__(self, folder: Path | None, save: Callable[[Path], None] | None, trainer: Trainer,
                 run: dict[str, Any], before: dict[str, Any]):  # fmt: skip
        self.folder, self._save, self._trainer, self._run, self._before = folder, save, trainer, run, before

    def journal(self, first: int) -> checkpoint.Steps:
        """The journal, from step `first` on."""
        return checkpoint.Steps(None if self.folder is None else self.folder / checkpoint.JOURNAL, first)

    def checkpoint(self, done: Done) -> None:
        """Model, record and state. The state comes last: with it, training continues."""
        if self.folder is None:
            return
        try:
            if self._save is not None:
                self._save(self.folder)
            checkpoint.write_json(self.folder / checkpoint.RECORD, self._record(done, None))
            kept = {"run": self._run, "before": self._before, "done": asdict(done)}
            checkpoint.save_state(self.folder, self._trainer.state(), kept)
        except (OSError, SafetensorError) as error:
            raise LongreachError(
                f"cannot write a checkpoint to {self.folder} ({error}); the one before is whole: free some space, then "
                f"--resume"
            ) from error

    def note(self, error: BaseException, done: Done, text: str) -> None:
        """Add to an error what is on disk, if anything is: text with places for the step and the folder."""
        if self.folder is not None:
            error.add_note(text.format(done.steps, self.folder))

    def finish(self, done: Done, after: dict[str, Any]) -> dict[str, Any]:
        """The record of a complete training; the state to resume is removed."""
        record = self._record(done, after)
        if self.folder is not None:
            checkpoint.write_json(self.folder / checkpoint.RECORD, record)
            (self.folder / checkpoint.STATE).unlink(missing_ok=True)
        return record

    def _record(self, done: Done, after: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "kind": "mka training", "format": FORMAT, **self._run, "complete": after is not None, **asdict(done),
            "before": self._before, "after": after, **environment(self._trainer.device),
        }  # fmt: skip


def _loop(
    trainer: Trainer,
    sources: Sequence[Source],
    options: HealOptions,
    done: Done,
    out: Output,
    workers: int,
    save_every: float,
    progress: Progress,
    on_step: Callable[[int, dict[str, Any]], None],
) -> Done:
    cycle = Cycle(options.lengths, options.batch_tokens, len(sources))
    journal = out.journal(done.steps)
    total = options.steps if options.steps is not None else math.ceil(60 * (options.minutes or 0))
    bad, saved, started, earlier = 0, time.monotonic(), time.monotonic(), done.seconds
    with (
        stream(sources, cycle, done.steps * options.accumulate, workers) as batches,
        progress("training" if options.steps is not None else "training, seconds", total) as advance,
        _stop_between_steps() as stop,
    ):
        shown = _shown(options, done)
        advance(shown)
        while (fraction := options.fraction(done.steps, done.seconds)) < 1.0:
            try:
                given = [next(batches) for _ in range(options.accumulate)]
            except InvalidInput as error:  # texts are used up
                out.checkpoint(done)
                out.note(error, done, "the model after step {} is in {}")
                raise
            chosen, rate = drawn(options.budgets, options.seed, done.steps), options.rate(done.steps, fraction)
            with budget(trainer.model, chosen), _memory():
                result = trainer.step(given, rate)
            bad = 0 if result else bad + 1
            seconds, tokens = earlier + time.monotonic() - started, sum(batch.real for batch in given)
            line = _line(done.steps, seconds, seconds - done.seconds, tokens, given, rate, chosen, result)
            done = Done(done.steps + 1, done.tokens + tokens, seconds, done.skipped + (result is None))
            journal.add(line)
            on_step(done.steps, line)
            advance(min(total, _shown(options, done)) - shown)
            shown = min(total, _shown(options, done))
            if bad >= MAX_BAD_STEPS:
                raise LongreachError(
                    f"{bad} steps in a row had a loss or gradient that is not finite; lower the learning rate"
                )
            if stop.is_set():
                out.checkpoint(done)
                interrupt = KeyboardInterrupt()
                out.note(interrupt, done, "step {} is saved in {}; --resume continues from there")
                raise interrupt
            if time.monotonic() - saved > save_every:
                out.checkpoint(done)
                saved = time.monotonic()
        out.checkpoint(done)
    return done


def _shown(options: HealOptions, done: Done) -> int:
    return done.steps if options.steps is not None else int(done.seconds)


def _line(
    step: int, seconds: float, took: float, tokens: int, batches: Sequence[Batch], rate: float, chosen: Budget | None,
    result: StepResult | None,
) -> dict[str, Any]:  # fmt: skip
    """The journal's line of a step. rate: of learning, relative to the first. Skipped steps have no losses."""
    return {
        "step": step,
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / max(took, 1e-9)),
        "rate": rate,
        "lengths": [batch.kinds.shape[1] for batch in batches],
        "budget": None if chosen is None else list(chosen),
        **({"skipped": True} if result is None else asdict(result)),
    }


@contextmanager
def _stop_between_steps() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C sets the event; the second interrupts. Elsewhere than in the main thread it stays."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def first(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, first)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _memory() -> Iterator[None]:
    """Turn torch's out-of-memory errors into one that names the options to lower."""
    try:
        yield
    except BaseException as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemory(
            "memory ran out in a training step; lower --batch-tokens (with more --accumulate), give "
            "--checkpointing, or train fewer parameters (--train)"
        ) from error


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    mode = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(mode)


def _tokens(batches: Sequence[Batch]) -> int:
    return sum(batch.kinds.size for batch in batches)


def check_lengths(model: Any, lengths: Sequence[int]) -> None:
    """Raise InvalidInput for sequences that are longer than the model's context."""
    limit = context_limit(model)
    if limit is not None and max(lengths) > limit:
        raise InvalidInput(f"lengths: expected at most {limit} tokens, the model's context, got {max(lengths)}")


def _check(model: Any, teacher: Any, sources: Sequence[Source], options: HealOptions) -> None:
    """Raise InvalidInput, or Unsupported, where model, teacher, sources and options do not fit together."""
    if not sources:
        raise InvalidInput("nothing to train on; give texts, tasks or the recipe's data")
    check_lengths(model, options.lengths)
    if teacher is None and options.kl:
        raise InvalidInput("kl: without a teacher there is nothing to diverge from; give one, or kl=0 and nll=1")
    if teacher is model:
        raise InvalidInput("teacher: expected another model than the one that is trained, got the same")
    check_head(model)
    if teacher is not None:
        check_head(teacher)
        ours, theirs = vocabulary_of(model), vocabulary_of(teacher)
        if ours != theirs:
            raise InvalidInput(
                f"teacher: expected a model of the same vocabulary, {ours} tokens, got one of {theirs}; give the "
                f"original of the converted model"
            )
    check_budgets(model, options.budgets)


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InvalidInput where the run to resume was another one."""
    differs = [name for name in sorted({*before["options"], *now["options"]})
               if before["options"].get(name) != now["options"].get(name)]  # fmt: skip
    differs += [name for name in ("sources", "teacher", "model") if before.get(name) != now.get(name)]
    if differs:
        raise InvalidInput(
            f"{folder} was trained with other {', '.join(differs)}; resume with the same, or choose another --out"
        )
