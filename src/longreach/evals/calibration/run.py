"""A calibration: a model, the prompts that it reads, the journal, and the plan's account of how it was made."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from longreach.adapters.transformers import shape_of
from longreach.errors import InvalidInput, UnknownName
from longreach.evals.calibration.base import Calibration, PlanContent
from longreach.evals.calibration.gather import Gather, gather
from longreach.evals.calibration.prompts import make
from longreach.evals.model_info import info_of
from longreach.evals.perplexity import Text, text_of
from longreach.evals.progress import Progress, unseen
from longreach.methods.call import ModelShape
from longreach.plans import Made, Plan, PlannedModel
from longreach.records import Journal, check_writable, environment
from longreach.tasks import registry
from longreach.tasks.base import Task

KINDS = {  # kind of plan -> "module:class" of its options
    "kascade": "longreach.evals.calibration.kascade:KascadeCalibration",
    "loki": "longreach.evals.calibration.loki:LokiCalibration",
    "mac": "longreach.evals.calibration.mac:MACCalibration",
    "magicpig": "longreach.evals.calibration.magicpig:MagicPIGCalibration",
    "a3_deep": "longreach.evals.calibration.a3_deep:A3DeepCalibration",
}
PASS_TOKENS = 512  # of a pass over a prompt, as on the command line


def calibration(kind: str, **options: Any) -> Calibration:
    """The options of a kind of calibration. Raises UnknownName (kind or option), InvalidInput (a value)."""
    if kind not in KINDS:
        raise UnknownName("method with a calibration", kind, KINDS)
    module, _, name = KINDS[kind].partition(":")
    found: type[Calibration] = getattr(import_module(module), name)
    known = [field.name for field in dataclasses.fields(found)]
    for option in options:
        if option not in known:
            raise UnknownName(f"option of calibrate {kind}", option, known)
    return found(**options)


@dataclass(frozen=True)
class PromptChoice:
    """The prompts of a calibration.

    texts: cut into windows. tasks: whose prompts, with their right answers, are read. length: tokens of a prompt.
    count: windows of the texts together, and prompts of each task. seed: of the tasks' prompts. haystack: a text in
    which tasks hide needles, None for the one that evaluations use. pass_tokens: prompt tokens of a pass.
    """

    texts: Sequence[Path | Text] = ()
    tasks: Sequence[Task] = ()
    length: int = 4096
    count: int = 8
    seed: int = 1
    haystack: Path | None = None
    pass_tokens: int = PASS_TOKENS


class CalibrationRun:
    """A model, and prompts to calibrate it on. The prompts are made at once, and read by `gather` or `measure`.

    kind: what is measured, for the journal, and the plan's kind. about: the model's entry in records. settings: options
    that affect the gathered parts. output: the plan's (or record's) file; the journal is in its folder. None: neither
    is written. least: the fewest tokens of a prompt, for a model's shape. chunk_tokens: as `Calibration.chunk_tokens`.
    """

    def __init__(
        self, kind: str, model: Any, tokenizer: Any, about: Mapping[str, Any], chosen: PromptChoice,
        settings: Mapping[str, Any], *, output: Path | None, least: Callable[[ModelShape], int] = lambda shape: 1,
        chunk_tokens: int | None = None, progress: Progress = unseen,
    ):  # fmt: skip
        self.kind, self.model, self.tokenizer, self.output = kind, model, tokenizer, output
        self.shape, self.about, self.where = shape_of(model), about, environment(model.device)
        self.chosen, self.progress = chosen, progress
        with progress("making prompts", chosen.count * (len(chosen.tasks) + bool(chosen.texts))) as advance:
            self.prompts = make(
                model, tokenizer, chosen.texts, chosen.tasks, length=chosen.length, count=chosen.count,
                least=least(self.shape), seed=chosen.seed, haystack=chosen.haystack, made=advance,
                chunk_tokens=chunk_tokens,
            )  # fmt: skip
        self.settings = {
            "length": chosen.length, "prompts": chosen.count, "prefill_chunk_size": chosen.pass_tokens,
            "dtype": about["dtype"], **settings,
        }  # fmt: skip
        self.seconds, self.before = 0.0, 0

    def gather(self, what: Gather) -> list[Any]:
        """What each prompt gave; those of an interrupted run are taken over."""
        return self.measure(partial(gather, self.model, self.prompts.prompts, what))

    def measure(self, each: Callable[..., list[Any]]) -> list[Any]:
        """As `gather`, of each(chunk=, progress=, done=, keep=): a function like `gather` of all prompts."""
        said = {
            "calibrate": self.kind,
            "model": self.about,
            "settings": self.settings,
            "seed": self.chosen.seed,
            "data": self.prompts.data,
            "sha256": self.prompts.sha256,
            **self.where,
        }
        started = time.perf_counter()
        self.journal = Journal(self.output, said)
        self.before = len(self.journal.done)
        with self.journal as journal:
            parts = each(
                chunk=self.chosen.pass_tokens, progress=self.progress, done=journal.done, keep=journal.add
            )  # fmt: skip
        self.seconds = time.perf_counter() - started
        return parts

    def plan(self, content: PlanContent) -> Plan:
        """The plan, written to the output. The journal is removed."""
        versions, commit = self.where["versions"], self.where["commit"]
        made = Made(
            data=self.prompts.data, sha256=self.prompts.sha256, tokens=self.prompts.tokens,
            settings={**self.settings, **content.settings}, seed=self.chosen.seed, longreach=version("longreach"),
            commit=f"{commit}+dirty" if commit and self.where["dirty"] else commit,
            torch=versions["torch"], transformers=versions["transformers"], device=self.where["device"]["name"],
        )  # fmt: skip
        model = PlannedModel.of(self.about["name"], self.shape)
        plan = Plan(self.kind, model, content.values, made, content.arrays)
        if self.output is not None:
            plan.save(self.output)
        self.journal.remove()
        return plan


def calibrate(
    model: Any,
    tokenizer: Any,
    method: str,
    *,
    texts: str | Path | Sequence[str | Path] = (),
    tasks: str = "",
    length: int = 4096,
    prompts: int = 8,
    seed: int = 1,
    haystack: str | Path | None = None,
    prefill_chunk_size: int = PASS_TOKENS,
    output: str | Path | None = None,
    progress: Progress = unseen,
    **options: Any,
) -> Plan:
    """A method's plan for a model, made of what the model does with texts and tasks; as `longreach calibrate`.

    model, tokenizer: as `longreach.load` returns them, or transformers' own; not attached.
    method: "kascade", "loki", "mac", "magicpig" or "a3_deep".
    texts: a text or several, cut into windows: str is the text itself, Path a UTF-8 file. Not for a3_deep.
    tasks: names as for `longreach eval --tasks`, such as "vt,cwe": their prompts, with the right answers.
    length: tokens of a prompt. prompts: windows of the texts together, and prompts of each task. seed: of the tasks'
        prompts; evaluations have 0. haystack: a text file in which tasks hide needles.
    prefill_chunk_size: tokens of a pass.
    output: a file for the plan, PLAN.json; the same call continues an interrupted calibration. A method then takes it:
        attach(model, decode="kascade plan=PLAN.json").
    options: of the kind, as on the command line (`longreach calibrate METHOD --help`), such as budget=3.

    Returns the Plan: kind, model, values, arrays, made (data, settings, versions).
    Raises UnknownName (method, option, task), InvalidInput (options, texts too short), Unsupported (the model).
    """
    kind = calibration(method, **options)
    place = None if output is None else Path(output)
    if place is not None:
        check_writable(place)
    given = [texts] if isinstance(texts, (str, Path)) else list(texts)
    if given and kind.tasks is not None:
        raise InvalidInput(f"texts: {method} is calibrated on prompts of tasks only; leave texts out")
    names = tasks or kind.tasks
    chosen = PromptChoice(
        [text_of(text, number, tokenizer) for number, text in enumerate(given)],
        registry.choose(names) if names else [], length, prompts, seed, None if haystack is None else Path(haystack),
        prefill_chunk_size,
    )  # fmt: skip
    kind.check(shape_of(model))
    run = CalibrationRun(
        method, model, tokenizer, info_of(model), chosen, kind.settings(), output=place, least=kind.least_tokens,
        chunk_tokens=kind.chunk_tokens, progress=progress,
    )  # fmt: skip
    remark = kind.remark(run)
    if remark is not None:
        warnings.warn(remark, stacklevel=2)
    return run.plan(kind.make(run))
