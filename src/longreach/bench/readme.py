"""Write the numbers of README, docs/quality.md and docs/speed.md, and the pictures of PICTURES, from the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longreach.bench import front
from longreach.bench import kascade_picture as kascade
from longreach.bench.case import EVICT, FUSION, HOST, STEPS, USER
from longreach.bench.cases import CASES, GROUPS
from longreach.bench.format import goal, outcome, rate
from longreach.bench.host import picture as host
from longreach.bench.readme_models import models, rates
from longreach.bench.record import read
from longreach.errors import InvalidInput
from longreach.records.quality import quality, summary
from longreach.records.record import files
from longreach.records.skipped import Skipped, skipped

# their entries are many, and compare with one another; `models` has the first two
APART = STEPS, USER, FUSION, EVICT, HOST


def update(root: Path, name: str, results: Path) -> bool:
    """Write the numbers of a page of PAGES, below the project's root; whether they had changed.

    Raises InvalidInput without records, markers or file.
    """
    page = root / name
    if not files(results):
        raise InvalidInput(f"{results} holds no records; name the folder that does with --out")
    try:
        text = page.read_text()
    except OSError as error:
        raise InvalidInput(f"cannot read {page}: {error.strerror}; run this in the project's root") from error
    new = rewritten(text, results, PAGES[name])
    if new != text:
        page.write_text(new)
    return new != text


def redrawn(root: Path, results: Path) -> dict[str, bool | None]:
    """Draw the pictures of PICTURES that have records: name -> whether it had changed, None without matplotlib."""
    if find_spec("matplotlib") is None:
        return dict.fromkeys(PICTURES)
    changed: dict[str, bool | None] = {}
    for name, draw in PICTURES.items():
        path, new = root / name, draw(results)
        if new is not None:
            changed[name] = not path.is_file() or path.read_bytes() != new
            path.write_bytes(new)
    return changed


def rewritten(text: str, results: Path, blocks: Sequence[str]) -> str:
    """A page's text with the numbers of the records."""
    for name in blocks:
        begin, end = markers(name)
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise InvalidInput(f"no lines {begin} and {end} for the numbers to stand between; put them back")
        text = f"{head}{begin}\n{WRITTEN[name](results)}\n{end}{tail}"
    return text


def markers(name: str) -> tuple[str, str]:
    """The lines between which a table stands."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def numbers(results: Path) -> str:
    """Markdown: for each case our time, that on our best pages, the fastest rival's, and the outcome of targets."""
    rows: list[str] = []
    unforced, forced = skipped(results), False
    places: dict[str, dict[str, str]] = {}
    for group in GROUPS:
        path = results / f"{group}.json"
        if group in APART or not path.is_file():
            continue
        cases: dict[str, Any] = read(path)["cases"]
        for name in (name for name in CASES if name in cases):
            case = cases[name]
            forced = forced or "forced" in case
            rows += _rows(name, case, unforced)
            where = f"{case['device']['name']}, commit {(case['commit'] or 'unknown')[:12]}"
            places.setdefault(where, {}).update(case["versions"] | case["baselines"]["versions"])
    if not rows:
        return "No measurements yet."
    head = ["| case | longreach | longreach, best page size | fastest other kernel | must reach | got |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    said = [_forced(unforced), ""] if forced else []
    made = [f"Measured on {where}: {_versions(v)}." for where, v in places.items()]
    return "\n".join([*head, *rows, "", *said, *made])


def _forced(unforced: Skipped | None) -> str:
    """The text below numbers of forced hits."""
    text = "Forced: every head is made to hit, for timing alone, so keys read are no result."
    if unforced is None:
        return text
    return (
        f"{text} Beside it: the keys that {unforced.model} skips with nothing forced, as it answers RULER's tasks at "
        f"{unforced.length} tokens by `{unforced.label}`, the loosest threshold measured whose mean is within a point "
        f"of dense attention's (`{unforced.where}`)."
    )


def _rows(name: str, case: dict[str, Any], unforced: Skipped | None) -> list[str]:
    if "forced" in case:
        name += " (forced)" if unforced is None else f" (forced; {unforced.model} skips {unforced.share:.0%})"
    entries = case["entries"]
    ours = [e for e in entries if e["who"] == "longreach"]
    mine = next(
        (e for e in ours if "keys_and_values_read" in e.get("settings", {})), ours[0]
    )  # a method's, next to dense
    auto = f"{mine['name']}: " if "auto" in case or mine is not ours[0] else ""
    paged = _fastest(e for e in ours if e["name"].startswith("page "))
    other = _fastest(e for e in entries if e["who"] != "longreach")
    if mine is not ours[0]:
        other = f"longreach, dense: {_time(ours[0])}"
    targets = case["targets"] or [None]
    rows = []
    for number, target in enumerate(targets):
        first = [name, f"{auto}{_time(mine)}, {rate(mine)}", paged, other] if not number else [""] * 4
        last = ["-", "-"] if target is None else [goal(target), outcome(target)]
        rows.append(f"| {' | '.join([*first, *last])} |")
    return rows


def _fastest(entries: Iterable[dict[str, Any]]) -> str:
    best = min(entries, key=lambda e: e["microseconds"]["median"], default=None)
    return f"{best['name']}: {_time(best)}" if best else "-"


def _time(entry: dict[str, Any]) -> str:
    return f"{entry['microseconds']['median']:.1f} us"


def _versions(versions: dict[str, str]) -> str:
    names = ("torch", "triton", "cuda", "transformers", "flashinfer", "flash_attention_3")
    return ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))


WRITTEN = {
    "headline": front.headline, "methods": front.table, "measured": front.measured, "models": models, "rates": rates,
    "records": numbers, "quality": summary, "tasks": quality,
}  # fmt: skip
PAGES = {
    "README.md": ("headline", "methods", "measured"),
    "docs/quality.md": ("quality", "tasks"),
    "docs/speed.md": ("models", "rates", "records"),
}
PICTURES: dict[str, Callable[[Path], bytes | None]] = {
    "docs/quality.png": front.picture,
    "docs/magicpig/host-batches.png": host.picture,
    "docs/kascade/kascade-time.png": kascade.picture,
}
