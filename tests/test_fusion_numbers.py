"""The tables of docs/fusion.md and docs/fusion/results.md hold the numbers of the records that the pages name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from longreach.bench.case import PREFILLS
from longreach.records.labels import short_label
from tests.doc_tables import ROOT, Row, record, tables

GUIDE = (ROOT / "docs" / "fusion.md").read_text()
PAGE = (ROOT / "docs" / "fusion" / "results.md").read_text()
TEXT = " ".join(PAGE.split())
EXACT = "exact prefill"  # the faster of the two baselines
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_3", "niah_multiquery")
SHARED = {4096: ("vt", "qa_synthetic_1", "qa_synthetic_2", "niah_multikey_3", "niah_multivalue"),
          16384: ("vt", "qa_synthetic_1", "qa_synthetic_2", "niah_multikey_3")}  # fmt: skip
SNAPKV, A3 = "dense evict=snapkv", "a3 ratio=0.15"
RATIOS = (0.05, 0.15, 0.3)


@cache
def results(name: str, task: str) -> dict[str, Any]:
    """A task's results by short label."""
    (found,) = (entry for entry in record(name)["tasks"].values() if entry["task"] == task)
    return {short_label(label): result for label, result in found["results"].items()}


def share(x: float) -> str:
    return f"{100 * x:.0f}%"


def score(name: str, tasks: Sequence[str], method: str, first: int | None = None) -> float | None:
    """Mean over tasks of the mean over the first prompts; None for a method that the record lacks."""
    found = [results(name, task).get(method) for task in tasks]
    if not all(found):
        return None
    scores = [[answer["score"] for answer in result["answers"][:first]] for result in found if result]
    return sum(sum(some) / len(some) for some in scores) / len(scores)


def score_text(name: str, tasks: Sequence[str], method: str, first: int | None = None) -> str:
    found = score(name, tasks, method, first)
    return "-" if found is None else share(found)


def kept(name: str, method: str) -> str:
    every = [results(name, entry["task"])[method]["kept"] for entry in record(name)["tasks"].values()]
    return "-" if method == "dense" else f"{sum(k['kept'] for k in every)} of {sum(k['right'] for k in every)}"


@cache
def case(length: str) -> dict[str, Any]:
    return {entry["name"]: entry for entry in record("fusion")["cases"][f"fusion-{length.lower()}"]["entries"]}


def milliseconds(length: str, method: str) -> float:
    names = PREFILLS if method == EXACT else (method,)
    return float(min(case(length)[name]["microseconds"]["median"] for name in names)) / 1e3


def time_row(method: str) -> Row:
    cells = []
    for length in ("4K", "8K", "16K", "32K"):
        if method != EXACT and method not in case(length):
            cells.append("-")
            continue
        mine, exact = milliseconds(length, method), milliseconds(length, EXACT)
        cells.append(f"{mine:.0f} ms" + ("" if method == EXACT else f", {exact / mine:.1f}x"))
    return tuple(cells)


def parts_row(method: str) -> Row:
    entry = case("16K")[method]
    settings, ms = entry["settings"], entry["settings"]["milliseconds"]
    return (
        f"{entry['launched']['kernels']:,}", f"{settings['loaded_bytes'] / 1e9:.2f} GB",
        f"{ms['waited for copies']:.2f} ms", f"{ms['place']:.1f} ms", f"{ms['layer 0']:.1f} ms",
        f"{ms['choose']:.2f} ms", f"{ms['recompute']:.0f} ms",
    )  # fmt: skip


def ratio_row(row: str) -> Row:
    method, _, part = row.partition("`, ")
    cells = []
    for ratio in ("0", "0.05", "0.15", "0.3", "1"):
        entry, time = case("16K")[f"{method} {ratio}"], milliseconds("16K", f"{method} {ratio}")
        place = entry["settings"]["milliseconds"]["place"]
        cells.append({"time": f"{time:.0f} ms", "placing": f"{place:.1f} ms", "error": f"{entry['error']:.2f}"}[part])
    return tuple(cells)


