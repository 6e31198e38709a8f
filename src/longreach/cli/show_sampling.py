"""What `eval` and `compare` show of methods that sample keys: search and attention, sampled shares, error bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longreach.cli.show import percent

if TYPE_CHECKING:
    from rich.console import Console

Found = Mapping[str, Iterable[dict[str, Any] | None]]  # label -> an entry of a record for each task, None for none


def show_sampling(out: Console, found: Found) -> None:
    """Bytes of search and of attention in the layers that have hash tables, and the shares of keys sampled."""
    there = _there(found)
    if there:
        out.print(
            "\nsampled layers, decode; bytes over dense attention's, keys over the context, tables over KV memory:"
        )
    for label, some in there.items():
        head, group, over = (
            _of([_of(s[name]) for s in some]) for name in ("sampled_head", "sampled_group", "overflowed")
        )
        full = f", {percent(over)} of rows dense as their lists were full" if over else ""
        out.print(
            f"  {label}: search {percent(_of([s['search'] for s in some]))}, attention "
            f"{percent(_of([s['attention'] for s in some]))}; keys sampled {percent(head)} a head, "
            f"{percent(group)} a group{full}; tables {percent(_of([s['tables_over_kv'] for s in some]))}",
            soft_wrap=True,
        )


def show_error_bars(out: Console, found: Found) -> None:
    """Mean relative error, rows redone, and bytes of the estimate."""
    there = _there(found)
    if there:
        out.print(
            "\nerror bars, decode: mean standard error of the output over its length, before anything is redone; "
            "rows attended densely for it (redo); bytes read for the estimate, over dense attention's:",
            soft_wrap=True,
        )
    for label, some in there.items():
        errors = [_of(column) for column in zip(*(s["relative_error"] for s in some))] if _same_layers(some) else []
        layers = f" (layers {percent(min(errors))} to {percent(max(errors))})" if len(errors) > 1 else ""
        error, redone = (_of([_of(s[name]) for s in some]) for name in ("relative_error", "redone"))
        read = [s["bytes"] for s in some if "bytes" in s]
        counted = f", bytes {percent(_of(read))}" if read else ""
        out.print(f"  {label}: error {percent(error)}{layers}, redone {percent(redone)}{counted}", soft_wrap=True)


def _there(found: Found) -> dict[str, list[dict[str, Any]]]:
    """Without labels that have no entry."""
    listed = {label: [each for each in entries if each] for label, entries in found.items()}
    return {label: entries for label, entries in listed.items() if entries}


def _same_layers(some: Sequence[dict[str, Any]]) -> bool:
    return all(s["layers"] == some[0]["layers"] for s in some)


def _of(values: Sequence[float]) -> float:
    return sum(values) / len(values)
