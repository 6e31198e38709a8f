"""Tables and sentences of docs/magicpig/answers.md are those of the records that it names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longreach.methods.magicpig import PRESETS
from longreach.records.report.rows import paired
from tests.doc_tables import ROOT, Row, record, tables

PAGE = (ROOT / "docs" / "magicpig" / "answers.md").read_text()
WORDS = " ".join(PAGE.split())
LONG = 16384
RECORDS = {4096: ("baselines", "group", "rest", "own"), LONG: ("baselines", "group")}
ONCE = "rest"  # its methods were measured in the first set-up only, or again there
OPTIONS = ("own", "rest", "group", "baselines")  # first set-up, 16,384 tokens: 50 prompts a task, then those with 100
SAME_PAIRS = {f"magicpig bits={bits} tables={tables}" for bits, tables in PRESETS}
AGGREGATION = ("niah_multikey_1", "niah_multikey_3", "cwe", "fwe")
FED = "-fed"  # the question is read by the method


def results(method: str, which: str, rest: str = "", length: int = 4096) -> dict[str, Any]:
    """Task -> a method's result."""
    tasks = record(f"mini-magicpig-{which}{rest}-{length}")["tasks"]
    return {name: task["results"][method] for name, task in tasks.items()}


def methods_of(which: str, length: int = 4096) -> set[str]:
    return set(record(f"mini-magicpig-{which}-{length}")["methods"])


def record_of(method: str, length: int = 4096) -> str:
    return next(name for name in RECORDS[length] if method in methods_of(name, length))


def mean(method: str, rest: str = "", length: int = 4096) -> float:
    """Mean score of the tasks, in percent."""
    scores = [one["score"] for one in results(method, record_of(method, length), rest, length).values()]
    return 100 * sum(scores) / len(scores)


def reads(method: str, length: int = 4096) -> float:
    found = results(method, record_of(method, length), length=length).values()
    return 100 * sum(one["decode_reads"]["total"] for one in found) / len(found)


def worst(method: str, length: int) -> str:
    """The task with the largest loss, and its score."""
    mine, dense = (results(name, record_of(name, length), length=length) for name in (method, "dense"))
    lost = {name: dense[name]["score"] - mine[name]["score"] for name in mine}
    task = max(lost, key=lambda name: lost[name])
    return f"{task} {100 * mine[task]['score']:.1f}%" if lost[task] > 1e-9 else "-"


def scored(method: str) -> Row:
    fed = "-" if record_of(method) == ONCE else f"{mean(method, FED):.1f}%"
    return f"{reads(method):.1f}%", f"{mean(method):.1f}%", fed, worst(method, 4096)


def at_equal_bytes(method: str) -> Row:
    mine, dense = (results(name, "equal-bytes") for name in (method, "dense"))
    total = average(one["decode_reads"]["total"] for one in mine.values())
    lost = {name: dense[name]["score"] - mine[name]["score"] for name in mine}
    task = max(lost, key=lambda name: lost[name])
    shown = f"{task} {100 * mine[task]['score']:.1f}%" if lost[task] > 1e-9 else "-"
    return f"{100 * total:.1f}%", f"{100 * average(one['score'] for one in mine.values()):.1f}%", shown


def scored_long(method: str) -> Row:
    return f"{reads(method, LONG):.1f}%", f"{mean(method, length=LONG):.1f}%", worst(method, LONG)


def first_fifty(method: str, which: str) -> tuple[str, str, str]:
    """Bytes read, mean score and the largest loss, of the first 50 prompts of each task."""
    tasks = record(f"mini-magicpig-{which}-{LONG}")["tasks"]
    mine, dense = (
        {
            name: average(a["score"] for a in task["results"][label]["answers"] if a["number"] < 50)
            for name, task in tasks.items()
        }
        for label in (method, "dense")
    )
    read = average(task["results"][method]["decode_reads"]["total"] for task in tasks.values())
    task = max(mine, key=lambda name: dense[name] - mine[name])
    shown = f"{task} {100 * mine[task]:.1f}%" if dense[task] - mine[task] > 1e-9 else "-"
    return f"{100 * read:.1f}%", f"{100 * average(mine.values()):.1f}%", shown


def both_set_ups(method: str) -> Row:
    """Of 50 prompts: bytes and loss of the first set-up if it was measured, scores of both."""
    first = next((which for which in OPTIONS if method in methods_of(which, LONG)), None)
    fed = first_fifty(method, "fed") if method in methods_of("fed", LONG) else None
    bytes_read, score, lost = first_fifty(method, first) if first else ((fed or ("-",))[0], "-", "-")
    return bytes_read, score, fed[1] if fed else "-", lost


