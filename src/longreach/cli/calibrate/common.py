"""What all kinds of calibration share: arguments, prompts, the journal, and a plan's account of its calibration."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_chunk_size, add_json, add_model, count, load_model, positive
from longreach.cli.show import console, duration, emit, progress, waiting

if TYPE_CHECKING:
    from longreach.evals.calibration.base import Calibration
    from longreach.evals.calibration.run import CalibrationRun
    from longreach.methods.call import ModelShape


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


def prepared(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    least: Callable[[ModelShape], int] = lambda shape: 1,
    fits: Callable[[ModelShape], None] = lambda shape: None,
    record: Path | None = None,
    chunk_tokens: int | None = None,
) -> CalibrationRun:
    """The run that the arguments describe: loads the model and makes the prompts.

    settings: further options that affect the gathered parts. least: the fewest tokens of a prompt, for a model's shape.
    fits: raises if the options do not fit the model, before its weights are loaded. record: the file that is written if
    it is not a plan; the journal is in its folder (default: the plan, args.output). chunk_tokens: of a document's chunk
    at most, for prompts that are cut into chunks; None for prompts that are not.
    """
    from longreach.records import check_writable
    from longreach.tasks import registry

    output: Path = args.output if record is None else record
    check_writable(output)
    tasks = registry.choose(args.tasks) if args.tasks else []
    with waiting("loading the model"):
        from longreach.adapters.transformers import shape_at
        from longreach.evals.calibration.run import CalibrationRun, PromptChoice
        from longreach.evals.model_info import model_info

        fits(shape_at(args.model))
        model, tokenizer = load_model(args)
        about = model_info(model, args.model)
    chosen = PromptChoice(
        args.text, tasks, args.length, args.prompts, args.seed, args.haystack, args.prefill_chunk_size
    )  # fmt: skip
    return CalibrationRun(
        getattr(args, "kind", args.verb), model, tokenizer, about, chosen, settings, output=output, least=least,
        chunk_tokens=chunk_tokens, progress=progress,
    )  # fmt: skip


def write_plan(args: argparse.Namespace, options: Calibration) -> int:
    """Calibrate, write the plan to --output and print it, as JSON with --json; the exit code, 0."""
    from longreach.cli.plan.show import describe, show

    run = prepared(
        args, options.settings(), least=options.least_tokens, fits=options.check, chunk_tokens=options.chunk_tokens
    )
    remark = options.remark(run)
    if remark is not None:
        print(f"longreach: {remark}", file=sys.stderr)
    plan = run.plan(options.make(run))
    if args.json:
        emit({**describe(plan), "output": str(run.output), "seconds": run.seconds})
    else:
        show(plan)
        console().print(summary(run), soft_wrap=True)
    return 0


def summary(run: CalibrationRun) -> str:
    """One line: the file that was written, the time that reading the prompts took, and the text that uses the plan."""
    total, rest = len(run.prompts.prompts), ""
    if run.before:
        rest = f", the last {total - run.before} of {total} prompts; the others by an earlier run"
    return f"{run.output}: prompts read in {duration(run.seconds)}{rest}. To use it: {usage(run.kind, run.output)}"


def usage(kind: str, file: Path | None) -> str:
    """The text of a method that uses a plan, quoted for a shell."""
    fitted = " window=None band=None tau=None scale=calibrated" if kind == "mac" else ""  # else its own values hold
    return shlex.quote(f"{kind} plan={shlex.quote(str(file))}{fitted}")
