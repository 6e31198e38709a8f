"""`longreach mka routing`: how a converted model weighs its memory levels on a text."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longreach.cli.common import add_device, add_json, add_texts, positive
from longreach.cli.mka.common import LENGTH, conversion_of
from longreach.cli.results import finish
from longreach.cli.show import Column, Table, console, place, progress, waiting
from longreach.errors import InvalidInput

HELP = "show how much each memory level of a converted model weighs, by layer and position"
EXAMPLES = (
    "longreach mka routing mini-healed --text book.txt",
    "longreach mka routing llama-healed --text a.txt --text b.txt --length 32768 --limit 8 --output routing.json",
)
FORMAT = 1
WIDTHS = {"lambda": 5, "weight": 6, "gate": 6}  # of columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a converted model: a model directory")
    add_texts(parser)
    parser.add_argument("--length", type=positive, default=LENGTH, metavar="N",
                        help=f"tokens of a window (default {LENGTH})")  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N windows")
    add_device(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a record that `longreach report` reads")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.records import check_writable

    if args.output is not None:
        check_writable(args.output)
    with waiting("loading the model"):
        from longreach.adapters.transformers import device_of, load
        from longreach.evals.mka_routing import levels_of, measure
        from longreach.evals.model_info import model_info
        from longreach.evals.perplexity import read_text, windows_of
        from longreach.records import environment

        model, tokenizer = load(args.model, device=str(device_of(args.device)))
        levels = levels_of(model)
        if not levels:
            raise InvalidInput(refusal(model, args.model))
        texts = [read_text(path, tokenizer) for path in args.text]
        windows = windows_of(texts, tokenizer, args.length, args.limit)
        where, about = environment(model.device), model_info(model, args.model)
    record = {
        "kind": "mka routing", "format": FORMAT, "model": about,
        "config": {"length": args.length, "windows": len(windows), "limit": args.limit},
        **where, "files": [text.to_json() for text in texts],
        "options": next(iter(levels.values())).config.to_json(),
        "results": measure(model, windows, progress),
    }  # fmt: skip
    finish(args, record, show)
    return 0


def refusal(model: Any, name: str) -> str:
    """The error for a model without routers."""
    from longreach.mka.baselines import BASELINES, LatentKV

    variant = (conversion_of(name) or {}).get("variant")
    if any(isinstance(module, LatentKV) for module in model.modules()):
        variant = "mla"
    if variant in BASELINES:
        return (
            f"{name} has {variant} attention, a baseline without routers; convert its original to fastmka, mka or "
            f"block_mka: longreach mka convert"
        )
    return f"{name} is no converted model; convert it first: longreach mka convert"


def show(record: dict[str, Any]) -> None:
    """A row a layer, then the means over layers by position."""
    from longreach.records.report.routing import by_position, level_names, over_layers

    out, config, results = console(), record["config"], record["results"]
    layers = list(results["layers"].values())
    table = Table(out, [Column("layer", 5, left=True), *_columns(results["levels"], WIDTHS)])
    table.header()
    for number, layer in results["layers"].items():
        table.row([number, *(f"{x:.3f}" for name in WIDTHS for x in layer[name])])
    table.row(["mean", *(f"{x:.3f}" for name in WIDTHS for x in over_layers([layer[name] for layer in layers]))])
    out.print("\nby position in the window, mean over layers:")
    table = Table(out, [Column("tokens", 13, left=True), *_columns(results["levels"], ("lambda", "weight"))])
    table.header()
    parts = zip(results["positions"], *(by_position(results, name) for name in ("lambda", "weight")), strict=True)
    for part, *means in parts:
        table.row([f"{part['start']}-{part['stop'] - 1}", *(f"{x:.3f}" for mean in means for x in mean)])
    windows = f"{config['windows']} window{'s' * (config['windows'] > 1)} of {config['length']} tokens"
    out.print(
        f"\n{windows}. Levels: {', '.join(level_names(results))}. lambda: the router's weights, which sum to 1. "
        f"weight: start + gate (lambda - start), by which a layer mixes its levels; start is the layer before its "
        f"conversion. A level without keys for a token has weight 0.",
        soft_wrap=True,
    )
    out.print(place(record), soft_wrap=True)


def _columns(levels: list[int], quantities: Iterable[str]) -> list[Column]:
    """A column a level of each quantity; the first names the quantity."""
    titles = [(name, f"{name} {level}" if level == levels[0] else str(level))
              for name in quantities for level in levels]  # fmt: skip
    return [Column(title, max(len(title), WIDTHS[name])) for name, title in titles]
