"""The tables of docs/magicpig/README.md that hold measurements are those of the record it names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from longreach.methods.magicpig import PRESETS, MagicPIG
from longreach.methods.magicpig.method import HASHED
from longreach.methods.magicpig.plan import KIND, MagicPIGPlan, chosen_for
from longreach.methods.registry import names
from longreach.plans import load, shipped
from longreach.records.labels import short_label
from tests.doc_tables import ROOT, Row, record, section, tables

PAGE = (ROOT / "docs" / "magicpig" / "README.md").read_text()
FIGURES = (ROOT / "docs" / "magicpig" / "figures.md").read_text()
LENGTHS = (4096, 16384)  # of RULER's prompts
BUDGETS = {"5%": "magicpig budget=0.05", "10%": "magicpig budget=0.1", "20%": "magicpig", "40%": "magicpig budget=0.4"}
BARS = tuple(f"mini-error-bars-{name}" for name in ("1024", "4096", "8192", "16384-fwe", "16384-niah"))
REDONE = "magicpig bits=10 tables=75 dense_layers=[]"


def measured(method: str) -> Row:
    """Bytes read, error of the sparse layers, and KL."""
    options = set(method.split())
    (result,) = (
        r
        for label, r in record("mini-magicpig-fidelity")["results"].items()
        if set(short_label(label).split()) == options
    )
    means = [sum(layer) / len(layer) for layer in result["layer_error"]["mean"]]
    sparse = [mean for mean in means if mean > 0]
    return f"{100 * result['decode_reads']['total']:.1f}%", f"{sum(sparse) / len(sparse):.3f}", f"{result['kl']:.3f}"


def budgeted(name: str) -> Row:
    """Bytes read of the record of fidelity, of prose at 4096 tokens, and of RULER at both lengths."""
    method = BUDGETS[name]
    known = method in record("mini-magicpig-group-4096")["methods"]
    return measured(method)[0], on_prose(method), *(answered(method, n)[0] if known else "-" for n in LENGTHS)


def on_prose(method: str) -> str:
    """Bytes read while prose of 4096 tokens is decoded; "-" if that was not measured."""
    found = record("mini-magicpig-perplexity-4096")["results"].get(method)
    return "-" if found is None else f"{100 * found['decode_reads']['total']:.1f}%"


def test_numbers_are_those_of_the_record() -> None:
    expected = {
        ("budget", "bytes read, prose, 6335", "prose, 4096", "RULER, 4096", "RULER, 16,384"): budgeted,
        ("method", "bytes read", "error", "KL"): measured,
        ("`redo`", "bytes read", "error", "KL"): lambda name: measured(
            REDONE if name == "None" else f"{REDONE} redo={name}"
        ),
    }
    others = {"score", "Numba", "keys"}
    found = [(head, rows) for head, rows in tables(PAGE) if "bytes read" in head[1] and not others & {*head}]
    assert [head for head, _ in found] == list(expected)
    for head, rows in found:
        assert rows
        for name, *numbers in rows:
            assert tuple(numbers) == expected[head](name.strip("`")), name


def test_budgets_by_text_and_length() -> None:
    """The sentences of both pages about what a budget reads."""
    page, plans = (" ".join(x.split()) for x in (PAGE, (ROOT / "docs" / "plans.md").read_text()))
    own, tenth, least = (BUDGETS[name] for name in ("20%", "10%", "5%"))
    prose = on_prose(own), on_prose(tenth)
    ruler = [answered(method, 4096)[0] for method in (own, tenth, least)]
    assert f"reads {prose[0]} of dense attention's bytes on prose and {ruler[0]} on RULER's prompts" in page
    assert f"with `budget=0.1` {prose[1]} and {ruler[1]}." in page
    config = record("mini-magicpig-perplexity-4096")["config"]
    assert config["length"] == 4096 and record("mini-magicpig-perplexity-4096")["model"]["dtype"] == "bfloat16"
    tokens = record("mini-magicpig-fidelity")["config"]["prompt_tokens"]
    assert f"On {tokens} tokens of other prose, in fp32, it reads {measured(own)[0]} for its own 20%." in plans
    assert f"it reads {ruler[0]} on RULER's prompts, and {ruler[1]} for `budget=0.1` and {ruler[2]} for" in plans
    assert f"it reads {prose[0]}, and {prose[1]} for `budget=0.1`" in plans


def test_exact_top_k_with_as_many_keys_and_at_equal_bytes() -> None:
    """The row of figures.md has the numbers of (10, 75) in the page's own tables at 16,384 tokens."""
    found = dict[str, str]()
    for head, rows in tables(FIGURES):
        for row in rows:
            if row[0] == "10, 75" and row[1] == "4.6%":
                found |= dict(zip(head, row, strict=True))
    group, many, same = (found[name] for name in ("group", "top-k, as many keys", "oracle_top_k"))
    assert found["magicpig share=group"] == group and float(same) < float(group) < float(many)
    assert f"group, with as many keys: yes, {group} to {many}, at 4.6% of the bytes" in FIGURES
    assert f"group, at equal bytes: no, {group} against {same} of oracle_top_k." in FIGURES
    mine = record("mini-sampling-16384")
    count, rows_each = len(mine["samples"]), mine["config"]["rows"]
    assert f"All of this is of {count} prompts and {rows_each} rows of each" in FIGURES