def targets_row(row: str) -> Row:
    quantity, _, where = row.rpartition(", ")
    method = quantity.removeprefix("choosing, ")
    (target,) = (t for t in record("fusion")["cases"][f"fusion-{where.lower()}"]["targets"] if t["of"] == method)
    choosing = method != quantity
    shown = (lambda x: f"{x:g} ms") if choosing else (lambda x: f"{x:g}x")
    got = f"{target['got']:.2f} ms" if choosing else f"{target['got']:.1f}x"
    return shown(target["bound"]), got, "reached" if target["reached"] else "missed"


def disk_row(length: str) -> Row:
    loads = record("fusion")["cases"][f"fusion-{length.lower()}"]["loads"]
    exact = milliseconds(length, EXACT) / 1e3
    seconds = loads["disk_seconds"], loads["page_cache_seconds"]
    return f"{loads['bytes'] / 1e9:.2f} GB", *(f"{x:.1f} s" for x in seconds), f"{exact:.2f} s"


def summary_row(method: str) -> Row:
    timed = method.replace(" ratio=", " ")
    speeds = (milliseconds(length, EXACT) / milliseconds(length, timed) for length in ("16K", "32K"))
    answers = (kept(f"mini-fusion-tasks-{length}", method) for length in (4096, 16384))
    return (*(f"{x:.1f}x" for x in speeds), *answers)


def tasks_4k_row(method: str) -> Row:
    name = "mini-fusion-tasks-4096"
    groups = NEEDLES, ("niah_multikey_2",), ("niah_multivalue",), ("vt",)
    return (*(score_text(name, tasks, method) for tasks in groups), kept(name, method))


def tasks_16k_row(method: str) -> Row:
    name = "mini-fusion-tasks-16384"
    tasks = "niah_multikey_3", "niah_multivalue", "vt", "cwe", "qa_synthetic_1", "qa_synthetic_2"
    return (*(score_text(name, (task,), method) for task in tasks), kept(name, method))


def ratios_row(method: str) -> Row:
    name = "mini-fusion-ratios-4096"
    tasks = "vt", "qa_synthetic_1", "qa_synthetic_2"
    if method in results(name, "vt"):
        return tuple(score_text(name, (task,), method) for task in tasks)
    each = [[score(name, (task,), f"{method} ratio={ratio:g}") for ratio in RATIOS] for task in tasks]
    return tuple(", ".join(share(x) for x in some if x is not None) for some in each)


def behind_row(method: str) -> Row:
    cells = []
    for length, tasks in SHARED.items():
        for record_name in (f"mini-fusion-tasks-alone-{length}", f"mini-fusion-tasks-bos-{length}"):
            cells.append(score_text(record_name, tasks, method))
        first = len(results(record_name, "vt")["dense"]["answers"])
        by = {task: f"mini-fusion-tasks-{length}" for task in tasks}
        if length == 4096:
            by |= dict.fromkeys(("qa_synthetic_1", "qa_synthetic_2"), "mini-fusion-ratios-4096")
        some = [score(name, (task,), method, first) for task, name in by.items()]
        known = [x for x in some if x is not None]
        cells.append(share(sum(known) / len(known)) if len(known) == len(some) else "-")
    return tuple(cells)


def sum_row(row: str) -> Row:
    length, behind = row.split(", ")
    name = f"mini-fusion-tasks-{behind.split()[-1].lower()}-{int(length[:-1]) * 1024}"
    lost = []
    for entry in record(name)["tasks"].values():
        mine = results(name, entry["task"])
        one, other, both = (mine["dense"]["score"] - mine[x]["score"] for x in (A3, SNAPKV, f"{A3} evict=snapkv"))
        lost.append((one, other, one + other, max(one, other), both))
    return tuple(f"{100 * sum(x) / len(x):.0f}" for x in zip(*lost, strict=True))


def evicted_row(task: str) -> Row:
    alone, fused = results("mini-fusion-snapkv-4096", task), results("mini-fusion-tasks-4096", task)
    both = f"{A3} evict=snapkv"
    return tuple(share(each["score"]) for each in (fused["dense"], alone["pie"], alone[SNAPKV], fused[A3], fused[both]))


