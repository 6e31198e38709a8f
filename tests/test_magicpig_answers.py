"""Tables and sentences of docs/magicpig/answers.md are those of the records that it names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from longreach.methods.magicpig import PRESETS
from longreach.records.report.rows import paired
from tests.doc_tables import ROOT, Row, record, section, tables

PAGE = (ROOT / "docs" / "magicpig" / "answers.md").read_text()
WORDS = " ".join(PAGE.split())
LONG = 16384
LENGTHS = (4096, LONG)
LONG_WORDS = " ".join(section(PAGE, "RULER at 16,384 tokens", "Aggregation at 16,384 tokens (Figures 1 and 8)").split())
RECORDS = ("baselines", "group", "rest", "own")
AGGREGATION = ("niah_multikey_1", "niah_multikey_3", "cwe", "fwe")
FED = "-fed"  # the question is read by the method
BOTH = ("", FED)
PAIRS = [f"magicpig bits={bits} tables={tables}" for bits, tables in PRESETS]
FEW = "magicpig bits=10 tables=75"
FIVE = [pair for pair in PAIRS if pair != FEW]
PLAN = " plan=kascade-longreach-mini-0-4"  # newer records name it in the label


def results(method: str, which: str, rest: str = "", length: int = 4096) -> dict[str, Any]:
    """Task -> a method's result."""
    tasks = record(f"mini-magicpig-{which}{rest}-{length}")["tasks"]
    return {name: task["results"].get(method) or task["results"][method + PLAN] for name, task in tasks.items()}


def methods_of(which: str, length: int = 4096) -> set[str]:
    return {label.removesuffix(PLAN) for label in record(f"mini-magicpig-{which}-{length}")["methods"]}


def record_of(method: str, length: int = 4096) -> str:
    return next(name for name in RECORDS if method in methods_of(name, length))


def average(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some)


def mean(method: str, rest: str = "", length: int = 4096) -> float:
    """Mean score of the tasks, in percent."""
    return 100 * average(one["score"] for one in results(method, record_of(method, length), rest, length).values())


def reads(method: str, length: int = 4096, rest: str = "") -> float:
    found = results(method, record_of(method, length), rest, length).values()
    return 100 * average(one["decode_reads"]["total"] for one in found)


def losses(method: str, rest: str = "", length: int = 4096) -> dict[str, float]:
    """Points that a method loses on each task against dense attention of the same record."""
    which = record_of(method, length)
    mine, dense = (results(name, which, rest, length) for name in (method, "dense"))
    return {task: 100 * (dense[task]["score"] - mine[task]["score"]) for task in mine}


def largest(dense: dict[str, float], mine: dict[str, float]) -> str:
    """The task with the largest loss, and its score. Scores are in percent."""
    task = max(mine, key=lambda name: dense[name] - mine[name])
    return f"{task} {mine[task]:.1f}%" if dense[task] - mine[task] > 1e-7 else "-"


def scored(method: str, length: int) -> Row:
    which = record_of(method, length)
    mine, dense = (
        {task: 100 * one["score"] for task, one in results(name, which, length=length).items()}
        for name in (method, "dense")
    )
    first, second = (f"{mean(method, rest, length):.1f}%" for rest in BOTH)
    return f"{reads(method, length):.1f}%", first, second, largest(dense, mine)


def at_equal_bytes(method: str, length: int = 4096) -> Row:
    found = results(method, "equal-bytes", length=length)
    mine, dense = (
        {task: 100 * one["score"] for task, one in results(name, "equal-bytes", length=length).items()}
        for name in (method, "dense")
    )
    total = average(one["decode_reads"]["total"] for one in found.values())
    return f"{100 * total:.1f}%", f"{average(mine.values()):.1f}%", largest(dense, mine)


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


