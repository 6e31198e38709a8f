"""`longreach mka train`: heals a converted model, by its original or on texts and tasks alone."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from longreach.cli.common import add_json, count, positive
from longreach.cli.mka.common import (
    add_folders,
    conversion_of,
    distance_line,
    stored_dtype,
    whole_numbers,
    write_conversion,
)
from longreach.cli.show import Column, Table, console, duration, emit, place, progress, waiting
from longreach.errors import InvalidInput

HELP = "train a converted model to answer as its original, or on texts and tasks"
EXAMPLES = (
    "longreach mka train mini-block --teacher mini --out mini-healed --steps 200 --lengths 512,1024",
    "longreach mka train llama-block --teacher ./Llama-3.1-8B --out llama-healed --minutes 60 --lengths 8192 \\",
    "    --text book.txt --checkpointing",
    "longreach mka train mini-block --out mini-elastic --minutes 5 --data runs/mini-data --train all \\",
    "    --draw-budget 128:4,256:8,256:16",
)
ALL_TASKS = "ruler"
WORKERS = 14  # keep up with a GPU that trains longreach-mini
EVERY = 10.0  # seconds between two rows of the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "a converted model")
    parser.add_argument("--teacher", metavar="DIR|mini", help="the original, whose next-token distributions the model "
                        "learns; without it, the next token is learnt")  # fmt: skip
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=positive, metavar="N", help="updates")
    budget.add_argument("--minutes", type=float, metavar="X", help="time, that of an interrupted run included")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted training in --out, with the "
                        "same options, or begin if it is empty")  # fmt: skip
    parser.add_argument("--train", choices=("levels", "attention", "all"), default="attention", help="parameters: "
                        "levels (router, gates, decays), attention (and the projections of converted layers; the "
                        "default), all")  # fmt: skip
    _add_sources(parser)
    parser.add_argument("--kl", type=float, metavar="X", help="weight of KL(teacher || model) (default 1, 0 without "
                        "--teacher)")  # fmt: skip
    parser.add_argument("--nll", type=float, metavar="X", help="weight of the next-token loss (default 0, 1 without "
                        "--teacher)")  # fmt: skip
    parser.add_argument("--text-loss", type=float, default=0.5, metavar="X", help="weight of tokens that are no "
                        "answers, where there are answers (default 0.5)")  # fmt: skip
    parser.add_argument("--batch-tokens", type=positive, default=8192, metavar="N", help="tokens of a batch; a longer "
                        "sequence is a batch of its own (default 8192)")  # fmt: skip
    parser.add_argument("--accumulate", type=positive, default=2, metavar="N", help="batches of an update (default 2)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, metavar="X", help="the highest (default 0.0003)")
    parser.add_argument("--gate-rate", type=float, default=1e-2, metavar="X",
                        help="of gates and decays (default 0.01)")  # fmt: skip
    parser.add_argument("--weight-decay", type=float, default=0.01, metavar="X", help="not of gates, decays, norms and "
                        "biases (default 0.01)")  # fmt: skip
    parser.add_argument("--warmup", type=count, default=20, metavar="N", help="updates (default 20, at most a tenth of "
                        "--steps)")  # fmt: skip
    parser.add_argument("--draw-budget", type=_budgets, default=(), metavar="W:R,W:R", help="window and recalled "
                        "blocks drawn for each update, for a model that is good at several")  # fmt: skip
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass, "
                        "which takes less memory")  # fmt: skip
    parser.add_argument("--save-every", type=float, default=300.0, metavar="SECONDS",
                        help="between checkpoints (default 300)")  # fmt: skip
    add_json(parser)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=partial(whole_numbers, least=2), default=[512], metavar="N,N",
                        help="tokens of sequences, in turn (default 512)")  # fmt: skip
    parser.add_argument("--text", type=Path, action="append", default=[], metavar="FILE",
                        help="UTF-8 text to train on, cut into windows; may be given several times")  # fmt: skip
    parser.add_argument("--tasks", metavar="A,B", help="tasks to train on, prompts with their answers, named as for "
                        f"`longreach eval` (default without --text and --data: those of {ALL_TASKS} that "
                        "fit)")  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR", help="the recipe's data to train on, made by `longreach "
                        "train mini --prepare DIR`; for models with longreach-mini's tokenizer")  # fmt: skip
    parser.add_argument("--workers", type=count, metavar="N", help="processes that make batches; 0: a thread (default "
                        f"0; with --data on a GPU one a processor, at most {WORKERS})")  # fmt: skip
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="of sequences and budgets (default 0)")


def run(args: argparse.Namespace) -> int:
    from longreach.train.mka.checkpoint import check_free
    from longreach.train.mka.options import HealOptions

    with_teacher = args.teacher is not None
    kl = float(with_teacher) if args.kl is None else args.kl
    nll = float(not with_teacher) if args.nll is None else args.nll
    options = HealOptions(
        steps=args.steps, minutes=args.minutes, train=args.train, kl=kl, nll=nll, lengths=tuple(args.lengths),
        batch_tokens=args.batch_tokens, accumulate=args.accumulate, learning_rate=args.learning_rate,
        gate_rate=args.gate_rate, weight_decay=args.weight_decay, warmup=args.warmup, text_loss=args.text_loss,
        checkpointing=args.checkpointing, budgets=args.draw_budget, seed=args.seed,
    )  # fmt: skip
    if not args.resume:
        check_free(args.out)
    conversion = conversion_of(args.model)
    with waiting("loading the model"):
        import torch

        from longreach.adapters.transformers import device_of, load, save
        from longreach.evals.model_info import model_info
        from longreach.train.mka.budgets import levels_of
        from longreach.train.mka.heal import check_lengths, heal

        device = str(device_of(args.device))
        model, tokenizer = load(args.model, device=device, dtype=torch.float32)
        if not levels_of(model) and conversion is None:
            raise InvalidInput(f"{args.model} is no converted model; convert it first: longreach mka convert")
        check_lengths(model, options.lengths)
        about = {"model": model_info(model, args.model), "teacher": None}
        teacher = None
        if with_teacher:
            teacher, theirs = load(args.teacher, device=device)
            about["teacher"] = model_info(teacher, args.teacher)
            if theirs.get_vocab() != tokenizer.get_vocab():
                raise InvalidInput(
                    f"--teacher {args.teacher} has another vocabulary than {args.model}; give the model that was "
                    f"converted"
                )
    dtype = stored_dtype(args.model)

    def write(folder: Path) -> None:
        save(model, tokenizer, folder, dtype=dtype)
        write_conversion(args.model, folder)

    rows = Rows()
    record = heal(
        model, sources_of(args, tokenizer), options, teacher=teacher, folder=args.out, save=write, resume=args.resume,
        about=about, workers=workers_of(args, device), save_every=args.save_every, progress=progress,
        on_step=(lambda step, line: None) if args.json else rows.add,
    )  # fmt: skip
    if args.json:
        emit({**record, "out": str(args.out)})
    else:
        rows.last()
        show(record, str(args.out))
    return 0


def workers_of(args: argparse.Namespace, device: str) -> int:
    """--workers, or its default."""
    if args.workers is not None:
        return int(args.workers)
    return min(WORKERS, os.cpu_count() or 1) if args.data is not None and device.startswith("cuda") else 0


def sources_of(args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """Where sequences come from. Raises InvalidInput for texts, tasks and data that do not fit."""
    from longreach.evals.perplexity import read_text
    from longreach.tasks import registry
    from longreach.train.mka.data import RecipeSource, TaskSource, TextSource

    found = list[Any]()
    if args.text:
        found.append(TextSource([read_text(path, tokenizer) for path in args.text], tokenizer, args.lengths, args.seed))
    if args.data is not None:
        found.append(RecipeSource(args.data, tokenizer, args.seed))
    if args.tasks is not None:
        found.append(TaskSource(registry.choose(args.tasks), tokenizer, args.lengths, args.seed))
    if not found:
        source, left_out = TaskSource.fitting(registry.choose(ALL_TASKS), tokenizer, args.lengths, args.seed)
        if left_out:
            print(f"longreach: these tasks do not fit and are left out: {', '.join(left_out)}", file=sys.stderr)
        found.append(source)
    return found


def _budgets(text: str) -> tuple[Any, ...]:
    from longreach.train.mka.budgets import Budget

    try:
        pairs = [tuple(map(int, part.split(":"))) for part in text.split(",")]
        found = tuple(Budget(window, blocks) for window, blocks in pairs)
    except ValueError:
        found = ()
    if not found:
        raise argparse.ArgumentTypeError(f"expected WINDOW:BLOCKS between commas, such as 256:4,512:8, got {text!r}")
    return found


class Rows:
    """A table that grows while the model is trained: its first step, one now and then, its last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock = console(), clock
        self._table: Table | None = None
        self._shown = 0.0
        self._waiting: list[str] | None = None

    def add(self, step: int, line: dict[str, Any]) -> None:
        """A step is done."""
        now = self._clock()
        cells = _cells(step, line)
        if self._table is None:
            self._begin(len(line.get("gates", ())))
        elif now - self._shown < EVERY:
            self._waiting = cells
            return
        self._print(lambda table: table.row(cells))
        self._shown, self._waiting = now, None

    def last(self) -> None:
        """Print the last step, if that was not done."""
        if self._waiting is not None:
            cells = self._waiting
            self._print(lambda table: table.row(cells))

    def _begin(self, levels: int) -> None:
        columns = [Column("step", 5), Column("seconds", 7), Column("loss", 7), Column("KL", 7), Column("nll", 5),
                   Column("grad", 7), Column("rate", 4), Column("tok/s", 6)]  # fmt: skip
        self._table = Table(self._out, [*columns, Column("gates", max(5, 6 * levels - 1), wide=True)])
        self._print(lambda table: table.header())

    def _print(self, write: Callable[[Table], None]) -> None:
        assert self._table is not None
        with self._out.capture() as lines:  # print goes above a progress bar, a console does not
            write(self._table)
        print(lines.get(), end="", flush=True)