def hits_row(method: str) -> Row:
    mine = {short_label(label): result for label, result in record("mini-fusion-layers-4096")["results"].items()}[
        method
    ]
    errors = mine["layers"]["attention"]
    change = "-" if mine["hits_change"] is None else share(mine["hits_change"])
    return share(mine["hits_attention"]), change, f"{sum(errors) / len(errors):.2f}"


def full_chunks_row(method: str) -> Row:
    mine = results("mini-fusion-vt-full-chunks-4096", "vt")[method]
    return (f"{share(mine['score'])}, {mine['kept']['kept']}/{mine['kept']['right']}",)


@cache
def evict_case(batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries without and with SnapKV."""
    without, evicted = record("evict")["cases"][f"evict-7k-b{batch}"]["entries"]
    assert without["settings"]["evict"] is None and evicted["settings"]["evict"]["capacity"] == 1024
    return without, evicted


def step_seconds(entry: dict[str, Any]) -> float:
    return float(entry["microseconds"]["median"]) / 1e6


def decode_row(batch: str) -> Row:
    both = evict_case(int(batch))
    steps = [step_seconds(entry) for entry in both]
    return (
        *(f"{1e3 * x:.2f} ms" for x in steps), f"{steps[0] / steps[1]:.2f}x",
        *(f"{entry['tokens_per_second']:,.0f}" for entry in both),
    )  # fmt: skip


def answer_seconds(entry: dict[str, Any], batch: int, length: int) -> float:
    """Of a whole answer. The shorter TTFT counts for both entries, since the prompt is read in the same way."""
    first = min(each["ttft_seconds"] for each in evict_case(batch))
    return float(first + entry["evict_seconds"] + (length - 1) * step_seconds(entry))


def answers_row(batch: str) -> Row:
    without, evicted = evict_case(int(batch))
    cells = [f"{entry['ttft_seconds']:.2f} s" for entry in (without, evicted)]
    cells.append(f"{evicted['evict_seconds']:.2f} s")
    for length in (10, 100, 300):
        cells += [f"{answer_seconds(entry, int(batch), length):.2f} s" for entry in (without, evicted)]
    saved = step_seconds(without) - step_seconds(evicted)
    return *cells, "never" if saved <= 0 else f"{1 + math.ceil(evicted['evict_seconds'] / saved):,} tokens"


def longest(entry: dict[str, Any], batch: int) -> str:
    """Tokens of an answer that is reserved before the prompt is read, to three digits."""
    memory, token = entry["memory"], 131072 * batch  # bytes of a token's keys and values: 32 layers, 8 heads of 128
    less = -(-(memory["prefill_peak"] - memory["decode_peak"]) // token)
    digits = f"{entry['tokens_that_fit'] - less:.3g}"
    return f"{float(digits):,.0f}"


def memory_row(batch: str) -> Row:
    both = evict_case(int(batch))
    sizes = (
        *(entry["kv_bytes"] for entry in both),
        *(entry["memory"][part] for part in ("prefill_peak", "decode_peak") for entry in both),
    )
    return *(f"{x / 1e9:.1f} GB" for x in sizes), *(longest(entry, int(batch)) for entry in both)


def evict_targets_row(target: str) -> Row:
    cases = record("evict")["cases"]
    if target == "batch 64":
        assert len(cases["evict-7k-b64"]["entries"]) == 2 and not cases["evict-7k-b64"]["left_out"]
        return "runs", "runs"
    if target.startswith("speed"):
        (found,) = (t for t in cases["evict-7k-b16"]["targets"] if "speed" in t["quantity"])
        assert found["reached"] and found["got"] < 1.01 * found["bound"]
        return f"{found['bound']:g}x", f"{found['got']:.3f}x"
    held = [t for case in cases.values() for t in case["targets"] if "KV held" in t["quantity"]]
    assert len(held) == 4 and all(t["reached"] for t in held)
    (shown,) = {(f"at most {t['bound']:g}% of the prompt's", f"{t['got']:.1f}%") for t in held}
    return shown


EXPECTED: dict[Row, Callable[[str], Row]] = {
    ("method", "4K", "8K", "16K", "32K"): time_row,
    ("method", "kernels", "copied", "waited for copies", "placing", "first layer", "choosing", "the rest"): parts_row,
    ("method", "0", "0.05", "0.15", "0.3", "1"): ratio_row,
    ("target", "bound", "got", ""): targets_row,
    ("length", "keys and values", "from disk", "from cached files", "exact prefill"): disk_row,
    ("method", "16K, first token", "32K, first token", "4K, answers kept", "16K, answers kept"): summary_row,
    ("method", "six needle tasks", "`niah_multikey_2`", "`niah_multivalue`", "`vt`", "answers kept"): tasks_4k_row,
    ("method", "`niah_multikey_3`", "`niah_multivalue`", "`vt`", "`cwe`", "`qa_synthetic_1`", "`qa_synthetic_2`",
     "answers kept"): tasks_16k_row,
    ("method", "`vt`", "`qa_synthetic_1`", "`qa_synthetic_2`"): ratios_row,
    ("method", "4K, alone", "4K, BOS", "4K, system", "16K, alone", "16K, BOS", "16K, system"): behind_row,
    ("chunks", "`a3` alone", "`snapkv` alone", "their sum", "the larger, by task", "both together"): sum_row,
    ("task", "`dense`", "`pie`", "`snapkv`", "`a3 ratio=0.15`", "`a3` and `snapkv`"): evicted_row,
    ("method", "attended to most", "change most", "error of attention"): hits_row,
    ("method", "score, answers kept"): full_chunks_row,
    ("batch", "TPOT", "with SnapKV", "speed", "tokens per second", "with SnapKV"): decode_row,
    ("batch", "TTFT", "with SnapKV", "eviction", "10 tokens", "with SnapKV", "100 tokens", "with SnapKV", "300 tokens",
     "with SnapKV", "SnapKV pays from"): answers_row,
    ("batch", "KV cache", "with SnapKV", "peak of prefill", "with SnapKV", "peak of decode", "with SnapKV",
     "longest answer", "with SnapKV"): memory_row,
    ("target", "bound", "got"): evict_targets_row,
}  # fmt: skip


TABLES = [*tables(PAGE), *(table for table in tables(GUIDE) if "answers kept" in " ".join(table[0]))]


def test_every_table_is_compared_with_records() -> None:
    assert sorted(head for head, _ in TABLES) == sorted(EXPECTED)


@pytest.mark.parametrize(("head", "rows"), [pytest.param(*table, id=table[0][1]) for table in TABLES])
def test_numbers_are_those_of_the_records(head: Row, rows: list[Row]) -> None:
    assert rows
    for name, *found in rows:
        assert tuple(found) == EXPECTED[head](name.strip("`")), name


def test_every_missed_target_is_named() -> None:
    targets = [
        ("choosing, " * ("choosing" in target["quantity"]) + f"{target['of']}, {name.split('-')[1].upper()}", target)
        for name, case in record("fusion")["cases"].items()
        for target in case["targets"]
    ]
    (rows,) = (rows for head, rows in TABLES if head == ("target", "bound", "got", ""))
    assert {name for name, target in targets if not target["reached"]} == {row[0] for row in rows}
    missed = sum(target["reached"] is False for _, target in targets)
    assert f"{['No', 'One', 'Two', 'Three', 'Four', 'Five'][missed]} of {len(targets)} targets are missed" in PAGE
    assert f"The other {len(targets) - len(rows)} are reached" in PAGE


def test_sentences_on_eviction() -> None:
    guide = " ".join(GUIDE.split())
    speeds, pays, evicts = dict[int, str](), dict[int, str](), dict[int, str]()
    earlier, more = list[float](), list[float]()
    for batch in (1, 4, 16, 64):
        without, evicted = evict_case(batch)
        speeds[batch] = f"{step_seconds(without) / step_seconds(evicted):.2f} times"
        pays[batch] = answers_row(str(batch))[-1].removesuffix(" tokens")
        evicts[batch] = f"{evicted['evict_seconds']:.1f} s"
        earlier.append(without["ttft_seconds"] - evicted["ttft_seconds"])
        shorter = answer_seconds(evicted, batch, 300) < answer_seconds(without, batch, 300)
        assert shorter == (batch == 16)
        assert evicted["memory"]["prefill_peak"] == pytest.approx(without["memory"]["prefill_peak"], rel=0.01)
        more.append(evicted["memory"]["decode_peak"] / without["memory"]["decode_peak"] - 1)
    slower = step_seconds(evict_case(1)[1]) / step_seconds(evict_case(1)[0]) - 1
    assert f"At batch 1 it is {share(slower)} slower" in TEXT and pays[1] == "never"
    assert f"TTFT is lower with SnapKV by {min(earlier):.1f} to {max(earlier):.1f} s" in TEXT
    assert min(more) > 0 and f"it is up to {100 * max(more):.1f}% higher with SnapKV" in TEXT
    assert evicts[4] == evicts[16]
    assert f"takes {evicts[4]} at batches 4 and 16, {evicts[1]} at batch 1 and {evicts[64]} at batch 64" in TEXT
    seconds = [f"{answer_seconds(entry, 16, 300):.1f} s" for entry in reversed(evict_case(16))]
    assert f"at batch 16 alone: {' instead of '.join(seconds)}" in TEXT
    assert f"decodes {speeds[16]} as fast at batch 16 and {speeds[64]} at batch 64" in guide
    pays_from = f"from {pays[4]} tokens at batch 4, {pays[16]} at batch 16 and {pays[64]} at batch 64"
    assert f"{pays_from}, and never at batch 1" in guide and pays_from in TEXT
    assert f"{speeds[4]} as fast at batch 4, {speeds[16]} at batch 16 and {speeds[64]} at batch 64" in TEXT
    freed = evict_case(64)[0]["kv_bytes"] - evict_case(64)[1]["kv_bytes"]
    assert f"{freed / 1e9:.1f} GB at batch 64" in TEXT


def test_sentences_on_copies() -> None:
    waited = {
        (length, name): entry["settings"]["milliseconds"]
        for length in ("16K", "32K")
        for name, entry in case(length).items()
        if "milliseconds" in entry["settings"]
    }
    for length, name in (("16K", "cacheblend 0"), ("32K", "full_reuse"), ("32K", "pie")):
        ms = waited.pop((length, name))
        assert f"`{name}` {ms['waited for copies']:.1f} ms of {ms['all']:.0f} ms" in TEXT
    assert f"No other read waited for more than {max(ms['waited for copies'] for ms in waited.values()):.2f} ms" in TEXT
    (place,) = {f"{waited['16K', f'{name} 1']['place']:.1f} ms" for name in ("cacheblend", "a3", "dependence")}
    assert f"placing takes {place} where the device is the bottleneck" in TEXT


def test_sentences_on_choosing() -> None:
    ms = {
        (length, name): entry["settings"]["milliseconds"]["choose"]
        for length in ("4K", "6K", "16K")
        for name, entry in case(length).items()
        if name not in PREFILLS
    }
    names = "cacheblend 0.15", "a3 0.15", "dependence 0.15", "a3_deep 0.15"
    each = [f"{ms['16K', name]:.1f} ms" for name in names]
    text = f"takes {each[0]} with `cacheblend`, {each[1]} with `a3`, {each[2]} with `dependence` and {each[3]} with"
    assert text in TEXT
    assert f"at 4K `a3` needs {ms['4K', 'a3 0.15']:.1f} ms" in TEXT
    shares = [100 * ms["6K", name] / milliseconds("6K", name) for name in names]
    times = [milliseconds("6K", name) for name in names]
    text = f"{min(shares):.1f}% to {max(shares):.1f}% of passes of {min(times):.0f} to {max(times):.0f} ms"
    assert text in TEXT


def test_sentences_on_the_host() -> None:
    kernels = [case(length)[name]["launched"]["kernels"] for length in ("4K", "6K", "8K", "16K")
               for name in case(length) if name not in PREFILLS and not name.endswith(" 1")]  # fmt: skip
    assert f"{round(min(kernels), -2):,} to {round(max(kernels), -2):,} kernels" in TEXT
    slow = [milliseconds(length, name) for length in ("4K", "8K") for name in case(length) if name not in PREFILLS]
    assert f"At 4K and 8K this takes the host {min(slow):.0f} to {max(slow):.0f} ms" in TEXT
    for first, second, length in (("full_reuse", "pie", "16K"), ("pie", "full_reuse", "8K")):
        assert case(length)[first]["launched"]["kernels"] == pytest.approx(
            case(length)[second]["launched"]["kernels"], abs=2
        )
        times = [f"{milliseconds(length, name):.0f} ms" for name in (first, second)]
        assert f"at {length} `{first}` took {times[0]} and `{second}` {times[1]}" in TEXT
    reads = [f"{x / 1e3:.0f}" for x in sorted(case("16K")["pie"]["microseconds"]["replays"])]
    assert f"{reads[0]}, {reads[1]}, {reads[2]}, {reads[3]} and {reads[4]} ms" in TEXT
    whole = [milliseconds("16K", f"{name} 1") / milliseconds("16K", EXACT) - 1
             for name in ("cacheblend", "a3", "a3_deep", "dependence")]  # fmt: skip
    assert f"Ratio 1.0 is {share(min(whole))} to {share(max(whole))} slower than an exact prefill at 16K" in TEXT
    at_32k = {name: milliseconds("32K", name) for name in case("32K") if " 0." in name}
    for ratio in ("0.05", "0.15"):
        some = {name: x for name, x in at_32k.items() if name.endswith(f" {ratio}")}
        assert min(some, key=lambda name: some[name]) == f"dependence {ratio}"


def test_sentences_on_loading() -> None:
    cases, lengths = record("fusion")["cases"], ("4K", "8K", "16K", "32K")
    loads = {length: cases[f"fusion-{length.lower()}"]["loads"] for length in lengths}
    shares = {
        kind: [each[f"{kind}_seconds"] / (milliseconds(length, EXACT) / 1e3) for length, each in loads.items()]
        for kind in ("disk", "page_cache")
    }
    disk, cached = (f"{min(some):.1f} to {max(some):.1f} times" for some in shares.values())
    assert f"takes {disk} as long as computing them" in TEXT
    assert f"page cache it takes {cached} as long" in TEXT
    assert f"Loading chunks from a disk takes {disk} as long as computing them" in " ".join(GUIDE.split())


def test_sentences_on_kept_answers() -> None:
    one, other = (results("mini-fusion-ratios-4096", "vt")[m] for m in ("dependence ratio=0.15", "a3_deep ratio=0.3"))
    assert one["score"] >= other["score"]
    assert f"{one['kept']['kept']} of {one['kept']['right']}, `a3_deep` {other['kept']['kept']} of 10" in TEXT
    needles = results("mini-fusion-tasks-16384", "niah_multikey_3")
    lost = {m: sum(a["score"] < 1 for a in needles[m]["answers"]) for m in ("pie", "legolink", "a3_deep ratio=0.15")}
    assert set(lost.values()) == {1, 2} and len(needles["pie"]["answers"]) == 5
    assert not any(a["score"] < 1 for m in (A3, "dependence ratio=0.15") for a in needles[m]["answers"])
    assert f"`random` has {share(needles['random ratio=0.15']['score'])} too" in TEXT


def test_sentences_on_speed() -> None:
    speed = {
        (length, name): milliseconds(length, EXACT) / milliseconds(length, name)
        for length in ("4K", "8K", "16K", "32K")
        for name in case(length)
        if name not in PREFILLS and not name.endswith((" 0", " 1"))
    }
    pie, a3 = ([f"{speed[length, name]:.1f}" for length in ("16K", "32K")] for name in ("pie", "a3 0.15"))
    text = f"`pie` is {pie[0]} times as fast as an exact prefill and `a3` {a3[0]} times, at 32K {pie[1]} and {a3[1]}"
    assert text in TEXT
    at_4k, at_8k = ([x for (length, _), x in speed.items() if length == wanted] for wanted in ("4K", "8K"))
    assert (
        f"At 8K methods gain a factor of {min(at_8k):.1f} to {max(at_8k):.1f}. At 4K they gain at most {max(at_4k):.1f}"
        in TEXT
    )
    assert f"At 4K fusion is between {min(at_4k):.1f} and {max(at_4k):.1f} times" in " ".join(GUIDE.split())
    assert min(x for (length, _), x in speed.items() if length != "4K") > 1
    slow = {name for (length, name), x in speed.items() if length == "4K" and x < 1}
    *firsts, last = (f"`{name}` ({speed['4K', name]:.2f}x)" for name in sorted(slow, key=lambda n: speed["4K", n]))
    assert f"{', '.join(firsts)} and {last} are slower than an exact prefill" in TEXT
    times = [milliseconds("4K", name) for length, name in speed if length == "4K"]
    assert f"a pass takes {min(times):.0f} to {max(times):.0f} ms there" in TEXT


def test_errors_at_ratio_one() -> None:
    found = {name: entry for name, entry in case("16K").items() if name.endswith(" 1")}
    assert len(found) == 4 and all(entry["error"] <= entry["error_bound"] for entry in found.values())
    error = {name.split()[0]: f"{entry['error']:.3f}" for name, entry in found.items()}
    assert error["a3"] == error["cacheblend"] and error["a3_deep"] == error["dependence"]
    text = f"is {error['a3']} for `a3` and `cacheblend` and {error['a3_deep']} for `a3_deep` and `dependence`"
    assert text in TEXT and f"up to {found['a3 1']['error_bound']:.2f}" in TEXT


def test_needles_are_kept_by_all() -> None:
    for entry in record("mini-fusion-needles")["tasks"].values():
        assert {result["score"] for result in entry["results"].values()} == {1.0}
    assert "every method keeps all 44 needles" in PAGE


def test_counting_words_needs_no_recomputation() -> None:
    cwe, fwe = ({name: share(each["score"]) for name, each in results("mini-fusion-words-4096", task).items()}
                for task in ("cwe", "fwe"))  # fmt: skip
    others = sorted(value for name, value in cwe.items() if name not in ("dense", "full_reuse"))
    text = (
        f"`cwe` is {cwe['dense']} with `dense`, {cwe['full_reuse']} with `full_reuse`, and {others[0]} to {others[-1]} "
    )
    assert text in TEXT
    assert {value for name, value in fwe.items() if "snapkv" not in name} == {"93%"}
    assert {value for name, value in fwe.items() if "snapkv" in name} == {"87%"}


def test_ways_to_sum_heads_are_compared_in_pairs() -> None:
    """Older records hold some of the same prompts, and are left out."""
    tasks = [path.name.split(".")[0] for path in (ROOT / "benchmarks/results").glob("mini-fusion-tasks-*")]
    differences = []
    for name in ("mini-fusion-ratios-4096", "mini-fusion-needles", *tasks):
        for task in record(name)["tasks"].values():
            for label, result in task["results"].items():
                if " fuse.heads=joint" in label:
                    each = task["results"][label.replace(" fuse.heads=joint", "")]
                    pairs = zip(each["answers"], result["answers"], strict=True)
                    differences += [b["score"] - a["score"] for a, b in pairs]
    better, worse = (sum(sign * x > 1e-9 for x in differences) for sign in (1, -1))
    mean = 100 * sum(differences) / len(differences)
    text = f"{len(differences)} pairs of answers: `joint` is better in {better}, worse in {worse}, "
    assert f"{text}by {mean:.1f} points in the mean" in TEXT


def test_pictures_exist_and_are_shown() -> None:
    shown = set(re.findall(r"\]\(([\w.-]+\.png)\)", PAGE))
    assert shown == {path.name for path in (ROOT / "docs/fusion").glob("*.png")}


def test_links_name_files_and_headings() -> None:
    for page in ("docs/fusion.md", "docs/fusion/results.md", "docs/chunk-store.md"):
        for target, heading in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", (ROOT / page).read_text()):
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), (page, target)
            titles = re.findall(r"(?m)^#+ (.*)$", path.read_text()) if heading else []
            assert not heading or heading in {
                re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
            }, (page, target, heading)
