"""The tables of whole models in docs/speed.md: what a user gets (`user`), a captured step of every method (`steps`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.bench.case import STEPS, USER
from longreach.bench.cases import METHODS
from longreach.bench.record import read
from longreach.bench.user import ATTACHED, CAPTURED, OURS, THEIRS

GUARD = ", guard"
WAYS = THEIRS, ATTACHED, CAPTURED, OURS
Entries = dict[str, dict[str, Any]]


def models(results: Path) -> str:
    """Markdown: a table of each of the two records, and where it was measured.

    Without the case of `user` with all methods; a record that is not there is left out.
    """
    written = []
    for group, table in ((USER, users), (STEPS, steps)):
        path = results / f"{group}.json"
        if path.is_file():
            cases: dict[str, Any] = read(path)["cases"]
            shown = {name: case for name, case in cases.items() if not name.endswith("-methods")}
            written.append("\n".join([*table(shown), "", measured(group, shown)]))
    return "\n\n".join(written) or "No measurements yet."


def users(cases: dict[str, Any]) -> list[str]:
    """A line for each case: transformers' generate, the same call attached, plain and captured, longreach.generate.

    Cases without one of them are left out, unless it is the captured one, which earlier records do not have.
    """
    lines = ["| prompt | TTFT, s | ms a token | peak memory, GiB | missed |", "|---|---|---|---|---|"]
    for case in cases.values():
        entries = by_name(case)
        if entries.keys() | {CAPTURED} >= set(WAYS):
            columns = zip(*(_user_cells(entries.get(way)) for way in WAYS), strict=True)
            lines.append(f"| {prompt(case)} | {' | '.join(map(', '.join, columns))} | {missed(case)} |")
    return lines


def _user_cells(entry: dict[str, Any] | None) -> tuple[str, str, str]:
    """TTFT, time a token and peak memory of an entry."""
    if entry is None:
        return "-", "-", "-"
    peak = max(entry["memory"]["prefill_peak"], entry["memory"]["decode_peak"])
    return f"{entry['ttft_seconds']:.2f}", f"{entry['microseconds']['median'] / 1e3:.2f}", f"{peak / 2**30:.2f}"


def steps(cases: dict[str, Any]) -> list[str]:
    """A line for each case: dense attention's step, each method's over it, and the targets that were missed."""
    methods = METHODS[1:]
    lines = [f"| keys | dense, ms | {' | '.join(methods)} | missed |", f"|---|---|{'---|' * len(methods)}---|"]
    for case in cases.values():
        entries = by_name(case)
        dense = entries["dense"]["microseconds"]["median"]
        over = [f"{entries[m]['microseconds']['median'] / dense:.2f}" if m in entries else "-" for m in methods]
        cells = [prompt(case), f"{dense / 1e3:.2f}", *over, missed(case)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rates(results: Path) -> str:
    """Markdown: MAC's speed over dense attention by its hit rate, with the guard, and the rate from which it pays."""
    path = results / "mac-rates.json"
    if not path.is_file():
        return "No measurements yet."
    cases: dict[str, Any] = read(path)["cases"]
    known = [name for name in by_name(next(iter(cases.values()))) if name.endswith(GUARD)]
    lines = [f"| keys | {' | '.join(name.removesuffix(GUARD).removeprefix('rate ') for name in known)} | pays from |"]
    lines.append(f"|---|{'---|' * len(known)}---|")
    for case in cases.values():
        times = {name: entry["microseconds"]["median"] for name, entry in by_name(case).items()}
        from_rate = case["break_even"]["guard"]["dense"]
        cells = [prompt(case), *(f"{times['dense'] / times[name]:.2f}" for name in known)]
        lines.append(f"| {' | '.join(cells)} | {'-' if from_rate is None else f'{from_rate:.2f}'} |")
    return "\n".join([*lines, "", measured("mac-rates", cases)])


def missed(case: dict[str, Any]) -> str:
    """The targets that were missed, and by how much."""
    return ", ".join(f"{t['of']} by {t['missed_by']:.1%}" for t in case["targets"] if t["reached"] is False) or "-"


def measured(group: str, cases: dict[str, Any]) -> str:
    """The devices and commits of a record."""
    where: dict[str, dict[str, None]] = {}
    for case in cases.values():
        where.setdefault(case["device"]["name"], {})[(case["commit"] or "unknown")[:12]] = None
    places = "; ".join(f"{device}, commit{'s' * (len(c) > 1)} {', '.join(c)}" for device, c in where.items())
    return f"`{group}`, measured on {places}."


def by_name(case: dict[str, Any]) -> Entries:
    return {entry["name"]: entry for entry in case["entries"]}


def prompt(case: dict[str, Any]) -> str:
    return f"{case['shape']['context'] >> 10}K, batch {case['shape']['batch']}"