def test_sentences_about_redo() -> None:
    """At the same bytes a plan has less error. The bars are those of today."""
    bytes_read, error, _ = measured("magicpig")
    redone = measured(f"{REDONE} redo=0.5")
    assert abs(float(redone[0][:-1]) - float(bytes_read[:-1])) < 1 and float(redone[1]) > float(error)
    assert f"for the same bytes a plan has less error ({bytes_read}, {error})." in " ".join(PAGE.split())


def test_dense_layers_of_other_methods() -> None:
    """Those that the records were made with, and their share of the bytes."""
    methods = record("mini-magicpig-baselines-4096")["methods"]
    assert methods["quest k=0.05"]["decode"]["dense_layers"] == [0, 1]
    quest = answered("quest k=0.05", 4096)[0]
    words = " ".join(PAGE.split())
    assert f"which read {200 / 12:.0f} of its {float(quest[:-1]):.0f}%" in words
    assert f"Two of twelve layers are {200 / 12:.1f}% of dense attention's bytes" in words


def answered(method: str, length: int) -> Row:
    """Bytes read and mean score."""
    tasks = next(
        tasks
        for name in ("group", "baselines")
        if method in (tasks := record(f"mini-magicpig-{name}-{length}")["tasks"])["vt"]["results"]
    )
    mine = [task["results"][method] for task in tasks.values()]
    reads, scores = [one["decode_reads"]["total"] for one in mine], [one["score"] for one in mine]
    return f"{100 * sum(reads) / len(reads):.1f}%", f"{100 * sum(scores) / len(scores):.1f}%"


def test_answers_are_those_of_the_records() -> None:
    head = "method", "bytes read", "score", "bytes read, 16,384", "score, 16,384"
    ((_, rows),) = [table for table in tables(PAGE) if table[0] == head]
    for name, *numbers in rows:
        assert tuple(numbers) == sum((answered(name.strip("`"), length) for length in LENGTHS), ()), name


def test_its_context_is_stated() -> None:
    config = record("mini-magicpig-fidelity")["config"]
    assert f"{config['steps']} steps after {config['prompt_tokens']} tokens" in " ".join(PAGE.split())