def average(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some)


def sampled(method: str) -> float | None:
    """Percentage of the keys that a group samples in a sparse layer of the aggregation tasks; None without tables."""
    found = [one.get("sampling") for one in results(method, "aggregation", length=LONG).values()]
    return 100 * average(average(one["sampled_group"]) for one in found if one) if any(found) else None


def aggregated(method: str) -> Row:
    """Bytes read, keys that are chosen, and the score of each task."""
    found = results(method, "aggregation", length=LONG)
    total, values = (average(one["decode_reads"][part] for one in found.values()) for part in ("total", "values"))
    share = sampled(method)
    keys = 200 * values if share is None else share  # values are half of dense attention's bytes
    return f"{100 * total:.1f}%", f"{keys:.1f}%", *(f"{100 * found[task]['score']:.1f}%" for task in AGGREGATION)


def read_on(method: str) -> Row:
    found = record("mini-magicpig-perplexity-4096")["results"]
    mine, dense = found[method], found["dense"]["decode"]["nll"]
    over = "-" if method == "dense" else f"{mine['decode']['nll'] - dense:+.3f}"
    return f"{100 * mine['decode_reads']['total']:.1f}%", f"{mine['decode']['perplexity']:.2f}", over


def written(method: str) -> Row:
    mine = record("mini-magicpig-generation-4096")["results"][method]
    low, high = mine["over_dense_interval_95"]
    over = "-" if method == "dense" else f"{low:+.2f} to {high:+.2f}"
    share = mine["decode_reads"]["total"]
    return f"{100 * share:.1f}%", f"{mine['perplexity']:.1f}", over, f"{100 * mine['repeated']:.1f}%"


TABLES = (
    (scored, {label for name in RECORDS[4096] for label in methods_of(name)}),
    (at_equal_bytes, methods_of("equal-bytes")),
    (scored_long, {label for name in RECORDS[LONG] for label in methods_of(name, LONG)}),
    (both_set_ups, {label for name in (*OPTIONS[:-2], "fed") for label in methods_of(name, LONG)} | SAME_PAIRS),
    (aggregated, methods_of("aggregation", LONG)),
    (read_on, methods_of("perplexity")),
    (written, methods_of("generation")),
)


def test_tables_hold_all_of_the_records() -> None:
    found = list(tables(PAGE))
    assert len(found) == len(TABLES)
    for (_, rows), (numbers, methods) in zip(found, TABLES, strict=True):
        assert {name.strip("`") for name, *_ in rows} == methods
        for name, *told in rows:
            assert tuple(told) == numbers(name.strip("`")), name


def test_set_ups() -> None:
    for name in RECORDS[4096]:
        for rest, question in (("", "prefill"), (FED, "decode"))[: 1 if name == ONCE else 2]:
            found = record(f"mini-magicpig-{name}{rest}-4096")
            assert found["config"]["samples"] == 100 and found["config"]["question"] == question
            assert len(found["tasks"]) == 11 and not found["dirty"]
    windows = record("mini-magicpig-perplexity-4096")["config"]
    assert f"{windows['windows']} windows of prose of {windows['length']} tokens" in WORDS
    assert f"the last {windows['decode_tokens']} tokens" in WORDS
    drawn = record("mini-magicpig-generation-4096")["config"]
    assert f"each of {drawn['windows']} windows of {drawn['length']} tokens" in WORDS
    assert f"samples {drawn['steps']} tokens at temperature {drawn['temperature']:g}" in WORDS


def test_set_ups_of_long_prompts() -> None:
    """Prompts are the same in all records of this length, so scores can be paired."""
    expected = dict[str, list[Any]]()
    for name, count in (("baselines", 100), ("group", 100), ("aggregation", 50)):
        found = record(f"mini-magicpig-{name}-{LONG}")
        assert found["config"]["samples"] == count and found["config"]["question"] == "prefill" and not found["dirty"]
        assert tuple(found["tasks"]) == AGGREGATION if count == 50 else len(found["tasks"]) == 11
        for task, entry in found["tasks"].items():
            told = [sample["expected"] for sample in entry["samples"]]
            assert len(told) == count and expected.setdefault(task, told)[:count] == told


