"""`longreach methods`: what can fill which slot, with which options."""

from __future__ import annotations

import argparse
from typing import Any

from longreach.cli.common import add_json
from longreach.cli.show import emit

NAME = "methods"
HELP = "list the methods, the slots they fill and their options"
EXAMPLES = ("longreach methods", "longreach methods quest", "longreach methods --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="explain the options of this method")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.methods.explain import summary
    from longreach.methods.registry import EVICTIONS, FUSIONS, METHODS, eviction_class, fusion_class, method_class

    kinds: list[tuple[type[Any], list[str]]] = [(fusion_class(name), ["fuse"]) for name in FUSIONS]
    kinds += [(method_class(name), list(method_class(name).phases)) for name in METHODS]
    kinds += [(eviction_class(name), ["evict"]) for name in EVICTIONS]
    if args.name is not None:
        return _explain(args.name, kinds, args.json)
    found = list[dict[str, Any]]()
    for kind, slots in kinds:
        found.append({"name": kind.name, "slots": slots, "options": kind.options(), "summary": summary(kind)})
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


def _explain(name: str, kinds: list[tuple[type[Any], list[str]]], as_json: bool) -> int:
    from longreach.errors import UnknownName
    from longreach.methods.explain import options_of, summary

    known = {kind.name: (kind, slots) for kind, slots in kinds}
    if name not in known:
        raise UnknownName("method", name, known)
    kind, slots = known[name]
    found = {"name": name, "slots": slots, "summary": summary(kind), "options": options_of(kind)}
    if as_json:
        emit(found)
        return 0
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(f"{name} ({', '.join(slots)}): {found['summary']}", highlight=False, markup=False)
    if found["options"]:
        table = Table("option", "default", "meaning", box=None, pad_edge=False)
        for option in options_of(kind):
            table.add_row(option["name"], str(option["default"]), escape(option["meaning"]))
        console.print(table)
    else:
        console.print("It has no options.")
    return 0
