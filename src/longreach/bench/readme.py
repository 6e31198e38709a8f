"""README's numbers, written from the records between two markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.bench.cases import CASES, GROUPS
from longreach.bench.record import read
from longreach.bench.words import goal, outcome
from longreach.errors import InvalidInput

BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"


def update(readme: Path, results: Path) -> bool:
    """Write the numbers; returns whether they had changed. Raises InvalidInput without markers or file."""
    try:
        text = readme.read_text()
    except OSError as error:
        raise InvalidInput(f"cannot read {readme}: {error.strerror}; run this in the project's root") from error
    new = rewritten(text, results)
    if new != text:
        readme.write_text(new)
    return new != text


def rewritten(text: str, results: Path) -> str:
    """README's text with the numbers of the records."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise InvalidInput(f"README has no lines {BEGIN} and {END} for the numbers to stand between; put them back")
    return f"{head}{BEGIN}\n{numbers(results)}\n{END}{tail}"


def numbers(results: Path) -> str:
    """Markdown: for each case our time and rate, the fastest rival's, and what became of the targets."""
    rows, places = [], []
    for group in GROUPS:
        path = results / f"{group}.json"
        if not path.is_file():
            continue
        cases: dict[str, Any] = read(path)["cases"]
        for name in (name for name in CASES if name in cases):
            rows += _rows(name, cases[name])
            place = _place(cases[name])
            places += [] if place in places else [place]
    if not rows:
        return "No measurements yet."
    head = ["| case | longreach | fastest other kernel | must reach | got |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, "", *(f"Measured on {place}." for place in places)])


def _rows(name: str, case: dict[str, Any]) -> list[str]:
    entries = case["entries"]
    mine = next(e for e in entries if e["who"] == "longreach")
    others = sorted((e for e in entries if e["who"] != "longreach"), key=lambda e: e["microseconds"]["median"])
    other = f"{others[0]['name']}: {_time(others[0])}" if others else "-"
    targets = case["targets"] or [None]
    rows = []
    for number, target in enumerate(targets):
        first = [name, f"{_time(mine)}, {mine['tb_per_s']:.2f} TB/s", other] if not number else ["", "", ""]
        last = ["-", "-"] if target is None else [goal(target), outcome(target)]
        rows.append(f"| {' | '.join([*first, *last])} |")
    return rows


def _time(entry: dict[str, Any]) -> str:
    return f"{entry['microseconds']['median']:.1f} us"


def _place(case: dict[str, Any]) -> str:
    versions = case["versions"] | case["baselines"]["versions"]
    names = ("torch", "triton", "cuda", "flashinfer", "flash_attention_3")
    told = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    return f"{case['device']['name']}, {told}, commit {(case['commit'] or 'unknown')[:12]}"