def test_sentences() -> None:
    costs = [mean(name) - mean(name, FED) for name in ("magicpig budget=0.1", "magicpig budget=0.05")]
    assert f"{costs[0]:.1f} and {costs[1]:.1f} points at smaller" in WORDS
    alone = "magicpig bits=10 tables=150 dense_layers=[]"
    assert f"is {mean(alone):.1f}% and {mean(alone, FED):.1f}%, at {reads(alone):.0f}% of the bytes" in WORDS
    counts = [
        100 * results(f"oracle_top_k k=0.05{rest}", "baselines")["cwe"]["score"] for rest in (" choose=sample", "")
    ]
    assert f"scores {counts[0]:.1f}% with `choose=sample` and {counts[1]:.1f}% with the largest keys" in WORDS
    redone = [reads(f"magicpig budget=0.1 redo={x}") for x in (0.5, 0.3)]
    assert f"becomes {redone[0]:.0f}% or {redone[1]:.0f}%" in WORDS
    generated = record("mini-magicpig-generation-4096")["results"]
    last = {name: found["by_position"][-1]["nll"] for name, found in generated.items()}
    assert max(last, key=lambda name: last[name]) == "dense"
    assert all(low <= 0 <= high for low, high in (found["over_dense_interval_95"] for found in generated.values()))


def test_dense_layers() -> None:
    """Of each method in the records, and their share of quest's bytes."""
    methods = record("mini-magicpig-equal-bytes-4096")["methods"] | record("mini-magicpig-baselines-4096")["methods"]
    layers = {
        name: {tuple(m["decode"].get("dense_layers") or ()) for m in methods.values() if m["decode"]["name"] == name}
        for name in ("quest", "loki", "oracle_top_k", "oracle_sampling", "kascade")
    }
    assert layers.pop("quest") == {(0, 1)} and set.union(*layers.values()) == {()}
    (equal,) = (name for name in methods if name.startswith("quest k=0.03"))
    read, two = float(at_equal_bytes(equal)[0][:-1]), 200 / 12
    assert (
        f"At equal bytes they take {two:.0f} of its {read:.0f}%. Its other ten layers share {read - two:.0f}%" in WORDS
    )
    assert f"few keys: {100 * methods[equal]['decode']['k']:.1f}%." in WORDS
    assert f"[dense layers](#dense-layers) of `quest` take {two:.0f} of its {reads('quest k=0.05', LONG):.0f}%" in WORDS


def test_pairs_and_options_that_were_measured() -> None:
    """All presets with both ways to share, and other options with one pair."""
    pairs = [f"magicpig bits={bits} tables={tables}" for bits, tables in PRESETS]
    apart = {pair: mean(pair) - mean(f"{pair} share=own") for pair in pairs}
    few = apart.pop("magicpig bits=10 tables=75")
    assert len(apart) == 5 and max(map(abs, apart.values())) <= 0.3
    assert f"with (10, 75) `group` is {few:.1f} points better" in WORDS
    assert {name for name in methods_of("group", LONG) if " tables=" in name} == apart.keys()
    for option in ("dense_layers=[]", "centre=0", "floor=0.999"):
        found = [name for which in ("own", "rest") for name in methods_of(which) if option in name]
        assert found == [f"magicpig bits=10 tables=150 {option}"]


def test_sentences_about_few_tables_and_equal_bytes() -> None:
    pair = "magicpig bits=10 tables=75"
    lost = {task: 100 * (results("dense", "rest")[task]["score"] - results(pair, "rest")[task]["score"])
            for task in ("vt", "niah_multivalue")}  # fmt: skip
    assert f"scores {mean(pair):.1f}% at {reads(pair):.1f}% of the bytes" in WORDS
    assert f"loses {lost['vt']:.0f} points on `vt` and {lost['niah_multivalue']:.0f} on `niah_multivalue`" in WORDS
    scores = [mean(f"magicpig budget=0.1 redo={x}") for x in (0.5, 0.3)]
    assert f"for {scores[0]:.1f}% and {scores[1]:.1f}% of the score" in WORDS
    drawn = "loki choose=sample k=0.12001"
    others = (("loki k=0.122", "worse"), (drawn, ""), ("magicpig", ""))
    assert all(compared(name, "dense", which="equal-bytes", length=4096) == found for name, found in others)
    for name in ("loki k=0.122", drawn):
        assert not compared(name, "magicpig", which="equal-bytes", length=4096)


def test_rows_of_full_lists_are_stated() -> None:
    """Records of that time count them as rows that sampled all keys."""
    full = {
        name: 100 * average(average(task["sampling"]["overflowed"]) for task in found)
        for name in methods_of("aggregation", LONG)
        if "sampling" in (found := list(results(name, "aggregation", length=LONG).values()))[0]
    }
    first, second = (full.pop(f"magicpig bits=10 tables={n} centre=0") for n in (300, 150))
    assert (
        f"{first:.1f}% of the rows with 300 tables and `centre=0`, {second:.1f}% with 150, and at most "
        f"{max(full.values()):.1f}% of the others" in WORDS
    )


