"""What docs/kascade says of scores with and without a map between heads, from its record."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from longreach.bench.cases import CASES, TABLE_3_PREFILL
from tests.doc_tables import ROOT, Row, record, tables

PAGE = (ROOT / "docs" / "kascade" / "README.md").read_text()
PLAN = "kascade plan=benchmarks/plans/kascade-mini-0-4-8"
LABELS = {
    "dense attention": "dense",
    "mapped heads": f"{PLAN}.json",
    "head of the same number": f"{PLAN}-own.json",
    "all heads pooled": f"{PLAN}.json heads=all",
}


def scores(label: str) -> list[float]:
    return [task["results"][label]["score"] for task in record("mini-kascade-heads-4096")["tasks"].values()]


def shown(label: str) -> Row:
    return (*(f"{score:.1%}" for score in scores(label)), f"{fmean(scores(label)):.1%}")


def test_scores_are_those_of_the_record() -> None:
    (rows,) = (rows for head, rows in tables(PAGE) if head[1:3] == ("multivalue", "multiquery"))
    assert {row[0]: row[1:] for row in rows} == {name: shown(label) for name, label in LABELS.items()}
    lost = fmean(scores(LABELS["mapped heads"])) - fmean(scores(LABELS["head of the same number"]))
    assert f"Without a map {100 * lost:.0f} points of the mean are lost" in PAGE


ANCHORS = {
    "dense attention": "dense",
    "default": f"{PLAN}.json",
    "8-bit scores, 7.9% of the keys": f"{PLAN}.json scoring=int8 k=0.079",
    "the same, `sinks=4 recent=32`": f"{PLAN}.json scoring=int8 k=0.079 sinks=4 recent=32",
    "default, prompt too": f"kascade/{PLAN}.json prefill.{PLAN.removeprefix('kascade ')}.json",
}


def found(label: str, length: int | None = None) -> list[dict[str, Any]]:
    tasks = record("mini-kascade-anchors")["tasks"].values()
    return [task["results"][label] for task in tasks if length in (None, task["length"])]


def mean(label: str, length: int) -> float:
    return 100 * fmean(one["score"] for one in found(label, length))


def test_the_default_plan_in_both_phases() -> None:
    (rows,) = (rows for head, rows in tables(PAGE) if head[-2:] == ("bytes read, decode", "bytes read, prefill"))
    expected = dict[str, Row]()
    for name, label in ANCHORS.items():
        reads = [100 * fmean(one[f"{phase}_reads"]["total"] for one in found(label)) for phase in ("decode", "prefill")]
        expected[name] = (f"{mean(label, 4096):.1f}%", f"{mean(label, 16384):.1f}%", *(f"{x:.0f}%" for x in reads))
    assert {row[0]: row[1:] for row in rows} == expected
    words = " ".join(PAGE.split())
    for label, text in (
        ("default", "loses {} and {} points"),
        ("default, prompt too", "{} points at 4096 tokens and {}"),
    ):
        lost = [f"{mean('dense', n) - mean(ANCHORS[label], n):.1f}" for n in (4096, 16384)]
        assert text.format(*lost) in words
    assert all(mean("dense", n) - mean(ANCHORS["default"], n) < 1 for n in (4096, 16384))


BOTH = "kascade/kascade"
PROMPTS = {
    "dense attention, in decoding too": "dense",
    "default": BOTH,
    "`lse_every=16`": f"{BOTH} prefill.lse_every=16",
    "`score_every=4`": f"{BOTH} prefill.score_every=4",
    "`lse_every=16 score_every=4`": f"{BOTH} prefill.lse_every=16 prefill.score_every=4",
    "`k=0.2`": f"{BOTH} prefill.k=0.2",
    "`sinks=4 recent=64`": f"{BOTH} prefill.sinks=4 prefill.recent=64",
    "`k=0.2 sinks=4 recent=64`": f"{BOTH} prefill.k=0.2 prefill.sinks=4 prefill.recent=64",
    "`heads=all`, in decoding too": f"{BOTH} heads=all prefill.heads=all",
    "default, decoding dense": "kascade/dense",
    "dense, decoding by `plan=auto`": "kascade plan=auto",
}
LENGTHS = 4096, 16384
SHOWN = "cwe", "niah_multikey_2", "niah_multivalue", "vt"


def prompt_tasks(length: int) -> dict[str, Any]:
    tasks: dict[str, Any] = record(f"mini-kascade-prefill-{length}")["tasks"]
    if length == 4096:
        return tasks
    more = record(f"mini-kascade-phases-{length}")["tasks"]  # of the same prompts
    found = {name: more[name]["results"] | t["results"] for name, t in tasks.items()}
    assert all(found[name]["dense"]["answers"] == t["results"]["dense"]["answers"] for name, t in more.items())
    return {name: {"results": results} for name, results in found.items()}


def lost(name: str, length: int, than: str = "dense attention, in decoding too") -> float:
    """Points of the mean that a row has less than another one."""
    means = (fmean(t["results"][PROMPTS[one]]["score"] for t in prompt_tasks(length).values()) for one in (than, name))
    return 100 * (next(means) - next(means))


def prompt_rows(length: int) -> Iterator[Row]:
    tasks = prompt_tasks(length)
    for name, label in PROMPTS.items():
        if label in tasks["cwe"]["results"]:
            results = [t["results"][label] for t in tasks.values()]
            some = (f"{tasks[task]['results'][label]['score']:.0%}" for task in SHOWN)
            reads = fmean(one["prefill_reads"]["total"] for one in results)
            yield name, f"{100 * fmean(one['score'] for one in results):.1f}%", *some, f"{reads:.0%}"


def auto(length: int) -> tuple[float, float]:
    """Points that plans of the first prompts lose in decoding, and the share of bytes."""
    reads = (t["results"]["kascade plan=auto"]["decode_reads"]["total"] for t in prompt_tasks(length).values())
    return lost("dense, decoding by `plan=auto`", length), fmean(reads)


def test_options_of_the_prompt() -> None:
    for length, title in ((4096, "RULER 4096"), (16384, "RULER 16,384")):
        (rows,) = (rows for head, rows in tables(PAGE) if head[:2] == ("prompt", title))
        assert rows == list(prompt_rows(length))
    words = " ".join(PAGE.split())
    both = "{:.1f} points** at 16,384 tokens and {:.1f} at 4096"
    for text in (
        "`k=0.2 sinks=4 recent=64` loses "
        + both.format(*(lost("`k=0.2 sinks=4 recent=64`", n) for n in (16384, 4096))),
        "Twice the keys alone lose {:.1f} and {:.1f}".format(*(lost("`k=0.2`", n) for n in (16384, 4096))),
        f"`lse_every=16` costs {lost('`lse_every=16`', 4096, 'default'):.1f} points",
        f"({-lost('`lse_every=16`', 16384, 'default'):.1f} points more than exact scores)",
        f"`score_every=4` loses {lost('`score_every=4`', 16384):.1f} points**, and {lost('`score_every=4`', 4096):.1f}",
        "loses {:.1f} points more than a set per KV head at 4096 tokens, {:.1f} at 16,384".format(
            *(lost("`heads=all`, in decoding too", n, "default") for n in LENGTHS)
        ),
        "loses {:.1f} points at {:.0%} of the bytes, and {:.1f} at {:.0%}".format(*auto(4096), *auto(16384)),
        "`cwe` falls by {:.0f} and {:.0f} points".format(
            *(100 * (cwe[BOTH]["score"] - cwe["kascade/dense"]["score"])
              for cwe in (prompt_tasks(n)["cwe"]["results"] for n in LENGTHS))
        ),
    ):  # fmt: skip
        assert text in words, text


def test_decoding_after_a_sparse_prompt() -> None:
    found = record("mini-kascade-after-4096")["tasks"]["cwe"]["results"]
    oracle = "kascade/oracle_top_k k={} dense_layers=[0]"
    labels = "kascade/dense", oracle.format(0.4), oracle.format(0.1), BOTH, "dense"
    scores = [f"{found[label]['score']:.0%}" for label in labels]
    text = (
        "{} with all keys, {} with the exact top 40%, {} with the exact top 10% and {} with kascade's own 10%; without "
        "a sparse prompt {}"
    )
    assert text.format(*scores) in " ".join(PAGE.split())
    assert {len(found[label]["answers"]) for label in labels} == {24}


def test_prose_after_a_sparse_prompt() -> None:
    found, words = record("mini-kascade-both-perplexity-4096")["results"], " ".join(PAGE.split())
    names = "dense", BOTH, f"{BOTH} prefill.k=0.2 prefill.sinks=4 prefill.recent=64"
    read = [f"{found[name]['prefill']['perplexity']:.2f}" for name in names]
    assert "what is read from {} to {}, with `k=0.2 sinks=4 recent=64` to {}".format(*read) in words
    lost = [found[name]["decode"]["nll"] - found["dense"]["decode"]["nll"] for name in (*names[1:], "kascade")]
    assert "{:.3f} and {:.3f} nats a token, against {:.3f}".format(*lost) in words


def times(group: str, case: str) -> dict[str, float]:
    """Milliseconds by entry, of FlashAttention-3 its best."""
    found = {e["name"]: e["microseconds"]["median"] / 1e3 for e in record(group)["cases"][case]["entries"]}
    return {**found, "fa3": min(ms for name, ms in found.items() if name.startswith("FlashAttention-3"))}


def times_of_a_model(case: str) -> tuple[float, float, float]:
    """Milliseconds of a step with kascade and with dense attention, and the ratio."""
    found = {e["name"]: e["microseconds"]["median"] / 1e3 for e in record("decode-8b-sparse")["cases"][case]["entries"]}
    mine, dense = found["kascade: captured step"], found["captured step"]
    return mine, dense, dense / mine


def attention_of_a_model(case: str) -> tuple[float, float]:
    """Milliseconds of a step without attention, and the judged ratio of what attention adds to it."""
    found = record("decode-8b-sparse")["cases"][case]
    (without,) = (e["microseconds"]["median"] / 1e3 for e in found["entries"] if e["name"] == "without attention")
    (ratio,) = (t["got"] for t in found["targets"] if t["quantity"] == "attention speed over")
    return without, ratio


def fastest(ms: dict[str, float]) -> float:
    """Of the dense kernels."""
    return min(x for name, x in ms.items() if name.startswith(("Flash", "torch")))


def prefill_rows() -> Iterator[Row]:
    measured = record("kascade-prefill")["cases"]
    for tokens in (2, 4, 8, 16, 32, 64, 128, 256):
        cells = []
        for place, percent in enumerate((10, 20, 30)):
            name = f"kascade-prefill-{tokens}k-{percent}pct"
            if name not in measured:
                cells.append("-")
                continue
            ms = times("kascade-prefill", name)
            paper = TABLE_3_PREFILL.get(tokens, ())[place : place + 1]
            told = "".join(f" ({2.19 if (tokens, percent) == (128, 10) else x:.2f}x)" for x in paper)
            cells.append(f"{ms['kascade']:.2f} ms, {ms['fa3'] / ms['kascade']:.2f}x{told}")
        yield f"{tokens}K", f"{times('kascade-prefill', f'kascade-prefill-{tokens}k-10pct')['fa3']:.2f} ms", *cells


def test_speed() -> None:
    (rows,) = (rows for head, rows in tables(PAGE) if head[:2] == ("tokens", "FlashAttention-3"))
    assert rows == list(prefill_rows())
    words = " ".join(PAGE.split())
    short, long = (times("kascade-prefill", f"kascade-prefill-{n}k-10pct") for n in (2, 128))
    assert short["fa3"] < short["kascade"] < short["torch SDPA cudnn"]
    both = long["anchor: scores"] + long["anchor: log-sums"]
    first = record("first-token")["cases"]["first-token-32k"]
    (dense, kascade), plan = (e["microseconds"]["median"] / 1e6 for e in first["entries"]), first["automatic_plan"]
    longer = record("first-token")["cases"]["first-token-128k"]["automatic_plan"]
    decoded = [times("kascade-decode", f"kascade-{n}k-b1") for n in (256, 512)]
    prefill = record("kascade-prefill")["cases"]
    missed = [t["missed_by"] for name, c in prefill.items() for t in c["targets"]
              if name in CASES and "sampled" not in name and not t["reached"]]  # fmt: skip
    sampled = [times("kascade-prefill", f"kascade-prefill-sampled-{n}k-10pct") for n in (32, 128)]
    mass = min(prefill[f"kascade-prefill-sampled-{n}k-10pct"]["mass_of_chosen"] for n in (32, 128))
    later = [e["microseconds"]["median"] / 1e6 for e in record("first-token")["cases"]["first-token-128k"]["entries"]]
    steps = [times_of_a_model(f"8b-kascade-128k-b{batch}") for batch in (1, 4)]
    third = times("kascade-prefill", "kascade-prefill-8k-30pct")
    parts = [attention_of_a_model(f"8b-kascade-128k-b{batch}") for batch in (1, 4)]
    qwen = times("kascade-decode", "kascade-qwen3-128k-b1")
    for text in (
        f"miss its ratios by {min(missed):.1%} to {max(missed):.1%} at 32K and 64K",
        "take {:.2f} ms at 32K ({:.2f}x) and {:.2f} ms at 128K ({:.2f}x; target 3)".format(
            *(y for x in sampled for y in (x["kascade"], x["fa3"] / x["kascade"]))
        ),
        f"at least {100 * mass:.2f}% of the weight of the best keys",
        f"comes after {later[1]:.2f} s instead of {later[0]:.2f} ({later[0] / later[1]:.2f}x; target 1.8)",
        f"a layer takes {long['kascade']:.1f} ms, FlashAttention-3 {long['fa3']:.1f}",
        f"reuse layer takes {long['reuse layer']:.1f} ms, an anchor {long['anchor']:.0f}",
        f"(scores and log-sums {both:.0f} of it)",
        f"after {kascade:.2f} s instead of {dense:.2f} with dense attention ({dense / kascade:.2f}x;",
        f"takes {plan['seconds']:.2f} s more at 32K, {plan['share_of_dense']:.0%} of the dense prefill (target: 15%), "
        f"and {longer['share_of_dense']:.0%} at 128K",
        "512K is {:.2f} and {:.2f} times".format(*(fastest(x) / x["kascade"] for x in decoded)),
        "{:.2f} and {:.2f} times as fast as FlashAttention-3".format(*(x["fa3"] / x["kascade"] for x in decoded)),
        "takes {:.2f} ms instead of {:.2f} ({:.2f}x), and".format(*steps[0]),
        "{:.2f} instead of {:.2f} ({:.2f}x) with four sequences".format(*steps[1]),
        "attends to nothing takes {:.2f} and {:.2f} ms".format(*(x for x, _ in parts)),
        "is {:.2f} and {:.2f} times as fast as dense attention.".format(*(x for _, x in parts)),
        f"at 8K ({third['fa3'] / third['kascade']:.2f}x), and is not made dense there: a session's own dense kernel, "
        f"cuDNN, takes {third['torch SDPA cudnn']:.2f} ms",
        f"128K gives {fastest(qwen) / qwen['kascade']:.2f}x",
    ):
        assert text in words, text
