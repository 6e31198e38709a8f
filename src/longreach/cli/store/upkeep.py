"""`longreach store list`, `verify` and `gc`: what is in a store, whether it is whole, less of it. Without a model."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_json, byte_size
from longreach.cli.show import Column, Table, console, duration, emit, progress, size
from longreach.errors import StoreError

if TYPE_CHECKING:
    from longreach.store import ChunkStore, Ignored

BROKEN = 1  # exit code where files were found broken or unreadable
HEADLESS = "no header of a chunk"


def add_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    if action == "list":
        parser.add_argument("--all", action="store_true", help="a row a chunk, the longest unused first")
    if action == "gc":
        parser.add_argument("--max-bytes", type=byte_size, metavar="SIZE", help="that may stay, like 100GB; broken "
                            "chunks set aside count and go first (default: all; only what dead processes left "
                            "goes)")  # fmt: skip
        parser.add_argument("--set-aside", action="store_true", help="delete all broken chunks in set-aside/ too; "
                            "foreign files there stay")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    actions: dict[str, Callable[..., int]] = {"list": _list, "verify": _verify, "gc": _gc}
    with _existing(args.store) as store:
        return actions[args.action](args, store)


def _existing(location: str) -> ChunkStore:
    """Open a store, but make none. Raises StoreError where there is none."""
    from longreach.store import ChunkStore

    return ChunkStore(location, create=False)


def _list(args: argparse.Namespace, store: ChunkStore) -> int:
    entries, chunks, unreadable = store.entries(), list[dict[str, Any]](), list[dict[str, str]]()
    with progress("reading headers", len(entries)) as advance:
        for entry in entries:
            about, why = None, HEADLESS
            try:
                about = store.about(entry.name)
            except StoreError as error:
                why = str(error)
            if about is None:
                unreadable.append({"name": entry.name, "why": why})
            else:
                chunks.append({
                    "name": entry.name, "model": about.key.model, "dtype": about.key.dtype, "prefix": about.key.prefix,
                    "prefix_tokens": about.prefix, "tokens": about.tokens, "layers": about.layers,
                    "dependence": about.dependence, "bytes": entry.bytes, "last_used": entry.last_used,
                })  # fmt: skip
            advance(1)
    total = sum(entry.bytes for entry in entries)
    if args.json:
        emit({"store": args.store, "bytes": total, "chunks": chunks, "unreadable": unreadable})
        return 0
    out = console()
    columns = [Column("model", 12, left=True), Column("dtype", 8, left=True), Column("prefix", 7), Column("tokens", 9),
               Column("layers", 6), Column("size", 8), Column("last used", 11)]  # fmt: skip
    if args.all:
        _show_chunks(Table(out, [Column("chunk", 12, left=True), *columns]), chunks)
    else:
        _show_groups(Table(out, [*columns[:3], Column("chunks", 7), *columns[3:]]), chunks)
    out.print(
        f"\n{len(entries)} chunks, {size(total)}. model: the first digits of its fingerprint; prefix: tokens before "
        f"each chunk; last used: ago.",
        soft_wrap=True,
    )
    if headless := sum(one["why"] == HEADLESS for one in unreadable):
        out.print(f"{headless} files have no header of a chunk; `longreach store verify` sets them aside.",
                  soft_wrap=True)  # fmt: skip
    for one in unreadable:
        if one["why"] != HEADLESS:
            out.print(f"{one['name'][:12]}: unreadable: {one['why']}", soft_wrap=True)
    return 0


def _show_chunks(table: Table, chunks: list[dict[str, Any]]) -> None:
    table.header()
    for c in chunks:
        table.row([c["name"][:12], c["model"][:12], c["dtype"], str(c["prefix_tokens"]), str(c["tokens"]),
                   str(c["layers"]), size(c["bytes"]), _ago(c["last_used"])])  # fmt: skip


def _show_groups(table: Table, chunks: list[dict[str, Any]]) -> None:
    """A row for all chunks of a model, dtype and prefix."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for chunk in chunks:
        groups.setdefault((chunk["model"], chunk["dtype"], chunk["prefix"]), []).append(chunk)
    table.header()
    for group in groups.values():
        c = group[0]
        table.row([c["model"][:12], c["dtype"], str(c["prefix_tokens"]), str(len(group)),
                   str(sum(x["tokens"] for x in group)), str(c["layers"]), size(sum(x["bytes"] for x in group)),
                   _ago(max((x["last_used"] for x in group if x["last_used"] is not None), default=None))])  # fmt: skip


def _ago(last_used: float | None) -> str:
    """A time in the past, in at most eleven characters; "-" where it is not known."""
    if last_used is None:
        return "-"
    seconds = max(0, time.time() - last_used)
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _verify(args: argparse.Namespace, store: ChunkStore) -> int:
    started = time.perf_counter()
    with progress("verifying", len(store.entries())) as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="chunk store ")  # each file is reported below
        found = store.verify_all(advance)
    took = time.perf_counter() - started
    status = BROKEN if found.broken else 0
    if args.json:
        emit({"store": args.store, "whole": found.whole, "bytes": found.bytes,
              "broken": [one._asdict() for one in found.broken], "left_alone": _left_alone(found.left_alone),
              "seconds": took})  # fmt: skip
        return status
    out = console()
    for one in found.broken:
        out.print(f"{one.file}: {one.kind}: {one.why}; {one.became}", soft_wrap=True)
    _show_left_alone(out, found.left_alone)
    moved = sum(one.moved for one in found.broken)
    out.print(
        f"{found.whole} chunks are whole, {len(found.broken)} files were not ({moved} of them set aside now); "
        f"{size(found.bytes)} read in {duration(took)}",
        soft_wrap=True,
    )
    return status


def _left_alone(left: Sequence[Ignored]) -> list[dict[str, str]]:
    return [one._asdict() for one in left]


def _show_left_alone(out: Any, left: Sequence[Ignored]) -> None:
    for one in left:
        out.print(f"{one.file}: left alone: {one.why}", soft_wrap=True)


def _gc(args: argparse.Namespace, store: ChunkStore) -> int:
    with progress("removing", len(store.entries())) as advance:
        found = store.gc(args.max_bytes, advance, set_aside=args.set_aside)
    left = store.entries()
    total = sum(entry.bytes for entry in left)
    if args.json:
        emit({"store": args.store, "removed": found.chunks, "removed_bytes": found.bytes,
              "leftovers": found.leftovers, "broken_removed": found.broken,
              "broken_removed_bytes": found.broken_bytes, "left_alone": _left_alone(found.left_alone),
              "chunks": len(left), "bytes": total})  # fmt: skip
        return 0
    out = console()
    _show_left_alone(out, found.left_alone)
    out.print(
        f"{found.chunks} chunks removed ({size(found.bytes)}), and {found.leftovers} unfinished ones of dead "
        f"processes, {found.broken} broken ones set aside ({size(found.broken_bytes)}); {len(left)} chunks stay "
        f"({size(total)})",
        soft_wrap=True,
    )
    return 0
