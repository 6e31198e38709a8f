"""`longreach fusion`: what reuse of stored chunks changes in a model by layer, and which tokens methods choose."""

from __future__ import annotations

import argparse
from typing import Any

from longreach.cli.common import add_model, add_slot_settings, add_task_prompts, load_model, parse_settings, positive
from longreach.cli.results import add_results, finish
from longreach.cli.show import Column, Table, console, percent, place, progress, waiting

NAME = "fusion"
HELP = "show what fusion of stored chunks changes in a model, layer by layer, and which tokens each method chooses"
EXAMPLES = (
    "longreach fusion --model mini --tasks vt,niah_multikey_3 --length 4096 --samples 4 --output fusion.json",
    "longreach fusion --model ./Llama-3.1-8B --method 'dense fuse=a3' --method 'dense fuse=oracle' --chunks bos",
)
FORMAT = 1
TASKS = "vt,qa_synthetic_1,niah_multikey_3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_task_prompts(parser, TASKS, samples=4)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which texts and facts (default 0)")
    parser.add_argument("--method", action="append", metavar="SPEC", help="'dense fuse=NAME [fuse.option=value ...]', "
                        "may be given several times; the controls random and oracle too (default: all)")  # fmt: skip
    add_slot_settings(parser)
    parser.add_argument("--chunk-tokens", type=positive, default=512, metavar="N", help="tokens of a chunk at most "
                        "(default 512)")  # fmt: skip
    parser.add_argument("--chunks", choices=("alone", "bos", "system"), default="system", help="prefix that "
                        "chunks are computed behind, as in longreach eval (default system)")  # fmt: skip
    add_results(parser, figures=False)


def run(args: argparse.Namespace) -> int:
    from longreach.evals.fusion.controls import CONTROLS
    from longreach.evals.methods import NAMED
    from longreach.evals.methods import specs as parse_specs
    from longreach.methods.registry import FUSIONS
    from longreach.records import check_writable
    from longreach.tasks import registry

    tasks = registry.choose(args.tasks)
    texts = args.method or [f"dense fuse={name}" for name in (*FUSIONS, "random", "oracle")]
    specs = parse_specs(texts, settings=parse_settings(args.set, "slot", NAMED), controls=CONTROLS)
    if args.output is not None:
        check_writable(args.output)
    with waiting("loading the model"):
        model, tokenizer = load_model(args)
    with waiting("making prompts"):
        from longreach.evals.fusion.study import TOP, FusionStudy, deep_layers
        from longreach.evals.model_info import model_info
        from longreach.records import environment

        study = FusionStudy(model, tokenizer, tasks, specs, length=args.length, samples=args.samples, seed=args.seed,
                            chunk_tokens=args.chunk_tokens, behind=args.chunks)  # fmt: skip
        where = environment(model.device)
        about = model_info(model, args.model)
    found = study.run(args.prefill_chunk_size, progress)
    names = ("length", "samples", "seed", "chunk_tokens", "chunks", "prefill_chunk_size")
    config = {**{name: getattr(args, name) for name in names}, "top": TOP, "layers": deep_layers(study.layers)}
    record = {"kind": NAME, "format": FORMAT, "model": about, "config": config, **where,
              "tasks": {task.name: task.source for task in tasks},
              "methods": {spec.label: spec.to_json() for spec in study.specs}, **found}  # fmt: skip
    finish(args, record, show)
    return 0


def show(record: dict[str, Any]) -> None:
    """A table of choices, and tables of errors by layer."""
    from longreach.records.labels import short_label

    out, results = console(), record["results"]
    table = Table(out, [Column("method", 36, left=True), Column("chosen", 7), Column("of change", 9),
                        Column(f"of top {record['config']['top']}", 9), Column("attention", 9)])  # fmt: skip
    table.header()
    for label, mine in results.items():
        table.row([short_label(label), _number(mine["chosen"], ".0f"), percent(mine["hits_change"]),
                   percent(mine["hits_attention"]), percent(mine["attention_chosen"])])  # fmt: skip
    layers = len(next(iter(results.values()))["layers"]["attention"])
    shown = sorted({round(n * (layers - 1) / 5) for n in range(6)})
    for name, what in (("attention", "the question's attention"), ("key", "keys of stored tokens"),
                       ("value", "values of stored tokens"), ("value_recomputed", "recomputed values")):  # fmt: skip
        out.print(f"\nerror of {what}, over the norm of a plain prefill's, by layer:")
        table = Table(out, [Column("method", 36, left=True), *(Column(str(n), 7) for n in shown)])
        table.header()
        for label, mine in results.items():
            table.row([short_label(label), *(_number(mine["layers"][name][n], ".2g") for n in shown)])
    out.print(
        "\nMeans over prompts. chosen: recomputed tokens. of change: the share of them among the equally "
        "many tokens that a plain prefill changes most. of top: their share of the tokens that the question attends to "
        "most in the last third of the layers; attention: their share of that attention on stored tokens. "
        "All layers and tasks are in the record."
    )
    out.print(place(record))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
