"""The tables of docs/performance.md hold the numbers of the records that the page names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from longreach.bench.cases import METHODS
from longreach.bench.user import CAPTURED, OURS, THEIRS
from tests.doc_tables import ROOT, Row, record, section, tables

PAGE = (ROOT / "docs" / "performance.md").read_text()
MAC_PAGE = (ROOT / "docs" / "mac" / "README.md").read_text()
LOG = "change", "before", "after", "why"  # a table of times that were noted on the way
TABLES = [table for table in tables(PAGE) if table[0] != LOG]
WORDS = " ".join(PAGE.split())
PHASES = ("match and ring", "attention and merge", "append", "rest")
Entries = dict[str, dict[str, Any]]


def cases(name: str) -> dict[str, tuple[dict[str, Any], Entries]]:
    """A record's cases, with their entries by name."""
    found = record(name)["cases"].items()
    return {case: (value, {entry["name"]: entry for entry in value["entries"]}) for case, value in found}


def us(entry: dict[str, Any]) -> float:
    return float(entry["microseconds"]["median"])


def prompt(case: dict[str, Any]) -> str:
    return f"{case['shape']['context'] >> 10}K, batch {case['shape']['batch']}"


def mac_model_rows() -> list[Row]:
    rows = []
    for name, (case, entries) in cases("decode-8b-mac").items():
        batch = str(case["shape"]["batch"]) + (", as many as fit" if name.endswith("most") else "")
        for method, prefix in (("dense", ""), ("mac", "mac: ")):
            phases = case["phases"]["microseconds"][method]
            parts = (f"{phases[phase]:.0f}" if phase in phases else "" for phase in PHASES)
            times = []
            for kind in ("captured step", "generate"):
                mine, dense = us(entries[prefix + kind]), us(entries[kind])
                times.append(f"{mine:.0f}" + (f", {dense / mine:.2f}x" if prefix else ""))
            rows.append((batch if method == "dense" else "", method, *parts, *times))
    return rows


def steps_rows() -> list[Row]:
    rows = []
    for case, entries in cases("steps").values():
        dense = us(entries["dense"])
        over = (f"{us(entries[method]) / dense:.2f}" for method in METHODS[1:])
        rows.append((prompt(case), f"{dense / 1e3:.2f}", *over))
    _, entries = cases("steps")["steps-128k-b1"]
    kernels = (str(entries[method]["launched"]["kernels"]) for method in METHODS)
    return [*rows, ("kernels a step, 128K, batch 1", *kernels)]


def user_row(label: str, name: str, entry: dict[str, Any]) -> Row:
    memory = entry["memory"]
    peaks = (f"{memory[phase] / 2**30:.2f}" for phase in ("prefill_peak", "decode_peak"))
    times = f"{entry['ttft_seconds']:.2f}", f"{us(entry) / 1e3:.2f}"
    return label, name, *times, *peaks, str(entry["launched"]["kernels"])


def user_rows() -> list[Row]:
    rows = []
    for name, (case, entries) in cases("user").items():
        if not name.endswith("-methods"):
            rows += [user_row(prompt(case) if first else "", *entry) for first, entry in marked(entries)]
    return rows


def user_methods_rows() -> list[Row]:
    _, entries = cases("user")["user-32k-b1-methods"]
    return [user_row("", *item)[1:] for item in entries.items()]


def marked(entries: Entries) -> list[tuple[bool, tuple[str, dict[str, Any]]]]:
    return [(not number, item) for number, item in enumerate(entries.items())]


def mac_rows() -> list[Row]:
    _, entries = cases("user")["user-32k-b1-methods"]
    ways = ("dense", OURS), ("mac", f"{OURS}, mac")
    return [(label, *user_row("", "", entries[name])[2:-1]) for label, name in ways]


PREDICTED = {  # row -> (entry of the record, predicted ms)
    "log-sums": ("anchor: log-sums", 141),
    "scores": ("anchor: scores", 141),
    "top-k and packing": ("anchor: top-k", 16),
    "attention to lists and own keys": ("anchor: attend", 35),
    "an anchor": ("anchor", 333),
    "first anchor, dense": ("layer 0", 403),
    "mean of the stack": ("kascade", 84),
    "FlashAttention-3": ("FlashAttention-3", 220),
}


def kascade_prefill_rows() -> list[Row]:
    _, entries = cases("kascade-prefill")["kascade-prefill-128k-10pct"]
    return [
        (label, str(predicted), f"{us(next(e for n, e in entries.items() if n.startswith(name))) / 1e3:.0f}")
        for label, (name, predicted) in PREDICTED.items()
    ]


# batch -> before and predicted, in us
STEPS_BEFORE = {1: ("58.3", "20 to 25"), 8: ("104.9", "42 to 48"), 32: ("218.3", "115 to 130")}


