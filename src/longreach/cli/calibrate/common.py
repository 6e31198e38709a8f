"""What all kinds of calibration share: arguments, prompts, the journal, and a plan's account of its calibration."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_chunk_size, add_json, add_model, count, load_model, positive
from longreach.cli.show import console, duration, emit, progress, waiting

if TYPE_CHECKING:
    from longreach.evals.calibration.gather import Gather
    from longreach.methods.call import ModelShape
    from longreach.plans import Plan


def add_prompts(parser: argparse.ArgumentParser, output: bool = True, tasks: str | None = None) -> None:
    """--model, texts and tasks, --output if `output`, --json. tasks: the default where prompts are of tasks only."""
    add_model(parser)
    if tasks is None:
        parser.add_argument("--text", type=Path, action="append", default=[], metavar="FILE",
                            help="UTF-8 text, cut into windows; may be given several times")  # fmt: skip
    else:
        parser.set_defaults(text=[])
    parser.add_argument("--tasks", default=tasks or "", metavar="A,B", help="prompts of these tasks with their right "
                        f"answers, named as for `longreach eval`{f' (default {tasks})' if tasks else ''}")  # fmt: skip
    parser.add_argument("--haystack", type=Path, metavar="FILE", help="UTF-8 text in which tasks hide needles, in "
                        "place of the one that evaluations use")  # fmt: skip
    parser.add_argument("--length", type=positive, default=4096, metavar="N", help="tokens of a prompt (default 4096)")
    parser.add_argument("--prompts", type=positive, default=8, metavar="N",
                        help=f"{'' if tasks else 'windows of the texts together, and '}prompts of each task "
                        "(default 8)")  # fmt: skip
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="of the tasks' prompts (default 1; that of "
                        "evaluations is 0, and prompts of the same seed are the same)")  # fmt: skip
    add_chunk_size(parser)
    if output:
        parser.add_argument("--output", type=Path, required=True, metavar="PLAN.json",
                            help="the plan; the same command continues an interrupted calibration")  # fmt: skip
    add_json(parser)


class Work:
    """A model, and prompts to calibrate it on.

    settings: further options that affect the gathered parts. least: the fewest tokens of a prompt, for a model's shape.
    fits: raises if the options do not fit the model, before its weights are loaded. record: the file that is written if
    it is not a plan; the journal is in its folder (default: the plan, args.output). chunk_tokens: of a document's chunk
    at most, for prompts that are cut into chunks; None for prompts that are not.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        settings: Mapping[str, Any],
        least: Callable[[ModelShape], int] = lambda shape: 1,
        fits: Callable[[ModelShape], None] = lambda shape: None,
        record: Path | None = None,
        chunk_tokens: int | None = None,
    ):
        from longreach.records import check_writable
        from longreach.tasks import registry

        self.output: Path = args.output if record is None else record
        check_writable(self.output)
        tasks = registry.choose(args.tasks) if args.tasks else []
        with waiting("loading the model"):
            from longreach.adapters.transformers import model_path, shape_at, shape_of
            from longreach.evals.calibration.prompts import make
            from longreach.evals.model_info import model_info
            from longreach.records import environment

            fits(shape_at(args.model))
            self.model, self.tokenizer = load_model(args)
            self.shape, self.name = shape_of(self.model), model_path(args.model).name
            self.about, self.where = model_info(self.model, args.model), environment(self.model.device)
        total = args.prompts * (len(tasks) + bool(args.text))
        with progress("making prompts", total) as advance:
            self.prompts = make(
                self.model, self.tokenizer, args.text, tasks, length=args.length, count=args.prompts,
                least=least(self.shape), seed=args.seed, haystack=args.haystack, made=advance,
                chunk_tokens=chunk_tokens,
            )  # fmt: skip
        self.settings = {
            "length": args.length, "prompts": args.prompts, "prefill_chunk_size": args.prefill_chunk_size,
            "dtype": self.about["dtype"], **settings,
        }  # fmt: skip
        self.args = args
        self.seconds, self.before = 0.0, 0

    def gather(self, what: Gather) -> list[Any]:
        """What each prompt gave; those of an interrupted run are taken over."""
        from longreach.evals.calibration.gather import gather

        return self.measure(partial(gather, self.model, self.prompts.prompts, what))

    def measure(self, each: Callable[..., list[Any]]) -> list[Any]:
        """As `gather`, of each(chunk=, progress=, done=, keep=): a function like `gather` of all prompts."""
        from longreach.records import Journal

        said = {
            "calibrate": getattr(self.args, "kind", self.args.verb),
            "model": self.about,
            "settings": self.settings,
            "seed": self.args.seed,
            "data": self.prompts.data,
            "sha256": self.prompts.sha256,
            **self.where,
        }
        started = time.perf_counter()
        self.journal = Journal(self.output, said)
        self.before = len(self.journal.done)
        with self.journal as journal:
            parts = each(chunk=self.args.prefill_chunk_size, progress=progress, done=journal.done, keep=journal.add)
        self.seconds = time.perf_counter() - started
        return parts

    def summary(self) -> str:
        """One line: the file that was written, and the time that reading the prompts took."""
        total, rest = len(self.prompts.prompts), ""
        if self.before:
            rest = f", the last {total - self.before} of {total} prompts; the others by an earlier run"
        return f"{self.output}: prompts read in {duration(self.seconds)}{rest}"

    def show_plan(self, plan: Plan) -> int:
        """Print the plan, as JSON with --json; the exit code, 0."""
        from longreach.cli.plan.show import describe, show

        if self.args.json:
            emit({**describe(plan), "output": str(self.output), "seconds": self.seconds})
        else:
            show(plan)
            console().print(self.summary(), soft_wrap=True)
        return 0

    def save(self, values: Mapping[str, Any], arrays: Mapping[str, Any], **settings: Any) -> Plan:
        """The plan, written to --output. The journal is removed.

        settings: options that the plan depends on in addition to those of `gather`.
        """
        import longreach
        from longreach.plans import Made, Plan, PlannedModel

        versions, device = self.where["versions"], self.where["device"]
        commit = self.where["commit"]
        made = Made(
            data=self.prompts.data, sha256=self.prompts.sha256, tokens=self.prompts.tokens,
            settings={**self.settings, **settings}, seed=self.args.seed, longreach=longreach.__version__,
            commit=f"{commit}+dirty" if commit and self.where["dirty"] else commit,
            torch=versions["torch"], transformers=versions["transformers"], device=device["name"],
        )  # fmt: skip
        plan = Plan(self.args.kind, PlannedModel.of(self.name, self.shape), values, made, arrays)
        plan.save(self.output)
        self.journal.remove()
        return plan