def test_table_memory_by_length() -> None:
    """The limit on memory holds at the length of the calibration: the shipped plan's share at it, and below."""
    (path,) = shipped(KIND).values()
    plan = MagicPIGPlan.of(load(path, KIND))
    words = " ".join((ROOT / "docs" / "plans.md").read_text().split())
    shares = []
    for length in (plan.length, plan.length // 2, plan.length // 4):
        memory = replace(plan, length=length).expected(plan.chosen)["memory"]
        shares.append(f"{sum(memory) / len(plan.layers):.1%}")
    assert f"has a limit of {plan.memory:.0%} after {plan.length} tokens" in words
    half, quarter = plan.length // 2, plan.length // 4
    assert f"take {shares[0]} there, {shares[1]} after {half} and {shares[2]} after {quarter}" in words


def test_the_plans_own_pairs_in_another_dtype() -> None:
    """Without a budget they are those for fp32: the expected bytes and memory in bf16, and those of `budget=`."""
    (path,) = shipped(KIND).values()
    plan = MagicPIGPlan.of(load(path, KIND))
    assert plan.element == 4 and chosen_for(plan, None, 2) == plan.chosen

    def whole(chosen: tuple[tuple[int, int], ...], length: int) -> dict[str, float]:
        found = replace(plan, length=length).expected(chosen, 2)
        return {name: sum(values[n] for n in plan.layers) / len(plan.layers) for name, values in found.items()}

    words = " ".join(PAGE.split())
    own, again = whole(plan.chosen, plan.length), whole(chosen_for(plan, plan.budget, 2), plan.length)
    assert (
        f"a bf16 cache of {plan.length} tokens reads {own['search'] + own['attention']:.1%} of dense attention's "
        f"bytes. The tables take {own['memory']:.0%} of the memory of keys and values. The plan's limits are "
        f"{plan.budget:.0%} and {plan.memory:.0%}." in words
    )
    assert f"it reads {again['search'] + again['attention']:.1%}, with tables of {again['memory']:.0%}." in words
    assert f"expected error is larger, {again['error']:.3f} in place of {own['error']:.3f}" in words
    half = plan.length // 2
    shares = f"{whole(plan.chosen, half)['memory']:.0%} of it at {half} tokens and {own['memory']:.0%} at {plan.length}"
    largest = max(replace(plan, length=half).expected(plan.chosen, 2)["memory"])
    assert f"{shares}. Those of its largest layer take {largest:.0%} at {half}" in words


def test_from_where_on_keys_are_sampled() -> None:
    method = MagicPIG()
    assert f"tokens, {method.schedule.start:,} by default" in " ".join(section(PAGE, "Limits").split())
    assert f"Below {method.schedule.start:,} tokens `magicpig` reads all keys" in " ".join(PAGE.split())


def preset(label: str) -> str:
    """The label of a method as the tables of error bars show it."""
    return label.removeprefix("magicpig ").replace("bits=", "").replace(" tables=", ", ").replace(" share=", ", ")


def test_error_bars() -> None:
    """The table of all methods."""
    found = record("mini-error-bars-4096")
    ((head, rows), *_) = tables(section(PAGE, "Error bars", "On a CPU"))
    assert head == ("method", "error", "bar", "ratio", "covered", "least of a task")
    expected = list[Row]()
    for label, mine in found["results"].items():
        whole, least = mine["all"], min(each["covered"] for each in mine["tasks"].values())
        numbers = f"{whole['error']:.3f}", f"{whole['bar']:.3f}", f"{whole['ratio']:.2f}"
        expected.append((preset(label), *numbers, f"{whole['covered']:.1%}", f"{least:.1%}"))
        # at this length: a ratio of 0.8 to 1.3, and two bars that cover at least 93%
        assert 0.8 <= whole["ratio"] <= 1.3 and whole["covered"] >= 0.93, label
    assert rows == expected
    words, config = " ".join(PAGE.split()), found["config"]
    assert (
        f"last {config['rows']} rows of {len(found['samples'])} prompts of {config['length']} tokens "
        f"({', '.join(found['tasks'])}), fp32" in words
    )
    assert f"--rows {config['rows']} --seed {config['seed']} --error-bars {config['error_bars']}" in words
    for share, law in HASHED.items():
        assert f"{law.each:g}, {law.together:g} and {law.few:g} for `{share}`" in words


def test_error_bars_by_length_and_task() -> None:
    """Of the presets: the range of ratios and of coverage, and how many have what is asked of bars."""
    _, (head, rows), *_ = tables(section(PAGE, "Error bars", "On a CPU"))
    assert head == ("length", "task", "outputs", "ratio", "covered", "least in", "in range")
    expected, met, cells, lowest = list[Row](), 0, 0, 1.0
    for name in BARS:
        found = record(name)
        assert found["dirty"] is False and found["commit"]
        for task in found["tasks"]:
            mine = {k: x["tasks"][task] for k, x in found["results"].items() if k.startswith("magicpig")}
            assert len(mine) == 2 * len(PRESETS)
            ratios, covered = ([x[key] for x in mine.values()] for key in ("ratio", "covered"))
            least = min(mine, key=lambda label: mine[label]["covered"])
            for label, x in mine.items():
                assert x["ratio"] < 1.31 and (x["covered"] >= 0.93 or preset(label).startswith("10, 75, ")), label
            lowest = min(lowest, *covered)
            good = sum(0.8 <= x["ratio"] <= 1.3 and x["covered"] >= 0.93 for x in mine.values())
            met, cells = met + good, cells + len(mine)
            expected.append((
                f"{found['config']['length']:,}", task, f"{mine[least]['outputs']:,}",
                f"{min(ratios):.2f} to {max(ratios):.2f}", f"{min(covered):.1%} to {max(covered):.1%}",
                preset(least), f"{good} of {len(mine)}",
            ))  # fmt: skip
    assert rows == expected
    words = " ".join(PAGE.split())
    assert words.count(f"{met} of {cells} pairs of preset and task are in range") == 2
    few = [
        found["results"][label]["tasks"][task]
        for found in map(record, BARS)
        for task in found["tasks"]
        for label in found["results"]
        if preset(label).startswith("10, 75, ")
    ]
    outside = sum(not (0.8 <= x["ratio"] <= 1.3 and x["covered"] >= 0.93) for x in few)
    low = sum(x["covered"] < 0.93 for x in few)
    assert f"{outside} of its {len(few)} pairs are out of range, {low} of them as bars cover too little" in words
    assert MagicPIG().pair == (10, 75)
    assert f"cover less than 93%: {lowest:.1%} at least" in words


def steps() -> list[dict[str, Any]]:
    """Cases of a step of one layer."""
    found: list[dict[str, Any]] = record("cpu-sampling")["sampling"]
    return found


def decoding() -> dict[str, dict[str, Any]]:
    """Tokens of longreach-mini, by method."""
    found = record("cpu-sampling")["decode"]["methods"]
    methods = {each["method"]["name"]: each for each in found}
    assert len(methods) == len(found)
    return methods


def on_a_cpu() -> str:
    return section(PAGE, "On a CPU", "Limits")


def table_of(*head: str) -> list[Row]:
    """Rows of the one table of the section with this head."""
    (rows,) = (rows for found, rows in tables(on_a_cpu()) if found == head)
    return rows


def case_of(case: dict[str, Any]) -> Row:
    preset = case["preset"]
    options = f"{preset['bits']}, {preset['tables']}, {preset['share']}"
    return thousands(case["shape"]["context"]), str(case["threads"]), options


def medians(case: dict[str, Any]) -> dict[str, float]:
    return {name: times["median"] for name, times in case["seconds"].items()}


def torch_dense(case: dict[str, Any]) -> float:
    return min(medians(case)["torch matmul"], medians(case)["torch SDPA"])


def step_row(case: dict[str, Any]) -> Row:
    seconds, dense = medians(case), torch_dense(case)
    times = f"{1e3 * seconds['ours']:.2f} ms", f"{1e3 * dense:.1f} ms"
    return *case_of(case), *times, f"{dense / seconds['ours']:.1f}x", f"{case['ratios']['avx2']:.2f}"


def part_row(case: dict[str, Any]) -> Row:
    speeds = (case[f"{name}_bytes_per_second"] / 1e9 for name in ("rows", "dense", "copied"))
    return *case_of(case), *(f"{1e3 * s:.2f}" for s in case["parts"].values()), *(f"{x:.1f}" for x in speeds)


def token_row(found: dict[str, Any]) -> Row:
    times = (f"{1e3 * found['seconds'][impl]:.1f} ms" for impl in ("auto", "reference"))
    return f"`{found['method']['name']}`", f"{found['read']:.1%}", *times, f"{found['ratio']:.1f}x"


def thousands(tokens: int) -> str:
    return f"{round(tokens / 1024)}K"


def extent(values: Iterable[float], digits: int, unit: str = "") -> str:
    some = list(values)
    return f"{min(some):.{digits}f}{unit} to {max(some):.{digits}f}{unit}"


def test_steps_on_a_cpu() -> None:
    head = "keys", "threads", "`bits`, `tables`, share"
    assert table_of(*head, "step", "dense", "speed", "with AVX2 only") == [step_row(case) for case in steps()]
    (parts,) = {tuple(case["parts"]) for case in steps()}
    assert table_of(*head, *(f"`{part}`" for part in parts), "rows", "dense", "copy") == [part_row(x) for x in steps()]
    (shape,) = {tuple(case["shape"][name] for name in ("heads", "kv_heads", "dim", "dtype")) for case in steps()}
    words, heads = " ".join(on_a_cpu().split()), "{} query heads, {} KV heads of {} channels"
    assert f"({heads.format(*shape[:3])}, bf16)" in words and shape[3] == "bfloat16"
    assert record("cpu-sampling")["device"]["name"] in words


def gpu_cases(device: str = "NVIDIA H200") -> list[dict[str, Any]]:
    return [case for case in record("magicpig-decode")["cases"].values() if case["device"]["name"] == device]


def micros(case: dict[str, Any], name: str) -> float:
    (entry,) = (entry for entry in case["entries"] if entry["name"] == name)
    return float(entry["microseconds"]["median"])


def gpu_row(case: dict[str, Any], name: str) -> Row:
    """A preset's row of the table of steps on a GPU."""
    shape, sampled, step = case["shape"], case["sampled"][name], micros(case, name)
    fastest = micros(case, case["speed_over_fastest"]["kernel"])
    preset = sampled["preset"]
    return (
        thousands(shape["context"]), str(shape["batch"]), f"{preset['bits']}, {preset['tables']}, {preset['share']}",
        f"{step:.1f} us", f"{fastest:.1f} us", f"{fastest / step:.2f}x", f"{sampled['percent_of_dense']:.1f}%",
        f"{sampled['sampled_group']:.1%}", f"{sampled['tables_percent_of_kv']:.0f}%",
        f"{micros(case, f'{name}: a block is sealed') / 1e3:.2f} ms", f"{1e3 * sampled['build_seconds']:.1f} ms",
    )  # fmt: skip


def prefill_seconds() -> tuple[float, float]:
    """At 128K: to the first token of a model of 32 layers, and of attention in one layer."""
    user, attention = (
        record(name)["cases"][case] for name, case in (("user", "user-128k-b1"), ("prefill", "prefill-128k"))
    )
    (first,) = (x["ttft_seconds"] for x in user["entries"] if x["name"] == "longreach.generate")
    assert user["shape"]["context"] == attention["shape"]["context"] == 128 << 10 and user["model"]["layers"] == 32
    for name in ("heads", "kv_heads", "dim", "dtype"):
        assert gpu_cases()[0]["shape"][name] == user["shape"][name] == attention["shape"][name], name
    assert {case["device"]["name"] for case in (user, attention)} == {"NVIDIA H200"}
    return first, micros(attention, "sdpa_cudnn") / 1e6


def table_targets() -> list[Row]:
    """Build and bytes of tables at 128K, which the record does not judge."""
    case, (first, _) = gpu_cases()[0], prefill_seconds()
    assert case["shape"]["context"] == 128 << 10 and case["shape"]["batch"] == 1
    rows = list[Row]()
    for bound, quantity, digits in (
        (10, "build of the tables, % of the dense prefill", 2), (1, "bytes of tables, % of dense", 2)
    ):  # fmt: skip
        for name, x in case["sampled"].items():
            dense = 100 * x["bytes_read"] / x["percent_of_dense"]
            got = 32 * 100 * x["build_seconds"] / first if bound == 10 else 100 * x["metadata_bytes"] / dense
            reached = "yes" if got <= bound else "no"
            rows.append((f"128K, batch 1, {name}: {quantity}", str(bound), f"{got:.{digits}f}", reached))
    return rows


def test_tables_over_attention_alone() -> None:
    first, attention = prefill_seconds()
    words = " ".join(section(PAGE, "On a GPU", "On a CPU").split())
    group, own = (x["build_seconds"] / attention for x in gpu_cases()[0]["sampled"].values())
    assert f"{first:.2f} s to the first token at 128K (record `user`, case `user-128k-b1`" in words
    assert f"attention takes {1e3 * attention:.1f} ms (record `prefill`, case `prefill-128k`, `sdpa_cudnn`)." in words
    assert f"Its tables take {group:.1%} of that with (10, 75) and `group`, and {own:.1%} with (10, 150)" in words
    entries = {x["name"]: x["microseconds"]["median"] for x in record("prefill")["cases"]["prefill-128k"]["entries"]}
    name, fastest = min(entries.items(), key=lambda item: item[1])
    shares = (attention * 1e6 / fastest * x for x in (group, own))
    assert name.startswith("FlashAttention-3")
    assert "with {:.1f} ms: {:.1%} and {:.1%} of it.".format(fastest / 1e3, *shares) in words
    for x in gpu_cases()[0]["sampled"].values():  # metadata is all that is not keys or values
        read = x["search_bytes"] + x["attention_bytes"]
        assert x["metadata_bytes"] == pytest.approx(read - x["key_bytes"] - x["value_bytes"])


SAMPLED_BY_MINI = {"(10,75) group": ("rest", "magicpig bits=10 tables=75"),
                 "(10,150) own": ("own", "magicpig bits=10 tables=150 share=own")}  # fmt: skip


def sampled_by_mini(name: str, method: str, field: str) -> str:
    """Mean over RULER's tasks at 16,384 tokens and over sparse layers."""
    found = record(f"mini-magicpig-{name}-16384")
    assert found["model"]["name"] == "longreach-mini" and len(found["tasks"]) == 11
    assert f"`mini-magicpig-{name}-16384`" in section(PAGE, "On a GPU", "On a CPU")
    layers = [task["results"][method]["sampling"][field] for task in found["tasks"].values()]
    return f"{sum(sum(some) / len(some) for some in layers) / len(layers):.1%}"


def test_sampled_shares_of_the_timings_and_of_a_model() -> None:
    head = ("`bits`, `tables`, share", "keys of a head, timed", "longreach-mini", "keys of a group, timed",
            "longreach-mini")  # fmt: skip
    ((_, rows),) = [table for table in tables(section(PAGE, "On a GPU", "On a CPU")) if table[0] == head]
    expected = []
    for preset, (name, method) in SAMPLED_BY_MINI.items():
        timed, options = gpu_cases()[0]["sampled"][preset], gpu_cases()[0]["sampled"][preset]["preset"]
        shares = [x for field in ("sampled_head", "sampled_group")
                  for x in (f"{timed[field]:.1%}", sampled_by_mini(name, method, field))]  # fmt: skip
        expected.append((f"{options['bits']}, {options['tables']}, {options['share']}", *shares))
    assert rows == expected
    shape = gpu_cases()[0]["shape"]
    mini = json.loads((ROOT / "src/longreach/models/longreach-mini/config.json").read_text())
    groups = mini["num_attention_heads"] // mini["num_key_value_heads"], shape["heads"] // shape["kv_heads"]
    words = " ".join(section(PAGE, "On a GPU", "On a CPU").split())
    assert "It has {} query heads for each KV head, and the timed shape has {}:".format(*groups) in words


def test_steps_on_a_gpu() -> None:
    text = section(PAGE, "On a GPU", "On a CPU")
    (_, rows), (_, targets) = list(tables(text))[:2]
    assert rows == [gpu_row(case, name) for case in gpu_cases() for name in case["sampled"]]
    expected = [
        (f"{thousands(case['shape']['context'])}, batch {case['shape']['batch']}, {target['of']}: {target['quantity']}",
         f"{target['bound']:g}", f"{target['got']:.2f}", "yes" if target["reached"] else "no")
        for case in gpu_cases() for target in case["targets"]
    ]  # fmt: skip
    assert targets == expected + table_targets()
    assert all(case["dirty"] is False for case in gpu_cases())
    parts = gpu_cases()[0]["sampled"]["(10,75) group"]["parts_microseconds"]
    shown = [f"{parts[name]:.1f}" for name in ("sample and attend", "seal nothing", "append", "rest")]
    words = " ".join(text.split())
    assert (
        "{} us for look-ups and attention, {} for sealing nothing, {} to append, {} for the rest".format(*shown)
        in words
    )
    for x in (case["sampled"]["(10,75) group"] for case in gpu_cases()[:1]):
        assert f"search {x['search_bytes'] / 1e6:.1f} MB, attention {x['attention_bytes'] / 1e6:.1f} MB" in words


def test_from_which_length_on_a_step_is_faster() -> None:
    text, cases = section(PAGE, "On a GPU", "On a CPU"), gpu_cases("NVIDIA H100 80GB HBM3")
    found = [rows for head, rows in tables(text) if head[:2] == ("keys", "batch")]
    assert len(found) == 2 and found[1] == [gpu_row(case, name) for case in cases for name in case["sampled"]]
    assert all(case["shape"]["batch"] == 1 and case["dirty"] is False for case in cases)
    assert [thousands(case["shape"]["context"]) for case in cases] == ["8K", "16K", "32K", "64K"]
    faster = [
        [micros(case, name) < micros(case, case["speed_over_fastest"]["kernel"]) for case in cases]
        for name in cases[0]["sampled"]
    ]
    assert faster == [[False, True, True, True], [False, False, True, True]]
    words = " ".join(text.split())
    assert "is slower than dense attention at 8K keys and faster from 16K on." in words
    assert "is slower at 16K and faster from 32K on." in words


def test_tokens_on_a_cpu() -> None:
    rows = table_of("method", "bytes read", "Numba", "PyTorch", "speed")
    assert rows == [token_row(found) for found in decoding().values()]
    newer = "block_mka"
    assert [*decoding()] == [name for name in names("decode") if name != newer]
    words = " ".join(on_a_cpu().split())
    assert f"The table has all decode methods but `{newer}`, which is newer than the record." in words


def test_shapes_of_dense_attention_on_a_cpu() -> None:
    """Of the steps of one layer, in which Numba is faster, and of longreach-mini, in which it is slower."""
    shapes = [case["shape"] for case in steps()]
    ((heads, kv_heads, dim, dtype),) = {(x["heads"], x["kv_heads"], x["dim"], x["dtype"]) for x in shapes}
    mini = json.loads((ROOT / "src/longreach/models/longreach-mini/config.json").read_text())
    words, found = " ".join(on_a_cpu().split()), record("cpu-sampling")
    assert (dtype, found["model"]["dtype"]) == ("bfloat16", "float32")
    assert (
        f"in bf16, with {dim} channels, {heads // kv_heads} query heads for each KV head, and "
        f"{thousands(min(x['context'] for x in shapes))} keys or more." in words
    )
    groups = mini["num_attention_heads"] // mini["num_key_value_heads"]
    assert (
        f"in fp32, with {mini['head_dim']} channels, {groups} query heads for each KV head, and "
        f"{thousands(found['decode']['context'])} keys. Their times are of {mini['num_hidden_layers']} layers" in words
    )


def judged() -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Each kind of target in the record -> targets and what was reached."""
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for case in steps():
        for name, target in case["targets"].items():
            kind = f"{name} {case['preset']['share']}" if name == "dense" else name
            found.setdefault(kind, []).append((target, case["ratios"][name]))
    found["decode"] = [(each["target"], each["ratio"]) for each in decoding().values() if "target" in each]
    return found


TARGETS = {
    "step over the faster dense form of torch, `own`": ("dense own", 1),
    "step over the faster dense form of torch, `group`": ("dense group", 1),
    "step over torch's SDPA": ("sdpa", 1),
    "step with AVX2 only": ("avx2", 2),
    "token of longreach-mini, Numba over PyTorch": ("decode", 1),
}


def test_targets_on_a_cpu() -> None:
    """Every kind of target of the record, with what was reached, and a reason for those that were missed."""
    rows, found = table_of("target", "wanted", "reached", "met", "why not all"), judged()
    assert {TARGETS[name][0] for name, *_ in rows} == found.keys()
    for name, wanted, reached, met, why in rows:
        kind, digits = TARGETS[name]
        targets = [target for target, _ in found[kind]]
        (least,) = {target["wanted"] for target in targets}
        count = sum(target["met"] for target in targets)
        assert (wanted, met) == (f"{least:g}x", f"{count} of {len(targets)}"), name
        assert reached == extent((ratio for _, ratio in found[kind]), digits, "x"), name
        assert bool(why) == (count < len(targets)), name


def test_sentences_about_a_cpu() -> None:
    """Each is made from the record. Where one differs, the page takes the one shown here."""
    words = " ".join(on_a_cpu().split())
    for sentence in (*sentences_of_steps(), *sentences_of_tokens()):
        assert sentence in words, sentence


def sentences_of_steps() -> Iterator[str]:
    cases, config = steps(), record("cpu-sampling")["config"]
    contexts, (one, more) = config["contexts"], config["threads"]
    assert one == 1
    first, second = map(thousands, contexts)
    (heads,) = {case["shape"]["heads"] for case in cases}
    speeds = extent((torch_dense(case) / medians(case)["ours"] for case in cases), 1)
    yield f"With {first} keys or more, a decode step of a layer with {heads} query heads is {speeds} times as fast"
    gains = [gain(context, "ours") for context in contexts]
    shown = [extent(some, 2) for some in gains]
    yield (
        f"With {more} threads a step is {shown[0]} times as fast as with one at {first}, and {shown[1]} times at "
        f"{second}."
    )
    (count,) = {len(case["parts"]) for case in cases}
    slower = [sum(case["parts"].values()) / medians(case)["ours"] for case in cases]
    yield f"A step is one compiled call; as {count} calls, one for each op, it takes {extent(slower, 1)} times as long."
    dense = [medians(case)["longreach dense"] for case in cases]
    faster = [a / medians(case)["ours"] for a, case in zip(dense, cases, strict=True)]
    yield (
        f"longreach's own dense attention is faster than both forms of torch: {extent((1e3 * x for x in dense), 1)} "
        f"ms. A step is {extent(faster, 1)} times as fast as it."
    )
    assert all(a < torch_dense(case) for a, case in zip(dense, cases, strict=True))
    speeds_of = {
        name: [case[f"{name}_bytes_per_second"] / 1e9 for case in cases] for name in ("rows", "dense", "copied")
    }
    yield (
        f"Sampled rows are scattered, and come at {extent(speeds_of['rows'], 1)} GB/s. Matrix products read at "
        f"{extent(speeds_of['dense'], 1)} GB/s, and a copy moves {extent(speeds_of['copied'], 1)} GB/s."
    )
    single = [case for case in cases if case["threads"] == 1]
    assert all(case["targets"]["avx2"]["met"] for case in cases) and config["threads_placed"]
    (slow,) = {medians(case)["torch SDPA"] for case in single if case["shape"]["context"] == contexts[0]}
    yield f"it takes {1e3 * slow:.0f} ms at {first} with one thread"
    missed = [case for case in cases if not case["targets"]["dense"]["met"]]
    (case,) = missed
    assert case_of(case) == (first, str(more), "10, 75, group")
    (before,) = (x for x in single if case_of(x) == (first, "1", "10, 75, group"))
    slow, fast = (1e3 * medians(x)["ours"] for x in (before, case))
    assert more == 2  # of a time a + b, b halves: a is twice the second time less the first
    yield (
        f"at {first} with {more} threads instead of 1 the step falls from {slow:.2f} to {fast:.2f} ms. If the rest "
        f"takes half as long, about {2 * fast - slow:.2f} ms do not get faster."
    )


def gain(context: int, name: str) -> list[float]:
    """Each preset's time with one thread over that with more."""
    one, more = (
        [
            medians(case)[name]
            for case in steps()
            if case["shape"]["context"] == context and (case["threads"] == 1) == single
        ]
        for single in (True, False)
    )
    return [a / b for a, b in zip(one, more, strict=True)]


def sentences_of_tokens() -> Iterator[str]:
    found, methods = record("cpu-sampling")["decode"], decoding()
    context, threads = thousands(found["context"]), found["threads"]
    assert methods["magicpig"]["seconds"]["auto"] > methods["dense"]["seconds"]["reference"]
    pig, dense, ours = (
        f"{1e3 * methods[name]['seconds'][impl]:.1f}"
        for name, impl in (("magicpig", "auto"), ("dense", "reference"), ("dense", "auto"))
    )
    yield (
        f"On longreach-mini at {context} with {threads} threads, `magicpig` saves no time over dense attention in "
        f"PyTorch: a token takes {pig} ms with Numba's kernels, a dense one {dense} ms in PyTorch and {ours} ms with "
        f"Numba's kernels."
    )
    listed = {name: each for name, each in methods.items() if "target" in each}
    times = [1e3 * each["seconds"]["reference"] for name, each in listed.items() if name != "magicpig"]
    fastest = min(methods, key=lambda name: methods[name]["seconds"]["auto"])
    least = 1e3 * methods[fastest]["seconds"]["auto"]
    yield f"The fastest token, of `{fastest}`, still takes {least:.0f} ms."
    needed = extent((x / 3 for x in times), 0)
    yield f"The PyTorch forms of the other list methods take {extent(times, 0)} ms, so 3x needs {needed} ms."
    yield f"is slower than in PyTorch** on this model: {ours} ms against {dense} ms a token."
    assert methods["quest"]["method"]["dense_layers"] == [0, 1]
