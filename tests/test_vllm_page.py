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
LOG = " ".join((ROOT / "docs" / "performance.md").read_text().split())
PLAIN = "FLASH_ATTN"


def measurements(case: str) -> list[dict[str, Any]]:
    name = "vllm-times-two-gpus" if case == "tpot-2gpu" else "vllm-times"
    found: list[dict[str, Any]] = record(name)["cases"][case]["measurements"]
    return found


def before_padding(case: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record("vllm-times-unpadded")["cases"][case]["measurements"]
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
    cases = [case for case in record("vllm-times")["cases"] if case.startswith("tpot")] + ["tpot-2gpu"]
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
        assert base["fits"] == fits
        tokens = int(context.removesuffix("K")) * 1024
        room = tokens + 80 + base["page"]  # 80 tokens of the answer, and a page
        assert base["steps"] == 63 and (not fits or (batch + 1) * room > base["cache_tokens"]), place
    assert shown == {(case, one["batch"]) for case in cases for one in measurements(case) if one["method"] == PLAIN}


def test_requests_that_arrive_at_once() -> None:
    found = {one["method"]: one for one in measurements("load-at-once")}
    plain, dense, ours = (f"{found[name]['tokens_per_second']:.0f}" for name in (PLAIN, "dense", "kascade"))
    gaps = [f"{found[name]['gap_p99_ms']:.0f}" for name in (PLAIN, "dense", "kascade")]
    before = {one["method"]: one for one in before_padding("load-at-once")}
    slow = [f"{before[name]['tokens_per_second']:.0f}" for name in (PLAIN, "dense", "kascade")]
    late = [f"{before[name]['gap_p99_ms'] / 1e3:.2f}" for name in (PLAIN, "dense", "kascade")]
    assert f"gave {slow[0]} tokens/s, `dense` {slow[1]} and `kascade` {slow[2]}." in LOG
    assert f"latencies was {late[0]}, {late[1]} and {late[2]} s, and is now 0.0{gaps[0]}, 0.0{gaps[1]}" in LOG
    assert f"FlashAttention generates {plain} tokens a second, `dense` {dense} and `kascade` {ours}." in WORDS
    assert f"inter-token latencies is {gaps[0]}, {gaps[1]} and {gaps[2]} ms" in WORDS
    assert f"{plain} tokens/s with FlashAttention, {dense} with `dense` and {ours} with `kascade`, and no kernel" in LOG


def test_as_many_requests_as_fit_at_8k() -> None:
    plain, dense = (time("tpot-8k-fit", name, 108) for name in (PLAIN, "dense"))
    (fit,) = (one["batch"] for one in measurements("tpot-8k-fit") if one["method"] == "kascade")
    assert f"`kascade` has room for {fit} requests" in WORDS
    before = {one["method"]: one["tpot_ms"] for one in before_padding("tpot-8k-fit")}
    ratio = before["dense"] / before[PLAIN]
    assert f"a step with `dense` took {before['dense']:.2f} ms, and {before[PLAIN]:.2f} with Flash" in LOG
    assert f"{ratio:.2f} times (`vllm-times-unpadded`)" in LOG
    assert f"Found (`vllm-times`): {dense:.2f} ms, {before['dense'] - dense:.2f} ms less" in LOG
    assert f"FlashAttention took {plain:.2f} ms, {plain - before[PLAIN]:.1f} ms more than before" in LOG
    assert f"So the ratio fell from {ratio:.2f} to {dense / plain:.2f}." in LOG


def test_what_was_measured_twice() -> None:
    kept, longer = record("vllm-times-unpadded")["cases"], dict[tuple[str, str, int], float]()
    for case in (name for name in kept if name.startswith("tpot")):
        for one in before_padding(case):
            if one["method"] in (PLAIN, "dense"):
                now = time(case, one["method"], one["batch"])
                longer[case, one["method"], one["batch"]] = now / one["tpot_ms"] - 1
    assert max(longer.values()) == longer["tpot-8k-fit", PLAIN, 108] and "steps that took up to 4% less" in WORDS
    assert longer.pop(("tpot-8k-fit", "dense", 108)) < 0
    assert min(longer.values()) > 0.01 and max(longer.values()) < 0.045 and "take 1 to 4% longer" in LOG
    speeds = [
        f"{target['got']:.2f}"
        for case in ("tpot-8k", "tpot-8k-fit")
        for target in kept[case]["targets"]
        if target["of"].startswith("dense")
    ]
    assert f"1, 4, 32 and 108 were {', '.join(speeds[:-1])} and {speeds[-1]}." in WORDS


def test_no_kernel_was_compiled_after_the_start() -> None:
    compiled = [one["kernels_compiled"] for case in record("vllm-times")["cases"] for one in measurements(case)]
    assert len(compiled) == 39 and not any(compiled)
    assert "In none of these cases did an engine compile any of longreach's kernels after its start" in WORDS


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


def test_the_records_are_of_clean_trees_and_reach_their_targets() -> None:
    records = [record("vllm-times"), record("vllm-times-two-gpus")]
    for one in records:
        assert not one["dirty"] and one["device"]["name"] == "NVIDIA H200" and one["versions"]["vllm"] == "0.26.0"
    bounds = [
        (target["of"].split(",")[0], case, target["reached"])
        for one in records
        for case, measured in one["cases"].items()
        for target in measured["targets"]
        if "bound" in target
    ]
    assert Counter((method, case) for method, case, _ in bounds) == {
        ("kascade", "ttft"): 1, ("dense", "tpot-8k"): 3, ("dense", "tpot-8k-fit"): 1, ("dense", "tpot-128k"): 3,
        ("kascade", "tpot-128k"): 3, ("kascade", "tpot-256k"): 2, ("kascade", "load"): 1,
        ("kascade", "load-at-once"): 1, ("kascade heads=all", "tpot-2gpu"): 1,
    }  # fmt: skip
    assert all(reached for *_, reached in bounds)


def test_sentences() -> None:
    found = record("vllm-times")
    engines = {one["method"]: one for one in found["engines"]}
    load, first = (found["cases"][case]["measurements"] for case in ("load", "ttft"))
    plain, ours = (next(one for one in load if one["method"] == name) for name in (PLAIN, "kascade"))
    ttft = {one["method"]: f"{one['ttft_ms']:,.0f}" for one in first}
    room = {one["method"]: one["cache_tokens"] for one in found["cases"]["tpot-128k"]["measurements"]}
    assert room[PLAIN] == room["dense"] == room["streaming_llm"]
    dense, kascade = (time("tpot-128k", name, 6) for name in ("dense", "kascade"))
    at_8k = [time("tpot-8k", "dense", batch) / time("tpot-8k", PLAIN, batch) for batch in (4, 32)]
    at_8k.append(time("tpot-8k-fit", "dense", 108) / time("tpot-8k-fit", PLAIN, 108))
    assert f"`dense` is {min(at_8k) - 1:.0%}".rstrip("%") + f" to {max(at_8k) - 1:.0%} slower at 8K" in WORDS
    options = [one["options"] for one in engines.values()]
    assert all(one == options[0] for one in options) and len(options) == 5
    assert (options[0]["max_num_seqs"], options[0]["max_model_len"]) == (112, 258 * 1024)
    started = {name: f"{one['start_seconds']:.0f}" for name, one in engines.items()}
    sizes = [str(size) for size in options[0]["captured"]]
    for text in (
        f"with graphs for {', '.join(sizes[:-1])} and {sizes[-1]} requests took "
        f"{started['kascade']} s to start with `kascade`, {started['quest']} s with `quest`, "
        f"{started['dense']} s with `dense`",
        f"and {started['streaming_llm']} s with `streaming_llm`. vLLM's FlashAttention took {started[PLAIN]} s.",
        f"`kascade` read {engines['kascade']['read_of_dense']:.0%} of dense attention's bytes in these runs, "
        f"`quest` {engines['quest']['read_of_dense']:.0%}, "
        f"`streaming_llm` {engines['streaming_llm']['read_of_dense']:.0%}",
        f"`dense`, which reads the same keys, is {time('tpot-128k', PLAIN, 6) / dense:.2f} times as fast",
        f"Over `dense`, `kascade` is {dense / kascade:.2f} times as fast",
        f"{ttft[PLAIN]} ms with FlashAttention, {ttft['dense']} with `dense` and {ttft['kascade']} with `kascade`",
        f"FlashAttention generates {plain['tokens_per_second']:.1f} tokens a second, "
        f"`kascade` {ours['tokens_per_second']:.1f}.",
        f"is {plain['gap_p50_ms']:.2f} ms with FlashAttention and {ours['gap_p50_ms']:.2f} with `kascade`",
        f"The 99th percentile is {plain['gap_p99_ms']:.1f} and {ours['gap_p99_ms']:.1f} ms.",
        f"held {room[PLAIN]:,} tokens with FlashAttention, `dense` and `streaming_llm`, {room['quest']:,} with "
        f"`quest` and {room['kascade']:,} with `kascade`",
    ):
        assert text in WORDS, text


@pytest.mark.parametrize("ranks", [1, 2])
def test_methods_add_no_allocations(ranks: int) -> None:
    found = record({1: "vllm-times", 2: "vllm-times-two-gpus"}[ranks])["engines"]
    (plain,) = (one["allocations_since_start"] for one in found if one["method"] == PLAIN)
    assert all(max(one["allocations_since_start"]) <= max(plain) for one in found)
    assert max(plain) == {1: 4, 2: 8}[ranks] and "FlashAttention's: 4 times, and 8 times a rank on two GPUs" in WORDS
