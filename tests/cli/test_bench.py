"""longreach bench, on tiny shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longreach.bench.case import Case
from longreach.bench.cases import CASES, SPOTS
from longreach.bench.mac.cases import RATES
from longreach.bench.record import read
from longreach.errors import OutOfMemory
from longreach.records import write


def test_list_names_cases_and_what_they_must_reach(longreach: Callable) -> None:
    code, out, _ = longreach("bench", "list", "list-decode")
    assert code == 0 and "list-10pct-128k-b1" in out and "2.3" in out and "dense" not in out
    code, out, _ = longreach("bench", "list", "--json")
    names = {case["name"] for case in json.loads(out)}
    assert code == 0 and {"dense-128k-b32", "rows-8-128k-b1", "magicpig-128k-b1"} <= names


def test_run_writes_a_record_case_by_case(longreach: Callable, tmp_path: Path) -> None:
    options = ("--tiny", "--quick", "--out", tmp_path)
    code, out, err = longreach("bench", "run", "span-1280-sinks-b1", *options)
    assert (code, err) == (0, "") and "contiguous" in out
    assert longreach("bench", "run", "span-1280-plain-b1", *options).code == 0
    record = read(tmp_path / "span-decode.json")
    assert list(record["cases"]) == ["span-1280-sinks-b1", "span-1280-plain-b1"]
    case = record["cases"]["span-1280-plain-b1"]
    assert {"commit", "dirty", "versions", "device", "shape", "timing", "seed"} <= set(case)
    assert all(len(e["microseconds"]["replays"]) == 7 and "triton" in e["launched"] for e in case["entries"])
    assert [e["name"] for e in case["entries"]] == ["contiguous", "page 16", "page 64", "page 256"]
    assert "functional" in case["timing"]["how"] and case["targets"] == []


def test_a_model_decodes_beside_transformers(longreach: Callable, tmp_path: Path) -> None:
    assert "share of limit >= 0.78" in longreach("bench", "list", "decode-8b").out
    code, out, err = longreach("bench", "run", "8b-8k-b1", "--tiny", "--quick", "--out", tmp_path)
    assert (code, err) == (0, "") and "reached of it" in out
    case = read(tmp_path / "decode-8b.json")["cases"]["8b-8k-b1"]
    ours, loop, theirs = case["entries"]
    assert (ours["name"], loop["name"]) == ("captured step", "generate") and theirs["who"] == "transformers_static"
    assert all(0 <= e["error"] <= case["error_bound"] for e in case["entries"])
    assert case["bytes"]["kv"] == 2 * 2 * 2 * 256 * 16 * 4  # layers, K and V, heads, tokens, channels, bytes
    assert case["limit"]["microseconds"] == pytest.approx(case["bytes_needed"] / 4.26e6)
    assert {"model", "fill", "compile_and_capture"} <= set(case["setup_seconds"])


def test_a_step_of_mac_says_that_hits_are_forced(
    longreach: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last of the rates, with the guard and without."""
    whole = CASES["mac-rates-32k-b1"]
    hits = whole.reuse.hits
    assert len(hits) == 2 * len(RATES)
    few = (hits[0], hits[len(RATES) - 1], hits[len(RATES)], hits[-1])
    monkeypatch.setitem(CASES, whole.name, replace(whole, reuse=replace(whole.reuse, hits=few)))
    code, out, err = longreach("bench", "run", "mac-rates-32k-b1", "--tiny", "--quick", "--out", tmp_path)
    assert (code, err) == (0, "") and "hits are forced" in out and "rate 0, guard" in out and "no guard, than" in out
    case = read(tmp_path / "mac-rates.json")["cases"]["mac-rates-32k-b1"]
    assert len(case["entries"]) == len(few) + 2