ALL = {length: {label for name in RECORDS for label in methods_of(name, length)} for length in LENGTHS}
TABLES = (
    (partial(scored, length=4096), ALL[4096]),
    (at_equal_bytes, methods_of("equal-bytes")),
    (partial(scored, length=LONG), ALL[LONG]),
    (partial(at_equal_bytes, length=LONG), methods_of("equal-bytes", LONG)),
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
    for length in LENGTHS:
        for name in RECORDS:
            for rest, question in zip(BOTH, ("prefill", "decode"), strict=True):
                found = record(f"mini-magicpig-{name}{rest}-{length}")
                assert found["config"]["samples"] == 100 and found["config"]["question"] == question
                assert len(found["tasks"]) == 11 and not found["dirty"]
                assert methods_of(name, length) == methods_of(f"{name}{rest}", length)
    windows = record("mini-magicpig-perplexity-4096")["config"]
    assert f"{windows['windows']} windows of prose of {windows['length']} tokens" in WORDS
    assert f"the last {windows['decode_tokens']} tokens" in WORDS
    drawn = record("mini-magicpig-generation-4096")["config"]
    assert f"each of {drawn['windows']} windows of {drawn['length']} tokens" in WORDS
    assert f"samples {drawn['steps']} tokens at temperature {drawn['temperature']:g}" in WORDS


def test_set_ups_of_long_prompts() -> None:
    """Prompts are the same in all records of this length, so scores can be paired."""
    expected = dict[str, list[Any]]()
    names = [*(f"{name}{rest}" for name in RECORDS for rest in BOTH), "aggregation"]
    batches = dict[str, int]()
    for name in names:
        found = record(f"mini-magicpig-{name}-{LONG}")
        count = 50 if name == "aggregation" else 100
        assert found["config"]["samples"] == count and not found["dirty"]
        assert found["config"]["question"] == ("decode" if "fed" in name else "prefill")
        assert tuple(found["tasks"]) == AGGREGATION if name == "aggregation" else len(found["tasks"]) == 11
        for task, entry in found["tasks"].items():
            told = [sample["expected"] for sample in entry["samples"]]
            assert len(told) == count and expected.setdefault(task, told)[:count] == told
        batches[name] = found["config"]["batch"]
    assert {name for name in names[:-1] if batches[name] == 25} == {"baselines", "group"}
    assert {batches[name] for name in names[:-1]} == {25, 50}
    newer = {f"{100 * average(one['score'] for one in results('dense', name, length=LONG).values()):.1f}"
             for name in ("own", "rest")}  # fmt: skip
    assert newer == {"95.1"} and "Dense attention scores 95.1% in `own` and `rest` of the first set-up" in LONG_WORDS
    again, once = results(FEW, "aggregation", length=LONG), results(FEW, "rest", length=LONG)
    apart = 100 * average(one["score"] - average(a["score"] for a in once[task]["answers"] if a["number"] < 50)
                          for task, one in again.items())  # fmt: skip
    assert f"(10, 75) scores {apart:.1f} points less in `rest` than on the same prompts of [aggregation]" in LONG_WORDS
    assert not compared(FEW, FEW, which="aggregation", than="rest")
    hard = [100 * results("dense", "baselines", length=x)["niah_multikey_2"]["score"] for x in (LONG, 4096)]
    assert f"dense attention scores {hard[0]:.1f}%, and {hard[1]:.1f}% at 4096" in LONG_WORDS


def test_sentences() -> None:
    costs = [mean(name) - mean(name, FED) for name in ("magicpig budget=0.1", "magicpig budget=0.05")]
    assert f"{costs[0]:.1f} and {costs[1]:.1f} points at smaller" in WORDS
    found = [asked(f"magicpig{budget}", 4096) for budget in ("", " budget=0.1", " budget=0.05")]
    assert found == ["", "worse", "worse"]
    below = mean("dense") - mean("magicpig")
    assert f"The shipped plan scores {mean('magicpig'):.1f}%, {below:.1f} points below dense attention" in WORDS
    assert [against("magicpig", "dense", rest=rest, length=4096) for rest in BOTH] == ["worse", ""]
    assert "more than chance here, but not when it reads the question, nor in the run [at equal bytes]" in WORDS
    alone = "magicpig bits=10 tables=150 dense_layers=[]"
    assert f"it scores {mean(alone):.1f}% and {mean(alone, FED):.1f}%, at {reads(alone):.0f}% of the bytes" in WORDS
    more = (FEW, f"{FEW} share=own", "magicpig bits=8 tables=75 share=own")
    told = [mean(name) - mean(name, FED) for name in more]
    assert (
        f"(10, 75) loses {told[0]:.1f} points with `group` and {told[1]:.1f} with `own`, and (8, 75) with `own` "
        f"{told[2]:.1f}. All five losses are more than chance." in WORDS
    )
    pigs = {name: found for name in ALL[4096] if name.startswith("magicpig") and (found := asked(name, 4096))}
    assert pigs == dict.fromkeys(("magicpig budget=0.1", "magicpig budget=0.05", *more), "worse")
    counts = [
        100 * results(f"oracle_top_k k=0.05{rest}", "baselines")["cwe"]["score"] for rest in (" choose=sample", "")
    ]
    assert f"scores {counts[0]:.1f}% with `choose=sample` and {counts[1]:.1f}% with the largest keys" in WORDS
    redone = [reads(f"magicpig budget=0.1 redo={x}") for x in (0.5, 0.3)]
    assert f"becomes {redone[0]:.0f}% or {redone[1]:.0f}%" in WORDS
    assert f"The plan of 20% scores {mean('magicpig'):.1f}% at {reads('magicpig'):.0f}%" in WORDS
    half, third = (f"magicpig budget=0.1 redo={x}" for x in (0.5, 0.3))
    told = [f"{mean(name, FED):.1f}% at {reads(name, rest=FED):.0f}%" for name in (half, third)]
    assert f"When `redo` reads the question, it scores {told[0]} and {told[1]}" in WORDS
    for rest in BOTH:
        assert against(half, "magicpig", rest=rest, length=4096) == "worse"
        assert not against(third, "magicpig", rest=rest, length=4096)
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
    apart = {(pair, rest): mean(pair, rest) - mean(f"{pair} share=own", rest) for pair in PAIRS for rest in BOTH}
    few = [apart.pop((FEW, rest)) for rest in BOTH]
    assert f"they differ by at most {max(map(abs, apart.values())):.1f} points in either set-up" in WORDS
    assert f"With (10, 75) `group` is better in both set-ups, by {few[0]:.1f} and {few[1]:.1f} points" in WORDS
    assert all(against(FEW, f"{FEW} share=own", rest=rest, length=4096) == "better" for rest in BOTH)
    found = {case: against(case[0], f"{case[0]} share=own", rest=case[1], length=4096) for case in apart}
    assert {case: x for case, x in found.items() if x} == {("magicpig bits=8 tables=75", FED): "better"}
    assert {name for name in methods_of("group", LONG) if " tables=" in name} == {*FIVE}
    for option in ("dense_layers=[]", "centre=0", "floor=0.999"):
        found = [name for which in ("own", "rest") for name in methods_of(which) if option in name]
        assert found == [f"magicpig bits=10 tables=150 {option}"]
    plain = "magicpig bits=10 tables=150"
    centred, flat = (
        [mean(f"{plain} {option}", rest) - mean(plain, rest) for rest in BOTH] for option in ("centre=0", "floor=0.999")
    )
    assert f"It scores {centred[0]:.1f} points more, and {centred[1]:.1f} when it reads the question" in WORDS
    assert f"It differs by {abs(flat[0]):.1f} and {abs(flat[1]):.1f} points" in WORDS
    for option, better in (("centre=0", "better"), ("floor=0.999", "")):
        assert all(against(f"{plain} {option}", plain, rest=rest, length=4096) == better for rest in BOTH)


def test_redo_is_of_current_error_bars() -> None:
    """Older records of 4096 tokens hold `redo` too, with other error bars, so with other results."""
    redone = {f"magicpig budget=0.1 redo={x}" for x in (0.5, 0.3)}
    for length in LENGTHS:
        assert {name for name in ALL[length] if "redo=" in name} == redone <= methods_of("rest", length)
    for name in redone:
        for rest in BOTH:
            mine, older = (
                average(one["decode_reads"]["total"] for one in results(name, which, rest).values())
                for which in ("rest", "own")
            )
            assert mine != older
        assert all(reads(name, length, FED) < reads(name, length) - 1 for length in LENGTHS)
    most = max(abs(reads(x, n, FED) - reads(x, n)) for n in LENGTHS for x in ALL[n] - redone)
    assert f"In the second one bytes differ by at most {most:.1f} points, but `redo` reads less." in WORDS
    assert "Rows of `redo` are of `rest`. The records `own` and `own-fed` of 4096 tokens have them too" in WORDS


def test_equal_bytes_at_long_prompts() -> None:
    assert "Equal bytes were measured in this set-up only." in WORDS
    found = {length: record(f"mini-magicpig-equal-bytes-{length}") for length in LENGTHS}
    assert {one["config"]["question"] for one in found.values()} == {"prefill"}
    (why,) = found[LONG]["equal_bytes"]["unreachable"].values()
    assert "reads 22.0% of dense attention's bytes with its least" in why and "its least is 22.0%" in WORDS
    scores = {name: float(at_equal_bytes(name, LONG)[1][:-1]) for name in methods_of("equal-bytes", LONG)}
    plain, drawn = sorted((name for name in scores if name.startswith("loki")), key=len)
    (blocks,) = (name for name in scores if name.startswith("quest"))
    apart = partial(compared, which="equal-bytes")
    assert not apart("magicpig", "dense") and not apart(plain, "magicpig")
    assert apart(plain, "dense") == "worse" and apart(drawn, "dense") == apart(drawn, "magicpig") == "better"

    def points(one: str, other: str) -> str:
        means = (
            average(x["score"] for x in results(name, "equal-bytes", length=LONG).values()) for name in (one, other)
        )
        return f"{100 * (next(means) - next(means)):.1f} points"

    assert f"the {points('dense', 'magicpig')} between them are chance" in WORDS
    assert (
        f"{points(drawn, 'dense')} above dense attention and {points(drawn, 'magicpig')[:3]} above `magicpig`" in WORDS
    )
    assert f"Without samples it is {points('dense', plain)} below dense attention" in WORDS
    share, _, loses = at_equal_bytes(blocks, LONG)
    read = f"{mean('quest k=0.05', length=LONG):.1f}% at {reads('quest k=0.05', LONG):.1f}% with them"
    assert (
        f"{scores[blocks]}% at {share} of the bytes, and {read}" in WORDS
        and f"`niah_multikey_3` {loses[-5:]}." in WORDS
    )
    lost = results("kascade k=0.067", "equal-bytes", length=LONG)
    assert (
        f"chains (`vt` {100 * lost['vt']['score']:.1f}%) and counts (`fwe` {100 * lost['fwe']['score']:.1f}%)" in WORDS
    )
    assert f"where it attends to {100 * found[LONG]['methods'][blocks]['decode']['k']:.1f}%" in WORDS


def test_sentences_about_few_tables_and_equal_bytes() -> None:
    lost = losses(FEW)
    assert f"scores {mean(FEW):.1f}% at {reads(FEW):.1f}% of the bytes" in WORDS
    more = losses(FEW, FED)
    assert (
        f"loses {lost['vt']:.0f} points on `vt` and {lost['niah_multivalue']:.0f} on `niah_multivalue`, and "
        f"{more['vt']:.0f} and {more['niah_multivalue']:.0f} when it reads the question" in WORDS
    )
    scores = [mean(f"magicpig budget=0.1 redo={x}") for x in (0.5, 0.3)]
    assert f"for scores of {scores[0]:.1f}% and {scores[1]:.1f}%" in WORDS
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
        pairs += [(scores[0][number], scores[1][number]) for number in scores[0] if number in scores[1]]
    return paired(pairs)


def against(one: str, other: str, *tasks: str, rest: str = "", length: int = LONG) -> str:
    """The same of two methods of the page's tables. Dense attention is that of the first one's record."""
    which = record_of(one, length)
    than = which if other == "dense" else record_of(other, length)
    return compared(one, other, *tasks, which=which + rest, than=than + rest, length=length)


def asked(method: str, length: int = LONG, *tasks: str) -> str:
    """Whether the second set-up is better or worse for a method."""
    which = record_of(method, length)
    return compared(method, method, *tasks, which=which + FED, than=which, length=length)


def long(method: str, rest: str = "") -> str:
    return f"{mean(method, rest, LONG):.1f}%"


def gap(one: str, other: str, rest: str = "") -> float:
    return mean(one, rest, LONG) - mean(other, rest, LONG)


def test_shares_of_the_bytes_at_long_prompts() -> None:
    """What is kept at each share."""
    assert f"It scores {long('magicpig')}, dense attention {long('dense')}" in LONG_WORDS
    assert f"it scores {long('magicpig', FED)}, and dense attention {long('dense', FED)}" in LONG_WORDS
    most = max(loss for rest in BOTH for loss in losses("magicpig", rest, LONG).values())
    assert f"No task loses more than {most:.1f} points in either set-up" in LONG_WORDS
    presets = [f"{pair}{share}" for pair in FIVE for share in ("", " share=own")]
    assert not any(against(name, "dense", rest=rest) for name in ("magicpig", *presets) for rest in BOTH)
    shares = [reads(name, LONG) for name in presets]
    assert f"at {min(shares):.0f}% to {max(shares):.0f}% of the bytes" in LONG_WORDS
    lost = {(name, rest, task): loss for name in presets for rest in BOTH
            for task, loss in losses(name, rest, LONG).items()}  # fmt: skip
    worst = max(lost, key=lambda case: lost[case])
    assert worst == ("magicpig bits=10 tables=150", "", "niah_single_3")
    assert f"largest loss on a task is {lost[worst]:.1f} points: (10, 150)" in LONG_WORDS
    eight, bare, cheap = (
        f"magicpig {options}"
        for options in (
            "bits=8 tables=75 dense_layers=[]",
            "bits=8 tables=75 dense_layers=[] centre=0",
            "bits=10 tables=150 dense_layers=[]",
        )
    )
    told = reads(eight, LONG), reads("magicpig bits=8 tables=75", LONG)
    assert f"reads {told[0]:.1f}% of the bytes instead of {told[1]:.1f}%, and scores {long(eight)}" in LONG_WORDS
    assert f"it reads {reads(bare, LONG):.1f}% and scores {long(bare)}" in LONG_WORDS
    assert f"When they read the question, they score {long(eight, FED)} and {long(bare, FED)}" in LONG_WORDS
    assert not any(against(name, "dense", rest=rest) for name in (eight, bare) for rest in BOTH)
    lost_cheap = losses(cheap, length=LONG)
    assert f"scores {long(cheap)} at {reads(cheap, LONG):.1f}% of the bytes" in LONG_WORDS
    assert f"**{reads(cheap, LONG):.0f}% of the bytes lose" in LONG_WORDS
    more = average(losses(cheap, FED, LONG).values())
    below = (
        f"{average(lost_cheap.values()):.1f} points below dense attention, and {more:.1f} when it reads the question"
    )
    assert below in LONG_WORDS
    assert all(against(cheap, "dense", rest=rest) == "worse" for rest in BOTH)
    assert f"loses {lost_cheap['niah_single_3']:.1f} points on `niah_single_3` and {lost_cheap['vt']:.1f}" in LONG_WORDS


def test_budgets_at_long_prompts() -> None:
    small, least = (losses(f"magicpig budget={budget}", length=LONG) for budget in (0.1, 0.05))
    name = "magicpig budget=0.1"
    assert f"`budget=0.1` scores {long(name)} at {reads(name, LONG):.1f}% of the bytes" in LONG_WORDS
    assert f"loses {small['niah_single_3']:.0f} points on `niah_single_3`" in LONG_WORDS
    assert f"{small['vt']:.0f} on `vt` and {small['niah_multivalue']:.1f} on `niah_multivalue`" in LONG_WORDS
    dense = results("dense", "group", length=LONG)
    assert all(loss > 45 * dense[task]["score"] for task, loss in least.items() if task.startswith("niah"))
    assert f"{least['vt']:.0f} points on `vt`" in LONG_WORDS
    assert f"it loses {least['cwe']:.1f} and {least['fwe']:.1f} points" in LONG_WORDS
    falls = [reads(pair) - reads(pair, LONG) for pair in FIVE]
    assert f"fall by {min(falls):.1f} to {max(falls):.1f} points" in LONG_WORDS
    for name in ("magicpig", "magicpig budget=0.1", "magicpig budget=0.05"):
        assert f"from {reads(name):.1f}% to {reads(name, LONG):.1f}%" in LONG_WORDS
    whole = [mean("magicpig budget=0.1", length=x) - mean("dense", length=x) for x in (LONG, 4096)]
    assert f"loses {-whole[0]:.1f} points of dense attention's score here and {-whole[1]:.1f} at 4096" in LONG_WORDS
    steps = ["magicpig budget=0.1", *(f"magicpig budget=0.1 redo={x}" for x in (0.5, 0.3)), "magicpig"]
    for rest in BOTH:
        for step, other in zip(steps[1:], steps, strict=False):
            assert against(step, other, rest=rest) == "better"
        assert against(steps[1], "magicpig", rest=rest) == against(steps[2], "magicpig", rest=rest) == "worse"
    told = [f"{long(name, FED)} at {reads(name, LONG, FED):.1f}%" for name in steps[1:3]]
    assert f"When they read the question, it is {told[0]} and {told[1]}" in LONG_WORDS
    assert f"`redo=0.5` scores {long(steps[1])} at {reads(steps[1], LONG):.1f}%" in LONG_WORDS
    assert f"`redo=0.3` scores {long(steps[2])} at {reads(steps[2], LONG):.1f}%" in LONG_WORDS
    assert f"plan, which scores {long('magicpig')} at {reads('magicpig', LONG):.1f}%" in LONG_WORDS


def test_pairs_and_options_at_long_prompts() -> None:
    apart = list[float]()
    for pair in FIVE:
        for rest in BOTH:
            apart.append(gap(pair, f"{pair} share=own", rest))
            assert not against(pair, f"{pair} share=own", rest=rest)
    assert f"differ by at most {max(map(abs, apart)):.1f} points in either set-up" in LONG_WORDS
    own = f"{FEW} share=own"
    told = [gap(FEW, own, rest) for rest in BOTH]
    chains = [losses(own, rest, LONG)["vt"] - losses(FEW, rest, LONG)["vt"] for rest in BOTH]
    assert f"`group` is better by {told[0]:.1f} and {told[1]:.1f} points" in LONG_WORDS
    assert f"On `vt` it is better by {chains[0]:.1f} and {chains[1]:.1f}" in LONG_WORDS
    assert all(against(FEW, own, *tasks, rest=rest) == "better" for tasks in ((), ("vt",)) for rest in BOTH)
    for pair in PAIRS:
        assert abs(reads(pair, LONG) - reads(f"{pair} share=own", LONG)) < 0.05
    lost = losses(FEW, length=LONG)
    assert f"It scores {long(FEW)} at {reads(FEW, LONG):.1f}% of the bytes" in LONG_WORDS
    more = losses(FEW, FED, LONG)
    assert (
        f"loses {lost['vt']:.0f} points on `vt` and {lost['niah_single_3']:.0f} on `niah_single_3`, and "
        f"{more['vt']:.0f} and {more['niah_single_3']:.0f} when it reads the question" in LONG_WORDS
    )
    assert all(against(FEW, "dense", rest=rest) == "worse" for rest in BOTH)
    plain, eight = "magicpig bits=10 tables=150", "magicpig bits=8 tables=75 dense_layers=[]"
    told = [gap(f"{name} centre=0", name, rest) for name in (plain, eight) for rest in BOTH]
    assert (
        "`centre=0` is {:.1f} and {:.1f} points better with (10, 150), and {:.1f} and {:.1f} with (8, 75) and "
        "`dense_layers=[]`".format(*told)
        in LONG_WORDS
    )
    assert not any(against(f"{name} centre=0", name, rest=rest) for name in (plain, eight) for rest in BOTH)
    assert against(f"{eight} centre=0", eight, "fwe") == "worse"
    assert not against(f"{eight} centre=0", eight, "fwe", rest=FED)
    less = score("fwe", eight, f"rest{FED}") - score("fwe", f"{eight} centre=0", f"rest{FED}")
    assert f"In the second set-up the {less:.1f} points between them are chance" in LONG_WORDS
    counts = [score("fwe", f"{eight}{x}", "rest") for x in (" centre=0", "")]
    assert f"on `fwe` the latter scores {counts[0]:.1f}%, and {counts[1]:.1f}% with centring" in LONG_WORDS
    flat = f"{plain} floor=0.999"
    assert f"(10, 150) scores {long(flat)}, {gap(flat, plain):.1f} points more" in LONG_WORDS
    assert against(flat, plain) == "better"
    assert not any(against(flat, plain, task) for task in results(flat, "rest", length=LONG))
    assert not against(flat, plain, rest=FED)
    assert f"reads the question, the {gap(flat, plain, FED):.1f} points between them are chance" in LONG_WORDS


def test_other_methods_at_long_prompts() -> None:
    top, drawn = "loki k=0.05", "loki k=0.05 choose=sample"
    for name, found in ((top, "worse"), (drawn, "better")):
        assert against(name, "dense") == against(name, "magicpig") == found
        kept = "" if name == top else "better"
        assert against(name, "dense", rest=FED) == against(name, "magicpig", rest=FED) == kept
    gaps = [abs(gap(a, b)) for a in (top, drawn) for b in ("dense", "magicpig")]
    assert f"At {reads(top, LONG):.1f}% of the bytes it scores {long(top)}, {gaps[0]:.1f} points below" in LONG_WORDS
    assert f"dense attention and {gaps[1]:.1f} below `magicpig`" in LONG_WORDS
    assert f"it scores {long(drawn)}, above both: {gaps[2]:.1f} and {gaps[3]:.1f} points" in LONG_WORDS
    fed = [gap(drawn, name, FED) for name in ("dense", "magicpig")]
    assert f"the two gains are {fed[0]:.1f} and {fed[1]:.1f} points" in LONG_WORDS
    counts = [score("cwe", name, f"baselines{rest}") for rest in BOTH for name in (drawn, top)]
    assert f"`cwe`: {counts[0]:.1f}% instead of {counts[1]:.1f}%" in LONG_WORDS
    assert f"{counts[2]:.1f}% instead of {counts[3]:.1f}% with the question" in LONG_WORDS
    assert all(compared(drawn, top, "cwe", which=f"baselines{rest}") == "better" for rest in BOTH)
    for name in ("quest", "kascade"):
        assert f"{long(f'{name} k=0.05')} at {reads(f'{name} k=0.05', LONG):.1f}%" in LONG_WORDS
    assert f"`quest` scores {score('niah_multikey_3', 'quest k=0.05', 'baselines'):.1f}%" in LONG_WORDS
    assert f"`kascade` {score('vt', 'kascade k=0.05', 'baselines'):.1f}% on `vt`" in LONG_WORDS


def test_questions_read_by_the_method_at_long_prompts() -> None:
    """Which methods lose more than chance, and where."""
    methods = sorted(ALL[LONG] - {"dense"})
    costs = {name: mean(name, length=LONG) - mean(name, FED, LONG) for name in methods}
    changed = {name: found for name in methods if (found := asked(name))}
    own, least, cascade = f"{FEW} share=own", "magicpig budget=0.05", "kascade k=0.05"
    gained = "magicpig bits=10 tables=150"
    assert changed.pop(gained) == "better" and not asked("dense")
    lost = {"magicpig", least, FEW, own, cascade, f"{cascade} choose=sample"}
    assert changed == dict.fromkeys(lost, "worse")
    assert f"finds {len(changed) + 1} changes in {len(methods)} methods, of which one or two are" in LONG_WORDS
    assert 1 < 0.05 * len(methods) < 2
    assert not against("magicpig", "dense", rest=FED)
    assert f"a gain: {-costs[gained]:.1f} points for (10, 150)" in LONG_WORDS
    options = [x for x in methods if any(option in x for option in ("dense_layers=[]", "centre=0", "floor"))]
    assert len(options) == 5 and not any(map(asked, options))
    near = [*FIVE, *(f"{pair} share=own" for pair in FIVE), *options]
    near += [x for x in methods if x.startswith(("loki", "oracle"))]
    assert f"changes by at most {max(abs(costs[name]) for name in near):.1f} points" in LONG_WORDS
    assert f"The shipped plan loses {costs['magicpig']:.1f}, more than chance" in LONG_WORDS
    told = [costs[name] for name in (least, FEW, own, cascade, f"{cascade} choose=sample")]
    assert (
        f"loses {told[0]:.1f} points, (10, 75) {told[1]:.1f} with `group` and {told[2]:.1f} with `own`, and `kascade` "
        f"{told[3]:.1f}, or {told[4]:.1f} with samples" in LONG_WORDS
    )
    small, quest = "magicpig budget=0.1", "quest k=0.05"
    assert f"The {costs[small]:.1f} points of `budget=0.1` and the {costs[quest]:.1f} of `quest`" in LONG_WORDS
    redone = [f"{small} redo={x}" for x in (0.5, 0.3)]
    told = [costs[name] for name in redone]
    assert f"So are {told[0]:.1f} points of `redo=0.5` and {told[1]:.1f} of `redo=0.3`" in LONG_WORDS
    falls = dict[tuple[str, str], float]()
    for name in methods:
        first, second = (results(name, record_of(name, LONG), rest, LONG) for rest in BOTH)
        falls |= {(name, task): 100 * (first[task]["score"] - second[task]["score"]) for task in first}
    similar, drawn = "niah_multikey_2", f"{cascade} choose=sample"
    seven = [(name, similar) for name in (quest, least, drawn, small, redone[0])]
    seven += [(least, "niah_multikey_3"), (drawn, "vt")]
    assert {*sorted(falls, key=lambda case: -falls[case])[:7]} == {*seven}
    assert all(asked(name, LONG, task) == "worse" for name, task in seven)
    assert (
        "On `{}`, `quest` loses {:.0f} points, `budget=0.05` {:.0f}, `kascade` with samples {:.0f}, and `budget=0.1` "
        "{:.0f}, or {:.0f} with `redo=0.5`. `budget=0.05` also loses {:.0f} on `niah_multikey_3`, and `kascade` with "
        "samples {:.0f} on `vt`".format(similar, *(falls[case] for case in seven))
        in LONG_WORDS
    )


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
