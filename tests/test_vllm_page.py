"""Scores and times in docs/vllm.md are those of its records."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.doc_tables import ROOT, record, section, tables
from tests.test_vllm_measurements import script

PAGE = (ROOT / "docs" / "vllm.md").read_text()
TIMES = section(PAGE, "Times", "Methods")
WORDS = " ".join(PAGE.split())
PLAIN = "FLASH_ATTN"


def measurements(case: str) -> list[dict[str, Any]]:
    name = "vllm-times" if case in record("vllm-times")["cases"] else "vllm-times-unpadded"
    found: list[dict[str, Any]] = record(name)["cases"][case]["measurements"]
    return found


def measured(case: str, method: str, batch: int) -> dict[str, Any] | None:
    found = measurements(case)
    return next((one for one in found if (one["method"], one["batch"]) == (method, batch)), None)


def time(case: str, method: str, batch: int) -> float:
    one = measured(case, method, batch)
    assert one is not None
    return float(one["tpot_ms"])


def speed_up(case: str, method: str, batch: int, base: dict[str, Any]) -> float | None:
    """Of all requests' tokens over those of FLASH_ATTN; None if it was not measured. Methods fit different batches."""
    fitting = case == "tpot-8k-fit"
    for one in measurements(case):
        if one["method"] == method and (one["fits"] if fitting else one["batch"] == batch):
            return float(base["tpot_ms"] / one["tpot_ms"] * one["batch"] / base["batch"])
    return None


def test_steps() -> None:
    ((head, rows),) = tables(TIMES)
    cases = [case for case in record("vllm-times")["cases"] if case.startswith("tpot")] + ["tpot-8k-fit"]
    shown = set[tuple[str, int]]()
    for place, plain, *ratios in rows:
        context, batch = place.split(",")[0], int(place.split("batch ")[1].split()[0].rstrip(","))
        two, fits = "two GPUs" in place, "as many as fit" in place
        case = "tpot-2gpu" if two else f"tpot-{context.lower()}{'-fit' if context == '8K' and fits else ''}"
        assert (case, batch) not in shown, place
        shown.add((case, batch))
        base = measured(case, PLAIN, batch)
        assert base is not None and plain == f"{base['tpot_ms']:.2f} ms", place
        for method, cell in zip((name.strip("`") for name in head[2:]), ratios, strict=True):
            found = speed_up(case, f"{method} heads=all" if two else method, batch, base)
            assert cell == ("-" if found is None else f"{found:.2f}"), (place, method)
        assert base["fits"] == (fits or (context, batch) == ("8K", 32))  # 32: as many as may run
        tokens = int(context.removesuffix("K")) * 1024
        room = tokens + 80 + base["page"]  # 80 tokens of the answer, and a page
        assert base["steps"] == 63 and (not fits or (batch + 1) * room > base["cache_tokens"]), place
    assert shown == {(case, one["batch"]) for case in cases for one in measurements(case) if one["method"] == PLAIN}


def test_requests_that_arrive_at_once() -> None:
    found = {one["method"]: one for one in measurements("load-at-once")}
    speeds = {name: f"{one['tokens_per_second']:.0f}" for name, one in found.items()}
    assert f"FlashAttention generated {speeds[PLAIN]} tokens a second, `dense` {speeds['dense']} and" in WORDS
    assert f"and `kascade` {speeds['kascade']}." in WORDS
    log = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    assert (
        f"{speeds[PLAIN]} tokens/s with FlashAttention, {speeds['dense']} with `dense` and {speeds['kascade']}" in log
    )
    gaps = [f"{found[name]['gap_p99_ms'] / 1e3:.2f}" for name in (PLAIN, "dense", "kascade")]
    assert f"latencies is {gaps[0]}, {gaps[1]} and {gaps[2]} s" in log
    assert f"`dense` and {speeds['kascade']} with `kascade`" in log
    (fit,) = (one["batch"] for one in measurements("tpot-8k-fit") if one["method"] == "kascade")
    assert f"`kascade` has room for {fit} requests" in WORDS and "`dense` is 7% slower than FlashAttention" in WORDS
    assert record("vllm-times-unpadded")["engines"][0]["options"]["max_num_seqs"] == 112


def test_what_was_measured_twice() -> None:
    found = record("vllm-times-unpadded")["cases"]

    def speeds(method: str, case: str) -> str:
        targets = [one for one in found[case]["targets"] if one["of"].startswith(f"{method},")]
        return ", ".join(f"{one['got']:.2f}" for one in targets)

    assert [one["batch"] for one in found["tpot-128k"]["measurements"][:3]] == [1, 4, 6]
    ours, dense = (f"{speeds(name, 'tpot-8k')} and {speeds(name, 'tpot-128k')}" for name in ("kascade", "dense"))
    assert f"Speed-ups of `kascade`: {ours}. Of `dense`: {dense}." in WORDS
    (first,) = (one["got"] for one in found["ttft"]["targets"] if one["of"].startswith("kascade"))
    assert f"TTFT with `kascade` took {1 / first - 1:.1%} longer" in WORDS
    missed = [(one["of"], case) for case in found for one in found[case]["targets"] if one.get("reached") is False]
    assert missed == [("dense, batch as many as fit", "tpot-8k-fit"), ("kascade, batch 32", "load-at-once")]


