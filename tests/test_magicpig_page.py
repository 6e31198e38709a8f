"""The tables of docs/magicpig/README.md that hold measurements are those of the record it names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from longreach.methods.magicpig import PRESETS
from longreach.methods.magicpig.method import HASHED
from longreach.records.labels import short_label
from tests.doc_tables import ROOT, Row, record, section, tables

PAGE = (ROOT / "docs" / "magicpig" / "README.md").read_text()
BUDGETS = {"5%": "magicpig budget=0.05", "10%": "magicpig budget=0.1", "20%": "magicpig", "40%": "magicpig budget=0.4"}
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


def test_numbers_are_those_of_the_record() -> None:
    expected = {
        ("budget", "bytes read"): lambda name: measured(BUDGETS[name])[:1],
        ("method", "bytes read", "error", "KL"): measured,
        ("`redo`", "bytes read", "error", "KL"): lambda name: measured(
            REDONE if name == "None" else f"{REDONE} redo={name}"
        ),
    }
    found = [(head, rows) for head, rows in tables(PAGE) if "bytes read" in head and "score" not in head]
    assert [head for head, _ in found] == list(expected)
    for head, rows in found:
        assert rows
        for name, *numbers in rows:
            assert tuple(numbers) == expected[head](name.strip("`")), name


def answered(method: str) -> Row:
    """Bytes read, mean score, and the task that loses most."""
    tasks = next(
        tasks
        for name in ("group", "baselines")
        if method in (tasks := record(f"mini-magicpig-{name}-4096")["tasks"])["vt"]["results"]
    )
    mine = {name: task["results"][method] for name, task in tasks.items()}
    lost = {name: task["results"]["dense"]["score"] - mine[name]["score"] for name, task in tasks.items()}
    worst = max(lost, key=lambda name: lost[name])
    reads, scores = ([one["decode_reads"]["total"] for one in mine.values()], [one["score"] for one in mine.values()])
    means = (f"{100 * sum(some) / len(some):.1f}%" for some in (reads, scores))
    return *means, "-" if method == "dense" else f"{worst} {100 * mine[worst]['score']:.1f}%"


def test_answers_are_those_of_the_records() -> None:
    ((_, rows),) = [table for table in tables(PAGE) if table[0][1:] == ("bytes read", "score", "loses most on")]
    named = {row[0].strip("`") for row in rows}
    for name in ("group", "baselines"):
        found = record(f"mini-magicpig-{name}-4096")
        assert set(found["methods"]) <= named and found["config"]["samples"] == 100
    for name, *numbers in rows:
        assert tuple(numbers) == answered(name.strip("`")), name
    cwe = {
        label: task["score"]
        for label, task in record("mini-magicpig-baselines-4096")["tasks"]["cwe"]["results"].items()
    }
    for share, keys in (("0.05", "5%"), ("0.02", "2%")):
        top, drawn = (f"{100 * cwe[f'oracle_top_k k={share}{rest}']:.1f}%" for rest in ("", " choose=sample"))
        said = (
            f"{drawn} instead of {top} for the largest {keys} of keys"
            if keys == "5%"
            else f"{drawn} instead of {top} for {keys}"
        )
        assert said in " ".join(PAGE.split())


def test_its_context_is_stated() -> None:
    config = record("mini-magicpig-fidelity")["config"]
    assert f"{config['steps']} steps after {config['prompt_tokens']} tokens" in " ".join(PAGE.split())


def test_error_bars() -> None:
    """The table, and what is asked of bars: a ratio of 0.8 to 1.3, and two bars that cover at least 93%."""
    found = record("mini-error-bars-4096")
    ((head, rows), *_) = tables(section(PAGE, "Error bars", "On a CPU"))
    assert head == ("method", "error", "bar", "ratio", "covered", "least of a task")
    expected = list[Row]()
    for label, mine in found["results"].items():
        whole, least = mine["all"], min(each["covered"] for each in mine["tasks"].values())
        name = label.removeprefix("magicpig ").replace("bits=", "").replace(" tables=", ", ").replace(" share=", ", ")
        numbers = f"{whole['error']:.3f}", f"{whole['bar']:.3f}", f"{whole['ratio']:.2f}"
        expected.append((name, *numbers, f"{whole['covered']:.1%}", f"{least:.1%}"))
        assert 0.8 <= whole["ratio"] <= 1.3 and whole["covered"] >= 0.93, label
    assert rows == expected
    words, config = " ".join(PAGE.split()), found["config"]
    assert (
        f"last {config['rows']} rows of {len(found['samples'])} prompts of {config['length']} tokens "
        f"({', '.join(found['tasks'])}), {config['error_bars']} seeds" in words
    )
    assert f"--rows {config['rows']} --seed {config['seed']} --error-bars {config['error_bars']}" in words
    assert found["dirty"] is False and found["commit"]
    pigs = {label: mine for label, mine in found["results"].items() if label.startswith("magicpig")}
    assert len(pigs) == 2 * len(PRESETS)
    missed = [1 - mine["all"]["covered"] for mine in pigs.values()]
    assert f"too small in {min(missed):.1%} to {max(missed):.1%} of the outputs" in words
    worst, label, task = max(
        (1 - each["covered"], label, task) for label, mine in pigs.items() for task, each in mine["tasks"].items()
    )
    method = pigs[label]["method"]
    options = f"{method['bits']}, {method['tables']}, {method['share']}"
    assert f"worst task and preset are {task} and `{options}`: {worst:.1%}" in words
    ratios = [mine["all"]["ratio"] for mine in pigs.values()]
    assert max(ratios) < 1 and f"ratios are {min(ratios):.2f} to {max(ratios):.2f}" in words
    for share, law in HASHED.items():
        assert f"{law.each:g}, {law.together:g} and {law.few:g} for `{share}`" in words


def cases(**wanted: Any) -> list[dict[str, Any]]:
    """Cases of a step on a CPU with these threads, this context or this way to share."""
    return [
        case
        for case in record("cpu-sampling")["sampling"]
        if all(wanted[name] == value for name, value in facts(case).items() if name in wanted)
    ]


def facts(case: dict[str, Any]) -> dict[str, Any]:
    return {"threads": case["threads"], "context": case["shape"]["context"], "share": case["preset"]["share"]}


def step_row(case: dict[str, Any]) -> Row:
    shape, preset, seconds = case["shape"], case["preset"], {k: v["median"] for k, v in case["seconds"].items()}
    ours, dense = seconds["ours"], min(seconds["torch matmul"], seconds["torch SDPA"])
    options = f"{preset['bits']}, {preset['tables']}, {preset['share']}"
    times = f"{1e3 * ours:.2f} ms", f"{1e3 * dense:.1f} ms"
    ratios = f"{dense / ours:.1f}x", f"{ours / seconds['ours for AVX2']:.2f}"
    return (thousands(shape["context"]), str(case["threads"]), options, *times, *ratios)


def thousands(tokens: int) -> str:
    return f"{round(tokens / 1024)}K"


def extent(values: Iterable[float], digits: int) -> str:
    some = list(values)
    return f"{min(some):.{digits}f} to {max(some):.{digits}f}"


def test_steps_on_a_cpu() -> None:
    ((head, rows),) = tables(section(PAGE, "On a CPU", "Limits"))
    assert head == ("keys", "threads", "`bits`, `tables`, share", "step", "dense", "speed", "with AVX2 only")
    assert rows == [step_row(case) for case in cases()]
    (shape,) = {tuple(case["shape"][name] for name in ("heads", "kv_heads", "dim", "dtype")) for case in cases()}
    words, heads = " ".join(section(PAGE, "On a CPU", "Limits").split()), "{} query heads, {} KV heads of {} channels"
    assert f"({heads.format(*shape[:3])}, bf16)" in words and shape[3] == "bfloat16"
    assert record("cpu-sampling")["device"]["name"] in words


def test_what_is_said_of_a_cpu() -> None:
    """Each sentence with a number is made from the record; where one differs, the page takes the one shown here."""
    words = " ".join(section(PAGE, "On a CPU", "Limits").split())
    for sentence in (*sentences_of_steps(), *sentences_of_tokens()):
        assert sentence in words, sentence
    told = " ".join((*sentences_of_steps(), *sentences_of_tokens()))
    bullets = words[words.index("* Aimed") :].replace("* ", "").strip()
    assert bullets == told, "nothing else is said"


def sentences_of_steps() -> Iterator[str]:
    shares = ("own", "group")
    wanted = {s: {case["targets"]["dense"]["wanted"] for case in cases(share=s)} for s in shares}
    yield "Aimed at were " + " and ".join(f"{wanted[s].pop():g}x for `{s}`" for s in shares) + "."
    assert not any(wanted.values())
    met = [(s, sum(case["targets"]["dense"]["met"] for case in cases(share=s)), len(cases(share=s))) for s in shares]
    yield "Of the table's rows " + ", and ".join(
        f"{n} of {of}{' reach it' * (s == 'own')} for `{s}`" for s, n, of in met
    ) + "."  # fmt: skip
    config = record("cpu-sampling")["config"]
    contexts, (one, more) = config["contexts"], config["threads"]
    assert one == 1
    gains = []
    for context in contexts:
        pairs = zip(cases(context=context, threads=1), cases(context=context, threads=more), strict=True)
        gains.append(extent((a["seconds"]["ours"]["median"] / b["seconds"]["ours"]["median"] for a, b in pairs), 2))
    first, second = (thousands(context) for context in contexts)
    yield (
        f"With {more} threads a step is {gains[0]} times as fast as with one at {first}, and {gains[1]} times at "
        f"{second}."
    )
    (count,) = {len(case["parts"]) for case in cases()}
    slower = [sum(case["parts"].values()) / case["seconds"]["ours"]["median"] for case in cases()]
    yield f"A step is one compiled call; as {count} calls, one for each op, it takes {extent(slower, 1)} times as long."


def sentences_of_tokens() -> Iterator[str]:
    found = record("cpu-sampling")["decode"]
    methods = {each["method"]["name"]: each for each in found["methods"]}
    assert len(methods) == len(found["methods"])

    def times(name: str) -> tuple[str, str]:
        seconds = methods.pop(name)["seconds"]
        return f"{1e3 * seconds['auto']:.0f} ms", f"{1e3 * seconds['reference']:.0f} ms"

    ratio = methods["magicpig"]["ratio"]
    ours, torch = times("magicpig")
    yield (
        f"Decoding longreach-mini at {thousands(found['context'])} with {found['threads']} threads, a token of "
        f"`magicpig` takes {ours} with Numba's kernels and {torch} with PyTorch ({ratio:.1f}x)."
    )
    ours, torch = times("dense")
    faster = extent((each["ratio"] for each in methods.values()), 1)
    yield f"The other sparse methods are {faster} times as fast as with PyTorch."
    yield f"Dense attention takes {ours} with these kernels and {torch} with PyTorch."