def test_the_dtype_of_the_shipped_plan_is_stated() -> None:
    for which in ("group-4096", f"group-{LONG}", "perplexity-4096", "generation-4096"):
        assert record(f"mini-magicpig-{which}")["model"]["dtype"] == "bfloat16"
    assert "its own pairs, which were [chosen for fp32]" in WORDS


def score(task: str, method: str, which: str = "aggregation") -> float:
    """At 16,384 tokens, in percent."""
    return 100 * float(results(method, which, length=LONG)[task]["score"])


def compared(
    one: str, other: str, *tasks: str, which: str = "aggregation", than: str | None = None, length: int = LONG
) -> str:
    """Which of two methods a paired test finds better ("better": one; "": neither). than: the other's record."""
    pairs = list[tuple[float, float]]()
    mine, theirs = results(one, which, length=length), results(other, than or which, length=length)
    for task in tasks or mine:
        scores = [{a["number"]: a["score"] for a in found[task]["answers"]} for found in (mine, theirs)]
        pairs += [(scores[0][number], scores[1][number]) for number in scores[0]]
    return paired(pairs)


def test_sentences_about_long_prompts() -> None:
    tasks = list(results("dense", "group", length=LONG))
    lost = {name: {task: score(task, "dense", "group") - score(task, name, "group") for task in tasks}
            for name in ("magicpig", "magicpig budget=0.1", "magicpig budget=0.05")}  # fmt: skip
    assert max(map(abs, lost["magicpig"].values())) <= 2.0001
    small, least = lost["magicpig budget=0.1"], lost["magicpig budget=0.05"]
    assert f"it loses {small['niah_single_3']:.0f} points on `niah_single_3`" in WORDS
    assert f"{small['vt']:.0f} on `vt` and {small['niah_multivalue']:.1f} on `niah_multivalue`" in WORDS
    assert all(least[task] > 0.45 * score(task, "dense", "group") for task in tasks if task.startswith("niah"))
    assert f"{least['vt']:.0f} points on `vt`" in WORDS
    assert f"it loses {least['cwe']:.1f} and {least['fwe']:.1f} points" in WORDS
    presets = [name for name in methods_of("group", LONG) if " tables=" in name]
    shares = [reads(name, LONG) for name in presets]
    falls = [reads(name) - reads(name, LONG) for name in presets]
    assert f"at {min(shares):.0f}% to {max(shares):.0f}% of the bytes" in WORDS
    assert f"fall by {min(falls):.1f} to {max(falls):.1f} points" in WORDS
    for name in ("magicpig", "magicpig budget=0.1", "magicpig budget=0.05"):
        assert f"from {reads(name):.1f}% to {reads(name, LONG):.1f}%" in WORDS
    whole = [mean("magicpig budget=0.1", length=x) - mean("dense", length=x) for x in (LONG, 4096)]
    assert f"loses {-whole[0]:.1f} points of dense attention's score here and {-whole[1]:.1f} at 4096" in WORDS
    loki, drawn = "loki k=0.05", "loki k=0.05 choose=sample"
    for name, found in ((loki, "worse"), (drawn, "better")):
        assert compared(name, "dense", which="baselines") == found
        assert compared(name, "magicpig", which="baselines", than="group") == found
    gaps = [abs(mean(a, length=LONG) - mean(b, length=LONG)) for a in (loki, drawn) for b in ("dense", "magicpig")]
    assert f"{gaps[0]:.1f} points below dense attention and {gaps[1]:.1f} below `magicpig`" in WORDS
    assert f"above both: {gaps[2]:.1f} and {gaps[3]:.1f} points" in WORDS
    assert not any(compared(name, "dense", which="group") for name in ("magicpig", *presets))
    for name in ("quest", "kascade"):
        assert f"{mean(f'{name} k=0.05', length=LONG):.1f}% at {reads(f'{name} k=0.05', LONG):.1f}%" in WORDS