def _cells(step: int, line: dict[str, Any]) -> list[str]:
    rate, speed = f"{line['rate']:.2f}", str(line["tokens_per_second"])
    if "loss" not in line:
        return [str(step), f"{line['seconds']:.0f}", "skipped", "-", "-", "-", rate, speed, "-"]
    return [
        str(step), f"{line['seconds']:.0f}", _short(line["loss"]), _short(line["kl"]), f"{line['nll']:.3g}",
        f"{line['grad_norm']:.2g}", rate, speed, " ".join(f"{gate:.2f}" for gate in line["gates"]) or "-",
    ]  # fmt: skip


def _short(x: float) -> str:
    """A number in at most seven characters."""
    text = f"{x:.3g}"
    return text if len(text) <= 7 else f"{x:.1e}"


def show(record: dict[str, Any], folder: str) -> None:
    """What training changed."""
    out, before, after = console(), record["before"], record["after"]
    skipped = f", {record['skipped']} skipped as not finite" if record["skipped"] else ""
    out.print(
        f"\n{folder}: {record['steps']} steps{skipped}, {record['tokens']} tokens, {duration(record['seconds'])}.",
        soft_wrap=True,
    )
    out.print(f"On {after['sequences']} sequences that were not trained on ({after['tokens']} tokens):")
    for name, found in (("before", before), ("after", after)):
        text = f"perplexity {found['perplexity']:.4g}" if found["kl"] is None else distance_line(found)
        out.print(f"{name}: {text}", soft_wrap=True)
    out.print(
        "KL and nll are nats a token; gates: mean of each level's, over layers; rate: of learning, over the highest.",
        soft_wrap=True,
    )
    out.print(place(record), soft_wrap=True)