def test_scores() -> None:
    found, compare = record("vllm-quality"), script("quality").compare
    assert not found["dirty"] and found["device"]["name"] == "NVIDIA H200" and found["versions"]["vllm"] == "0.26.0"
    ((_, rows),) = tables(section(PAGE, "Quality", "Times"))
    assert [method.strip("`") for method, *_ in rows] == list(found["vllm"])
    for name, *shown in rows:
        method, expected = name.strip("`"), list[str]()
        for length in ("4096", "16384"):
            one = compare(found["loop"][method][length], found["vllm"][method][length])
            assert one.agree and len(found["vllm"][method][length]) == 11, name
            assert all(len(scores) == found["samples"] == 20 for scores in found["vllm"][method][length].values())
            change = f"{one.difference:+.3f}".replace("-0.000", "0.000")
            expected += [f"{one.loop:.3f} ± {one.half:.3f}", f"{one.vllm:.3f}", change]
        assert shown == expected, name


def test_the_record_is_of_a_clean_tree_and_reaches_its_targets() -> None:
    found = record("vllm-times")
    assert not found["dirty"] and found["device"]["name"] == "NVIDIA H200" and found["versions"]["vllm"] == "0.26.0"
    bounds = [
        (target["of"].split(",")[0], case, target["bound"], target["reached"])
        for case, measured in found["cases"].items()
        for target in measured["targets"]
        if "bound" in target
    ]
    assert Counter((method, case) for method, case, _, _ in bounds) == {
        ("kascade", "ttft"): 1, ("dense", "tpot-8k"): 3, ("dense", "tpot-128k"): 3, ("kascade", "tpot-128k"): 3,
        ("kascade", "tpot-256k"): 2, ("kascade", "load"): 1, ("kascade heads=all", "tpot-2gpu"): 1,
    }  # fmt: skip
    assert all(reached for *_, reached in bounds)


def test_sentences() -> None:
    found = record("vllm-times")
    started = {one["method"]: one["start_seconds"] for one in found["engines"] if one["ranks"] == 1}
    reads = {one["method"]: one.get("read_of_dense") for one in found["engines"]}
    load, first = (found["cases"][case]["measurements"] for case in ("load", "ttft"))
    plain, ours = (next(one for one in load if one["method"] == name) for name in (PLAIN, "kascade"))
    ttft = {one["method"]: f"{one['ttft_ms']:,.0f}" for one in first}
    room = {name: measured("tpot-128k", name, 4)["cache_tokens"] for name in (PLAIN, "dense", "kascade", "quest")}  # type: ignore[index]
    assert ttft[PLAIN] == ttft["dense"] and room[PLAIN] == room["dense"] and found["captured"] == [1, 4, 8, 16, 32]
    assert f"{plain['tokens_per_second']:.0f}" == f"{ours['tokens_per_second']:.0f}"
    dense, kascade = (time("tpot-128k", name, 6) for name in ("dense", "kascade"))
    for text in (
        f"took {started['kascade']:.0f} s to start with `kascade`, and {started[PLAIN]:.0f} s with vLLM's Flash",
        f"`kascade` read {reads['kascade']:.0%} of dense attention's bytes in these runs, "
        f"`quest` {reads['quest']:.0%}, `streaming_llm` {reads['streaming_llm']:.0%}",
        f"`dense`, which reads the same keys, is {time('tpot-128k', PLAIN, 6) / dense:.2f} times as fast",
        f"Over `dense`, `kascade` is {dense / kascade:.2f} times as fast",
        f"{ttft[PLAIN]} ms with FlashAttention and with `dense`, {ttft['kascade']} ms with `kascade`",
        f"Both engines keep pace: {plain['tokens_per_second']:.0f} tokens a second",
        f"is {plain['gap_p50_ms']:.2f} ms with FlashAttention and {ours['gap_p50_ms']:.2f} with `kascade`",
        f"The 99th percentile is {plain['gap_p99_ms']:.1f} and {ours['gap_p99_ms']:.1f} ms.",
        f"held {room[PLAIN]:,} tokens with FlashAttention, and {room['kascade']:,} with `kascade`",
        f"With `quest` it held {room['quest']:,} tokens",
    ):
        assert text in WORDS, text


@pytest.mark.parametrize("ranks", [1, 2])
def test_methods_add_no_allocations(ranks: int) -> None:
    found = [one for one in record("vllm-times")["engines"] if one["ranks"] == ranks]
    (plain,) = (one["allocations_since_start"] for one in found if one["method"] == PLAIN)
    assert all(max(one["allocations_since_start"]) <= max(plain) for one in found)
    assert max(plain) == {1: 7, 2: 8}[ranks] and "FlashAttention's: 7 times, and 8 times a rank on two GPUs" in WORDS
