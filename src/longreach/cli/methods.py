"""`longreach methods`: what can fill which slot, with which options."""

from __future__ import annotations

import argparse
from typing import Any

from longreach.cli.common import add_json
from longreach.cli.show import emit

NAME = "methods"
HELP = "list the methods, the slots they fill and their options"
EXAMPLES = ("longreach methods", "longreach methods --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.methods.registry import EVICTIONS, FUSIONS, METHODS, eviction_class, fusion_class, method_class

    kinds: list[tuple[type[Any], list[str]]] = [(fusion_class(name), ["fuse"]) for name in FUSIONS]
    kinds += [(method_class(name), list(method_class(name).phases)) for name in METHODS]
    kinds += [(eviction_class(name), ["evict"]) for name in EVICTIONS]
    found = list[dict[str, Any]]()
    for kind, slots in kinds:
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        found.append({"name": kind.name, "slots": slots, "options": kind.options(), "summary": summary})
    if args.json:
        emit(found)
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "slots", "options and defaults", "what it does", box=None, pad_edge=False)
    for m in found:
        options = ", ".join(f"{k}={v}" for k, v in m["options"].items()) or "-"
        table.add_row(m["name"], ", ".join(m["slots"]), options, m["summary"])
    Console().print(table)
    return 0