def test_a_case_that_does_not_fit_stops_no_other(
    longreach: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longreach.bench.mac import run

    check = run.check_room

    def small(case: Case, device: torch.device) -> None:
        if case.shape.batch > 1:
            raise OutOfMemory(f"{case.name}: too large")
        check(case, device)

    monkeypatch.setattr(run, "check_room", small)
    names = "mac-hit-128k-b8", "mac-hit-128k-b1"
    code, _, err = longreach("bench", "run", *names, "--tiny", "--quick", "--out", tmp_path)
    assert code == 3 and "left out: mac-hit-128k-b8: too large" in err
    assert list(read(tmp_path / "mac-hit.json")["cases"]) == ["mac-hit-128k-b1"]


def test_a_baseline_left_out_is_named(longreach: Callable, tmp_path: Path) -> None:
    code, out, _ = longreach("bench", "run", "dense-32k-b1", "--tiny", "--quick", "--json", "--out", tmp_path)
    assert code == 0
    case = json.loads(out)["dense-32k-b1"]
    assert case["baselines"]["left_out"] == ["flash_attention_3", "flashinfer"]
    assert {e["who"] for e in case["entries"]} == {"longreach", "torch_sdpa"}


def test_names_may_stand_after_options(longreach: Callable, tmp_path: Path) -> None:
    span = "span-1280-sinks-b1", "span-1280-plain-b1"
    options = "--tiny", "--without", "flashinfer", "--out", str(tmp_path), "--json"
    code, out, _ = longreach("bench", "run", *options, *span)
    assert code == 0 and set(json.loads(out)) == set(span)
    code, out, _ = longreach("bench", "run", span[0], *options, span[1])
    assert code == 0 and set(json.loads(out)) == set(span)
    code, _, err = longreach("bench", "run", *options, span[0], "--slow")
    assert code == 2 and "unrecognized arguments" in err and "--slow" in err


def test_prefill_is_measured_by_each_implementation(longreach: Callable, tmp_path: Path) -> None:
    code, out, _ = longreach("bench", "run", "prefill-8k", "--tiny", "--quick", "--out", tmp_path, "--json")
    case = json.loads(out)["prefill-8k"]
    assert code == 0 and case["auto"] == "sdpa_cpu"
    ours, theirs = case["entries"]
    assert (ours["name"], theirs["who"]) == ("reference", "torch_sdpa")
    assert case["flops_needed"] == 4 * 4 * 16 * (256 * 257 // 2)  # heads, channels, keys that rows see
    assert ours["tflop_per_s"] == pytest.approx(case["flops_needed"] / ours["microseconds"]["median"] / 1e6)


def test_another_implementation_has_another_name(longreach: Callable, tmp_path: Path) -> None:
    run = "bench", "run", "span-1280-sinks-b1", "--tiny", "--quick", "--out", tmp_path, "--impl", "reference"
    assert longreach(*run).code == 0
    (name,) = read(tmp_path / "span-decode.json")["cases"]
    assert name == "span-1280-sinks-b1 impl=reference"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--tiny", "--out", "x", "--impl", "cuda"), "sdpa_flash"),
        (("run", "--tiny", "--out", "x", "--seed", "1" + "0" * 23), "--seed"),
        (("run", "--tiny", "--out", "x", "--seed", "-1"), "--seed"),
        (("run", "dense-128k-b2", "--tiny", "--out", "x"), "dense-128k-b32"),
        (("run", "--tiny"), "--out"),
        (("run", "--tiny", "--out", "x", "--without", "fa2"), "flashinfer"),
        (("check", "dense-decode"), "no names"),
        (("check", "--spot", "dense"), "dense-decode"),
        (("check", "--spot", "--tiny"), "--out"),
        (("run", "--spot", "--tiny", "--out", "x"), "--spot belongs to bench check"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(longreach: Callable, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = longreach("bench", *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(longreach: Callable) -> None:
    code, _, err = longreach("bench", "run", "dense-decode")
    assert code == 2 and "--tiny" in err


def test_check_fails_for_a_stale_record(longreach: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("bench", "run", "rows-8-128k-b1", "--tiny", "--quick", "--out", tmp_path)
    monkeypatch.setenv("LONGREACH_COMMIT", "abc")
    assert longreach(*run).code == 0
    assert longreach("bench", "check", "--out", tmp_path).code == 0
    monkeypatch.setenv("LONGREACH_COMMIT", "abc+dirty")
    assert longreach(*run).code == 0
    code, out, _ = longreach("bench", "check", "--out", tmp_path)
    assert code == 1 and "rows-8-128k-b1" in out and "dirty" in out


def spot(longreach: Callable, folder: Path, *names: str) -> tuple[int, str]:
    code, out, err = longreach("bench", "check", "--spot", *names, "--tiny", "--quick", "--out", folder)
    assert err == ""
    return code, out


def test_a_spot_check_confirms_a_group_and_carries_old_cases_over(
    longreach: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGREACH_COMMIT", "abc")
    names = SPOTS["span-decode"][0], "span-1280-plain-b1"
    assert longreach("bench", "run", *names, "--tiny", "--quick", "--out", tmp_path).code == 0
    path = tmp_path / "span-decode.json"
    record = read(path)
    for case in record["cases"].values():  # as records were before they held launches
        case["kernels"] = {"attend": "0"}
        for entry in case["entries"]:
            del entry["launched"]
    write(path, record)
    code, out, _ = longreach("bench", "check", "--out", tmp_path)
    assert code == 1 and out.count("--spot span-decode") == 2

    monkeypatch.setattr("longreach.bench.spot.WITHIN", 0.0)
    code, out = spot(longreach, tmp_path)
    assert code == 1 and "span-decode: not confirmed; measure it again" in out and "not within" in out
    assert read(path) == record

    monkeypatch.setattr("longreach.bench.spot.WITHIN", 1e9)
    monkeypatch.setenv("LONGREACH_COMMIT", "def")
    code, out = spot(longreach, tmp_path, "span-decode")
    assert code == 0 and "span-decode: confirmed" in out
    written = read(path)
    assert written["confirmed"]["commit"] == "def" and list(written["confirmed"]["cases"]) == [names[0]]
    assert all(c["commit"] == "abc" and c["carried_over"] and "kernels" not in c for c in written["cases"].values())
    assert all("launched" in entry for entry in written["cases"][names[0]]["entries"])
    assert longreach("bench", "check", "--out", tmp_path).code == 0
    assert spot(longreach, tmp_path)[0] == 0  # now with launches to compare


def test_a_spot_check_names_what_it_cannot_measure_and_goes_on(
    longreach: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.bench.spot.WITHIN", 1e9)
    spots = SPOTS["span-decode"][0], SPOTS["list-decode"][0]
    assert longreach("bench", "run", *spots, "--tiny", "--quick", "--out", tmp_path).code == 0
    record = read(tmp_path / "span-decode.json")
    record["cases"] = {"span-1280-plain-b1": record["cases"][spots[0]]}
    write(tmp_path / "span-decode.json", record)
    code, out = spot(longreach, tmp_path)
    assert code == 1 and f"holds no measurement of {spots[0]}" in out
    assert "span-decode: not confirmed" in out and "list-decode: confirmed" in out


def test_methods_steps_and_what_users_get_are_written_as_they_are_measured(longreach: Callable, tmp_path: Path) -> None:
    options = ("--tiny", "--quick", "--out", tmp_path)
    code, out, err = longreach("bench", "run", "user-8k-b1", *options)
    assert (code, err) == (0, "") and "first token" in out
    assert [e["name"] for e in read(tmp_path / "user.json")["cases"]["user-8k-b1"]["entries"]] == [
        "transformers generate", "attach + model.generate", "longreach.generate",
    ]  # fmt: skip
    assert "time over dense <= 0.75" in longreach("bench", "list", "steps").out
