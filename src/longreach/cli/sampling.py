"""`longreach sampling`: how well attention can be sampled in a model, by layer, method and bytes read."""

from __future__ import annotations

import argparse
from typing import Any

from longreach.cli.common import add_model, add_task_prompts, count, load_model, positive
from longreach.cli.results import add_results, check_figures, finish
from longreach.cli.show import Column, Table, console, percent, place, progress, waiting
from longreach.errors import InvalidInput

NAME = "sampling"
HELP = "show how well attention can be sampled in a model: mass of the best keys, estimators, geometry, methods"
EXAMPLES = (
    "longreach sampling --model mini --length 4096 --samples 1 --rows 4 --output sampling.json",
    "longreach sampling --model ./Llama-3.1-8B --length 16384 --no-ablations --figures sampling",
    "longreach sampling --model mini --length 4096 --samples 1 --rows 4 --error-bars 2 --output bars.json",
)
BARS = "error bars"  # kind of a record with --error-bars
FORMAT = 1
TASKS = "niah_single_2,cwe,fwe,vt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_task_prompts(parser, TASKS, samples=2)
    parser.add_argument("--rows", type=positive, default=8, metavar="N",
                        help="rows from the end of each prompt that are measured (default 8)")  # fmt: skip
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="of prompts and random draws (default 0)")
    parser.add_argument("--centre", type=count, metavar="N", help="first keys whose mean magicpig subtracts (default "
                        "1024, or a quarter of --length where that is less)")  # fmt: skip
    parser.add_argument("--no-ablations", dest="ablations", action="store_false", help="leave out bits and tables "
                        "other than the presets' (the paper's Tables 11 and 12); takes half the time")  # fmt: skip
    parser.add_argument("--error-bars", type=positive, metavar="N", help="measure nothing but error bars: those of "
                        "magicpig's presets against their true errors, for N seeds of the hash functions")  # fmt: skip
    add_results(parser, figures=True)


def run(args: argparse.Namespace) -> int:
    from longreach.records import check_writable
    from longreach.records.report.sampling import sampling
    from longreach.tasks import registry

    tasks = registry.choose(args.tasks)
    if args.error_bars is not None:
        for given, name in ((args.figures is not None, "--figures"), (not args.ablations, "--no-ablations")):
            if given:
                raise InvalidInput(f"{name}: has no effect with --error-bars, which measures bars alone; leave it out")
    if args.output is not None:
        check_writable(args.output)
    check_figures(args.figures)
    with waiting("loading the model"):
        model, tokenizer = load_model(args)
    with waiting("making prompts"):
        from longreach.evals.model_info import model_info
        from longreach.evals.sampling_study import ErrorBarStudy, SamplingStudy
        from longreach.records import environment

        asked = {"length": args.length, "samples": args.samples, "rows": args.rows, "seed": args.seed,
                 "centre": args.centre}  # fmt: skip
        bars = args.error_bars is not None
        study = (
            ErrorBarStudy(model, tokenizer, tasks, seeds=args.error_bars, **asked)
            if bars
            else SamplingStudy(model, tokenizer, tasks, ablations=args.ablations, **asked)
        )
        where = environment(model.device)
        about = model_info(model, args.model)
    found = study.run(args.prefill_chunk_size, progress)
    names = ("length", "samples", "rows", "seed", "error_bars" if bars else "ablations", "prefill_chunk_size")
    config = {**{name: getattr(args, name) for name in names}, "centre": study.centre}
    record = {"kind": BARS if bars else NAME, "format": FORMAT, "model": about, "config": config, **where,
              "tasks": {task.name: task.source for task in tasks}, **found}  # fmt: skip
    finish(args, record, show_bars if bars else show, blocks=sampling)
    return 0


def show(record: dict[str, Any]) -> None:
    """Tables of the presets, of estimators with exact scores and of all methods."""
    out, results = console(), record["results"]
    table = Table(out, [Column("method", 46, left=True), Column("error", 6), Column("median", 6), Column("read", 6),
                        Column("keys", 6)])  # fmt: skip
    table.header()
    for label, mine in results["methods"].items():
        reads = mine["reads"]
        table.row([shown(label), f"{mine['mean']:.3f}", f"{mine['median']:.3f}", percent(reads["total"]),
                   percent(2 * reads["values"])])  # fmt: skip
    for name, mine in results["estimators"].items():
        for read, mean, median in zip(mine["read"], mine["mean"], mine["median"], strict=True):
            table.row([f"{name}, each query head", f"{mean:.3f}", f"{median:.3f}", "", percent(read)])
    for name, reason in results["left_out"].items():
        out.print(f"{name} was left out: {reason}")
    rows = len(record["samples"]) * record["config"]["rows"]
    out.print(
        f"\n{rows} rows of {len(record['samples'])} prompts, all layers. error: |o - o_dense| / |o_dense| on the same "
        f"queries, keys and values, mean and median over rows, layers and query heads. read: bytes over dense "
        f"attention's; oracles read all keys for their scores. keys: share of the keys that are attended to. Layers, "
        f"mass, geometry and ranges are in the record and the report."
    )
    out.print(place(record))


def shown(label: str) -> str:
    """The label of a method as the table shows it. Those of MagicPIG's controls are shortened to fit the column:
    "magicpig bits=10 tables=150 group, centre=0" for "magicpig bits=10 tables=150 share=group centre=0".
    """
    for control in ("centre=0", "no weights"):
        for separator in (" ", ", "):
            label = label.replace(f" share=group{separator}{control}", f" group, {control}")
    return label


def show_bars(record: dict[str, Any]) -> None:
    """A table of errors and of error bars."""
    out, config = console(), record["config"]
    table = Table(out, [Column("method", 40, left=True), Column("error", 6), Column("bar", 6), Column("ratio", 6),
                        Column("covered", 7), Column("least", 6)])  # fmt: skip
    table.header()
    for label, mine in record["results"].items():
        whole = mine["all"]
        least = min(each["covered"] for each in mine["tasks"].values())
        table.row([label, f"{whole['error']:.3f}", f"{whole['bar']:.3f}", f"{whole['ratio']:.2f}",
                   percent(whole["covered"]), percent(least)])  # fmt: skip
    out.print(
        f"\n{config['rows']} rows of {len(record['samples'])} prompts, all layers and query heads, "
        f"{config['error_bars']} seeds. error: rms of |o - o_dense| / |o_dense|. bar: rms of its estimate, the "
        f"standard error. ratio: error over bar. covered: share of outputs whose error is at most two bars; "
        f"least: the same in the task where it is least."
    )
    out.print(place(record))