def block_mka_rows() -> list[Row]:
    rows = []
    for name, (case, entries) in cases("mka-decode").items():
        if name.endswith("-bounds"):
            continue
        batch, (mine, *dense) = case["shape"]["batch"], map(us, entries.values())
        assert min(dense) == us(entries["torch SDPA cudnn"])
        rows.append((str(batch), *STEPS_BEFORE[batch], f"{mine:.1f}", f"{min(dense):.1f}"))
    return rows


def vllm_rows() -> list[Row]:
    rows = []
    for batch in (1, 4):
        _, entries = cases("steps")[f"steps-128k-b{batch}"]
        for method in ("dense", "kascade"):
            rows.append(
                (f"`{method}`", str(batch), f"{us(entries[method]) / 1e3:.2f}", f"{vllm_ms(method, batch):.2f}")
            )
    return rows


def vllm_ms(method: str, batch: int) -> float:
    found = record("vllm-times")["cases"]["tpot-128k"]["measurements"]
    (one,) = (each for each in found if (each["method"], each["batch"]) == (method, batch))
    return float(one["tpot_ms"])


WAYS = ("TTFT, s", "ms a token", "peak of prefill, GiB", "peak of decoding, GiB", "kernels a token")
EXPECTED: dict[Row, Callable[[], list[Row]]] = {
    ("128K tokens, 10%", "predicted, ms", "found, ms"): kascade_prefill_rows,
    ("batch", "", *PHASES, "captured step", "`generate`"): mac_model_rows,
    ("", "dense, ms", *METHODS[1:-1], f"{METHODS[-1]}, hits forced"): steps_rows,
    ("prompt", "", *WAYS): user_rows,
    ("32K, batch 1", *WAYS): user_methods_rows,
    ("method", "batch", "own loop", "vLLM"): vllm_rows,
    ("batch", "before, us", "predicted", "found", "dense, cuDNN"): block_mka_rows,
}


def test_every_table_is_compared_with_records() -> None:
    assert [head for head, _ in TABLES] == list(EXPECTED)


@pytest.mark.parametrize(("head", "rows"), [pytest.param(*table, id=table[0][-1]) for table in TABLES])
def test_numbers_are_those_of_the_records(head: Row, rows: list[Row]) -> None:
    assert rows == EXPECTED[head]()


def test_the_log_ends_with_the_record() -> None:
    """The last row of MagicPIG's log has the times of its record."""
    ((_, rows),) = [table for table in tables(PAGE) if table[0] == LOG]
    times = {
        (batch, name): us(entry)
        for case, entries in cases("magicpig-decode").values()
        if case["shape"]["context"] == 1 << 17
        for batch in (case["shape"]["batch"],)
        for name, entry in entries.items()
    }
    group, own = "(10,75) group", "(10,150) own"
    assert f"step {times[1, group]:.1f} us" in rows[-1][2] and f"`own` {times[1, own]:.1f} us" in rows[-1][2]
    assert f"{times[32, group]:.0f} us (12x), `own` {times[32, own]:.0f} us" in rows[-1][2]


def test_what_mac_costs_without_forced_hits() -> None:
    ((head, rows),) = tables(section(MAC_PAGE, "What it costs without forced hits", "Answers"))
    assert head == ("", *WAYS[:-1]) and rows == mac_rows()
    _, entries = cases("user")["user-32k-b1-methods"]
    mac, theirs = (entries[name]["memory"] for name in (f"{OURS}, mac", THEIRS))
    prefill, decoding = (f"{mac[phase] / theirs[phase]:.3f} times" for phase in ("prefill_peak", "decode_peak"))
    assert f"{prefill} transformers' in prefill, {decoding} in decoding" in WORDS
    assert f"{prefill} that of transformers' own generate, of decoding {decoding}" in " ".join(MAC_PAGE.split())


def test_every_missed_target_is_named() -> None:
    missed = {
        f"{target['of']} at {prompt(case)}, by {target['missed_by']:.1%}"
        for case, _ in cases("steps").values()
        for target in case["targets"]
        if not target["reached"]
    }
    assert f"Missed: {' and '.join(sorted(missed))}." in WORDS.replace(", and ", " and ")
    attached = [t["got"] for case, _ in cases("user").values() for t in case["targets"] if t["of"] == CAPTURED]
    assert f"takes {min(attached):.3f} to {max(attached):.3f} times `longreach.generate`'s time a token" in WORDS
    (piecewise,) = (t for case, _ in cases("user").values() for t in case["targets"] if not t["reached"])
    assert f"The target of {piecewise['bound']} is missed by {piecewise['missed_by']:.1%}." in WORDS


def test_ratios_in_vllm() -> None:
    steps = [cases("steps")[f"steps-128k-b{batch}"][1] for batch in (1, 4)]
    mine = [f"{us(entries['dense']) / us(entries['kascade']):.2f}" for entries in steps]
    theirs = [f"{vllm_ms('FLASH_ATTN', batch) / vllm_ms('kascade', batch):.2f}" for batch in (1, 4)]
    assert f"{theirs[0]} and {theirs[1]} instead of {mine[0]} and {mine[1]}." in WORDS
