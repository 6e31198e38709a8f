"""Times in docs/vllm.md are those of its record."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doc_tables import ROOT, record, section, tables

PAGE = (ROOT / "docs" / "vllm.md").read_text()
TIMES = section(PAGE, "Times", "Methods")
WORDS = " ".join(PAGE.split())
PLAIN = "FLASH_ATTN"


def measured(case: str, method: str, batch: int) -> dict[str, Any] | None:
    found = record("vllm-times")["cases"][case]["measurements"]
    return next((one for one in found if (one["method"], one["batch"]) == (method, batch)), None)


def time(case: str, method: str, batch: int) -> float:
    one = measured(case, method, batch)
    assert one is not None
    return float(one["tpot_ms"])


def test_steps() -> None:
    ((head, rows),) = tables(TIMES)
    cases = {case: found for case, found in record("vllm-times")["cases"].items() if case.startswith("tpot")}
    assert len(rows) == sum(
        len([one for one in found["measurements"] if one["method"] == PLAIN]) for found in cases.values()
    )
    for place, plain, *ratios in rows:
        context, batch = place.split(",")[0], int(place.split("batch ")[1].split()[0].rstrip(","))
        two = "two GPUs" in place
        case = "tpot-2gpu" if two else f"tpot-{context.lower()}"
        base = time(case, PLAIN, batch)
        assert plain == f"{base:.2f} ms", place
        for method, told in zip((name.strip("`") for name in head[2:]), ratios, strict=True):
            one = measured(case, f"{method} heads=all" if two else method, batch)
            assert told == ("-" if one is None else f"{base / one['tpot_ms']:.2f}"), (place, method)
        one = measured(case, PLAIN, batch)
        assert one is not None and one["fits"] == ("fit" in place or (context, batch) == ("8K", 32))


def test_the_record_is_of_a_clean_tree_and_reaches_its_targets() -> None:
    found = record("vllm-times")
    assert not found["dirty"] and found["device"]["name"] == "NVIDIA H200" and found["versions"]["vllm"] == "0.26.0"
    targets = [target for case in found["cases"].values() for target in case["targets"] if "bound" in target]
    assert len(targets) >= 13 and all(target["reached"] for target in targets)


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
        f"took {started['kascade']:.0f} s with `kascade` and {started[PLAIN]:.0f} s with vLLM's FlashAttention",
        f"{reads['kascade']:.0%} (`kascade`), {reads['quest']:.0%} (`quest`) and {reads['streaming_llm']:.0%} (`str",
        f"takes {time('tpot-128k', PLAIN, 6) / dense:.2f} times as long as `dense`",
        f"`kascade` is {dense / kascade:.2f} times as fast as `dense` there",
        f"{ttft[PLAIN]} ms with FlashAttention and with `dense`, {ttft['kascade']} ms with `kascade`",
        f"so both finish {plain['tokens_per_second']:.0f} tokens a second",
        f"from {plain['tpot_p50_ms']:.2f} to {ours['tpot_p50_ms']:.2f} ms with `kascade`",
        f"from {plain['gap_p99_ms']:.1f} to {ours['gap_p99_ms']:.1f} ms.",
        f"{room[PLAIN]:,} tokens with FlashAttention and with `dense`, {room['kascade']:,} with `kascade`",
        f"and {room['quest']:,} with `quest`",
    ):
        assert text in WORDS, text


@pytest.mark.parametrize("ranks", [1, 2])
def test_methods_add_no_allocations(ranks: int) -> None:
    found = [one for one in record("vllm-times")["engines"] if one["ranks"] == ranks]
    (plain,) = (one["allocations_since_start"] for one in found if one["method"] == PLAIN)
    assert all(max(one["allocations_since_start"]) <= max(plain) for one in found)
    assert ranks == 2 or max(plain) == 7