def test_options_at_long_prompts() -> None:
    """The sentences on options and on questions read by the method, of 50 prompts."""
    for which, question in (("own", "prefill"), ("rest", "prefill"), ("fed", "decode")):
        found = record(f"mini-magicpig-{which}-{LONG}")
        assert found["config"]["samples"] == 50 and found["config"]["question"] == question and not found["dirty"]
        assert len(found["tasks"]) == 11
    shown = {name: both_set_ups(name) for name in methods_of("fed", LONG) | methods_of("rest", LONG)}
    eight, bare = (f"magicpig bits=8 tables=75 dense_layers=[]{x}" for x in ("", " centre=0"))
    assert f"scores {shown[eight][2]}, and {shown[bare][2]} without centring" in WORDS
    assert f"Dense attention scores {shown['dense'][2]}" in WORDS
    assert not any(compared(name, "dense", which="fed") for name in (eight, bare))
    cheap, few = "magicpig bits=10 tables=150 dense_layers=[]", "magicpig bits=10 tables=75"
    assert f"reads {shown[cheap][0]} of the bytes** and scores {shown[cheap][1]}" in WORDS
    assert not compared(cheap, "dense", which="rest")
    assert f"{shown[few][2]} instead of {shown[few][1]}" in WORDS
    both = {name: next(w for w in OPTIONS if name in methods_of(w, LONG)) for name in methods_of("fed", LONG) - {bare}}
    changed = {name: compared(name, name, which="fed", than=first) for name, first in both.items()}
    assert {name for name, found in changed.items() if found} == {few} and changed[few] == "worse"
    apart = dict[str, float]()
    for pair in SAME_PAIRS:
        first = "rest" if pair == few else "group"
        scores = [float(first_fifty(*of)[1][:-1]) for of in ((pair, first), (f"{pair} share=own", "own"))]
        apart[pair] = round(scores[0] - scores[1], 1)
        assert bool(compared(f"{pair} share=own", pair, which="own", than=first)) == (pair == few)
    assert f"`group` is {apart.pop(few)} points better" in WORDS
    assert f"differ by at most {max(map(abs, apart.values()))} points" in WORDS
    plain, redone = "magicpig bits=10 tables=150", "magicpig budget=0.1 redo=0.5"
    told = [both_set_ups(f"{plain}{x}")[1] for x in (" centre=0", " floor=0.999", "")]
    assert f"`centre=0` scores {told[0]} and `floor=0.999` {told[1]} with (10, 150), which scores {told[2]}" in WORDS
    assert not any(compared(f"{plain}{x}", plain, which="rest", than="group") for x in (" centre=0", " floor=0.999"))
    assert f"to {shown[redone][0]} of the bytes, for {shown[redone][1]} of the score" in WORDS


def test_sentences_about_aggregation() -> None:
    shares = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
    oracles = {k: (f"oracle_sampling k={k} draw=systematic", f"oracle_top_k k={k}") for k in shares}
    better = {task: [k for k in shares if compared(*oracles[k], task)] for task in AGGREGATION}
    assert better == {
        "niah_multikey_1": [],
        "niah_multikey_3": [],
        "cwe": [0.002, 0.005],
        "fwe": [0.002, 0.005, 0.01, 0.02],
    }
    few = {task: score(task, "dense") - score(task, "oracle_top_k k=0.002") for task in AGGREGATION}
    assert [f"{loss:.0f}" for loss in few.values()] == ["0", "4", "7", "20"]
    assert f"`fwe` loses {few['fwe']:.0f} and `cwe` {few['cwe']:.0f}" in WORDS
    pig, top = "magicpig bits=10 tables=75", "oracle_top_k k=0.02"
    assert compared(pig, top, "fwe") == "better" and not compared(pig, top, "cwe")
    assert f"A sample of {sampled(pig):.1f}% of the keys (75 tables) scores {score('fwe', pig):.1f}% on `fwe`" in WORDS
    centred = {(n, task): compared(f"magicpig bits=10 tables={n}", f"magicpig bits=10 tables={n} centre=0", task)
               for n in (25, 75, 150, 300) for task in AGGREGATION}  # fmt: skip
    assert {case: found for case, found in centred.items() if found} == {(25, "niah_multikey_3"): "worse"}
    few_tables = (f"magicpig bits=10 tables=25{x}" for x in ("", " centre=0"))
    mine, bare = (results(name, "aggregation", length=LONG)["niah_multikey_3"]["sampling"] for name in few_tables)
    assert {*range(12)} - {*mine["layers"]} == {0, 6}
    ratios = {
        layer: b / a for layer, a, b in zip(mine["layers"], mine["sampled_head"], bare["sampled_head"], strict=True)
    }
    assert [layer for layer, ratio in ratios.items() if ratio > 2] == [4, 8]
    assert len([layer for layer, ratio in ratios.items() if ratio < 1]) == 7
