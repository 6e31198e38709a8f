"""The group "host": a step with keys and values in host memory, with its reads, its memory, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longreach.bench import runner
from longreach.bench.case import Target
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.decoding import Decoding
from longreach.bench.format import remarks, slowest_line
from longreach.bench.host import run
from longreach.bench.host.reads import step_bytes
from longreach.bench.host.run import device_limit, run_host, wanted
from longreach.bench.host.tokens import slowest
from longreach.bench.magicpig import lists
from longreach.bench.targets import judge
from longreach.cache import host_pool
from longreach.errors import CapacityError, OutOfMemory
from longreach.methods.dense import Dense
from longreach.methods.magicpig import MagicPIG
from longreach.methods.quest import Quest
from longreach.ops.simhash.api import Weights
from longreach.runtime import LayerReport, Report

CASE_NAMES = (
    "host-96k-b1", "host-96k-batches", "host-96k-table-6", "host-prompt-96k", "host-1m-b1", "tokens-4k-at-128k",
)  # fmt: skip
ALL, BATCHES, TABLE_6, PROMPT, LONG, ANSWER = (CASES[name] for name in CASE_NAMES)
SMALL = tiny(ALL)
GROUP, OWN = "magicpig (5,5) group", "magicpig (5,10) own"


def measured(case: Any = SMALL, saved: list[dict[str, Any]] | None = None, **changed: Any) -> dict[str, Any]:
    bench = Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None)
    bench.steps = 2
    return run_host(bench, replace(case, **changed), (lambda result: None) if saved is None else saved.append)


def test_what_is_measured_and_must_be_reached() -> None:
    group = [case for case in CASES.values() if case.group == "host"]
    assert group == [ALL, BATCHES, TABLE_6, PROMPT, LONG, ANSWER]
    assert [(c.shape.context, c.shape.heads, c.shape.kv_heads, c.shape.dim, c.shape.dtype) for c in group] == [
        (n << 10, 32, 8, 128, "bfloat16") for n in (96, 96, 96, 96, 1024, 128)
    ]
    names = [[name for one in wanted(case) for name in one.names.values()] for case in group[:-1]]
    group_preset, own = "magicpig (10,75) group", "magicpig (10,150) own"
    assert names[0] == ["dense", *both_ways(group_preset, own, "kascade", "quest")]
    assert names[4] == both_ways(group_preset) and len(names[2]) == 12
    curve = [f"{way}, batch {n}" for n in (1, 2, 4, 8, 10) for way in both_ways(group_preset, own)]
    assert names[1] == ["dense", *curve]
    assert [[(t.quantity, t.of, t.over, t.bound) for t in case.targets] for case in group] == [
        [("microseconds", group_preset, None, 16e3), ("microseconds", own, None, 16e3),
         ("speed over", group_preset, "dense", 12.0), ("speed over", own, "dense", 12.0)],
        [("best tokens/s", group_preset, None, 120.0), ("best tokens/s", own, None, 120.0)], [], [], [],
        [("slowest step over median", group_preset, None, 1.3)],
    ]  # fmt: skip


def both_ways(*names: str) -> list[str]:
    """Entries of methods: attention over the link, then by the CPU."""
    return [way for name in names for way in (name, f"{name} on the CPU")]


def test_the_most_tokens_of_any_batch_are_judged() -> None:
    own = "magicpig (10,150) own"
    rates = {f"{own}, batch {n}": rate for n, rate in ((1, 90.0), (4, 130.0), (8, 110.0))} | {"dense": 900.0}
    entries = [{"name": name, "who": "longreach", "tokens_per_second": rate} for name, rate in rates.items()]
    _, found = judge(BATCHES, entries)
    assert (found["got"], found["than"], found["reached"]) == (130.0, f"{own}, batch 4", True)
    assert judge(BATCHES, entries[-1:])[1]["got"] is None
    (short,) = judge(replace(BATCHES, targets=(Target("best tokens/s", 200.0, own),)), entries)
    assert not short["reached"] and short["missed_by"] == pytest.approx(0.35)


def test_every_entry_has_its_reads_memory_and_check() -> None:
    saved: list[dict[str, Any]] = []
    result = measured(saved=saved)
    entries = {entry["name"]: entry for entry in result["entries"]}
    assert list(entries) == ["dense", *both_ways(GROUP, OWN, "kascade", "quest")] and len(saved) == 9
    layer = 2 * (256 + 19) * 2 * 16 * 4  # keys and values of 2 heads, fp32; 19 tokens of room
    placed = {"dense": 0, GROUP: 2, OWN: 2, "kascade": 2, "quest": 2}  # layers that are read whole; dense reads all
    weights = sum(p.numel() * 4 for p in bench_model().parameters())
    for name, entry in entries.items():
        memory, whole = entry["memory"], placed[name.removesuffix(" on the CPU")]
        assert entry["settings"]["attend"] == ("cpu" if name.endswith("CPU") else "link")
        assert (memory["host_layers"], memory["device_layers"]) == (6 - whole, whole), name
        assert (memory["host_kv"], memory["device_kv"]) == ((6 - whole) * layer, whole * layer)
        assert (memory["staging"], memory["weights"]) == (2 * layer, weights)
        assert entry["settings"]["device_bytes"] == (2 + whole) * layer
        assert (memory["state"] > 0) == (name != "dense")
        assert 0 < entry["error"] <= entry["error_bound"] and 0 < entry["link_share"] <= 1
        seconds = entry["microseconds"]["median"] / 1e6
        assert entry["tokens_per_second"] == pytest.approx(1 / seconds)
        assert entry["link_gb_per_s"] == pytest.approx(entry["link_bytes"] / seconds / 1e9, rel=1e-4)
        assert set(result["setup_seconds"][name]) == {
            "allocate", "fill", "state", "compile_and_capture", "capture", "other_first_steps", "time", "check",
        }  # fmt: skip
        check = result["check"][name]
        assert check["layers"] == 6 and check["of_captured"] <= result["check"]["of_logits"] * 2
        assert (check["of_captured_bound"] is None) == ("magicpig" in name)
    dense = entries["dense"]
    assert dense["link_share"] == 1 and dense["percent_of_dense"] == pytest.approx(100)
    keys = dense["link_bytes"] / (6 * 2 * 2 * 16 * 4)  # of a head and layer, at a mean step
    assert 257 <= keys <= 275
    for name in both_ways(GROUP, OWN):
        sampled = entries[name]["sampled"]
        assert 0.01 < sampled["sampled_head"] < sampled["sampled_group"] < 0.2
        assert entries[name]["link_bytes"] < 0.5 * dense["link_bytes"] > entries["quest"]["link_bytes"]
    lines = "\n".join(remarks(result))
    assert "MB over the link" in lines and "a head" in lines and "host_kv" in lines and "MB read by the CPU" in lines


def bench_model() -> Any:
    return Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None).model(SMALL)[0]


def test_sampled_keys_cross_the_link_once() -> None:
    """A report counts them for their weight and for attention; the kernels read them once."""
    layer = LayerReport("decode", 3, "magicpig", "triton", 4, 4, 4_000, 1_000, 100, 9_000, 0, (), {"note": ""})
    dense = replace(layer, layer=0, key_bytes=4_500, value_bytes=4_500, metadata_bytes=0, notes=None)
    method = MagicPIG(bits=5, tables=5)
    found = step_bytes(Report((layer, dense, replace(layer, phase="prefill"))), method, (3,), 1e-6)
    assert found == {
        "attention_bytes": 2775, "link_bytes": 500, "link_share": 500 / 2775, "link_gb_per_s": pytest.approx(0.5),
        "percent_of_dense": pytest.approx(100 * 2775 / 4500),
    }  # fmt: skip
    assert step_bytes(Report((dense,)), method, (0,), 1e-6)["link_bytes"] == 2250


def test_a_batch_that_does_not_fit_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the free host memory that the cache finds, before it writes anything."""
    layer = 2 * (256 + 19) * 2 * 16 * 4
    monkeypatch.setattr(host_pool, "HUGE_PAGE", 64)
    monkeypatch.setattr(host_pool, "check_available", refuse_all_but(0, 6 * layer))
    result = measured(tiny(BATCHES))
    ways = both_ways(GROUP, OWN)
    assert [entry["name"] for entry in result["entries"]] == ["dense", *(f"{way}, batch 1" for way in ways)]
    assert list(result["left_out"]) == [f"{way}, batch 2" for way in ways]
    needed = 4 * 2 * layer  # of two layers of six, the GPU has room
    assert result["left_out"][f"{OWN}, batch 2"] == f"does not fit: keys and values need {needed} of host memory"
    assert any(f"{OWN}, batch 2 left out" in line for line in remarks(result))
    monkeypatch.setattr(host_pool, "check_available", refuse_all_but(0))
    with pytest.raises(OutOfMemory, match="nothing fits into memory"):
        measured(tiny(BATCHES))


def refuse_all_but(*granted: int) -> Callable[[int], None]:
    def check(nbytes: int) -> None:
        if nbytes not in granted:
            raise CapacityError(f"keys and values need {nbytes} of host memory")

    return check


def test_a_method_that_is_wrong_has_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Quest.run
    monkeypatch.setattr(Quest, "run", lambda self, call, state: (o := attend(self, call, state))._replace(
        partial=replace(o.partial, out=o.partial.out * 1.001)
    ))  # fmt: skip
    saved: list[dict[str, Any]] = []
    with pytest.raises(WrongResult, match=r"host-96k-b1: quest: attention of layer \d is off by"):
        measured(saved=saved, methods=("quest", "dense"))
    assert [entry["name"] for entry in saved[-1]["entries"]] == ["dense"]


def test_entries_read_the_same_keys_and_their_own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps append keys after the context and seal some. The next entry finds the cache as it was filled."""
    measure, found = run._measured, list[tuple[list[torch.Tensor], list[int], Any]]()

    def looked_at(bench: Any, case: Any, model: Any, session: Any, cache: Any, *more: Any) -> Any:
        def held() -> list[torch.Tensor]:
            return [x[:, :, :256].clone() for pair in cache.kv.memory for x in pair or ()]

        states = cache.states.states()
        assert states == cache.states.states((session.decode,)) and cache.kv.lengths == [256]
        stops = [int(stop) for state in states for stop in state.tables.stop]
        found.append((held(), stops, cache))
        done = measure(bench, case, model, session, cache, *more)
        assert all(torch.equal(a, b) for a, b in zip(held(), found[-1][0], strict=True))
        return done

    monkeypatch.setattr(run, "_measured", looked_at)
    shared = measured(methods=("magicpig",))
    assert len(found) == 4 and len({id(cache) for _, _, cache in found}) == 1
    for keys, stops, _ in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(keys, found[0][0], strict=True)) and stops == found[0][1]
    presets = SMALL.sampling.presets if SMALL.sampling else ()
    alone = measured(methods=("magicpig",), sampling=replace(SMALL.sampling, presets=presets[1:]))  # type: ignore[type-var]
    for entry in alone["entries"]:
        (other,) = (e for e in shared["entries"] if e["name"] == entry["name"])
        assert other["error"] == entry["error"]
        assert other["sampled"] == pytest.approx(entry["sampled"], rel=0.02)  # means over the steps that were timed
        assert other["link_bytes"] == pytest.approx(entry["link_bytes"], rel=0.02)
    took = shared["setup_seconds"][f"{OWN} on the CPU"]
    assert took["allocate"] == took["fill"] == took["state"] == 0 < shared["setup_seconds"][GROUP]["fill"]


def test_the_first_token_of_a_prompt_in_host_memory_and_beside_it_in_the_gpus() -> None:
    result = measured(replace(tiny(PROMPT), targets=()))
    staged, plain = result["entries"]
    assert [e["name"] for e in result["entries"]] == [f"{GROUP}, host memory", f"{GROUP}, GPU memory"]
    assert staged["memory"]["host_layers"] > 0 and staged["memory"]["staging"] > 0
    assert plain["memory"]["host_layers"] == plain["memory"]["host_kv"] == 0 == plain["memory"]["staging"]
    for entry in result["entries"]:
        assert entry["microseconds"]["median"] > 0 and entry["memory"]["state"] > 0 and entry["unchecked"]
    told = list(remarks(result))
    assert len(told) == 2 and all(" s to the first token; host_kv " in line for line in told)


def test_cases_of_one_run_share_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Decoding(torch.device("cpu"), without=(), quick=True, seed=0, say=lambda line: None)
    bench.steps, sizes = 2, list[int]()
    for case in (replace(SMALL, methods=("dense", "quest")), replace(tiny(TABLE_6), methods=("quest",))):
        run_host(bench, case, lambda result: None)
        sizes.append(bench.shared["host memory"].nbytes)
    assert sizes[0] == sizes[1] > 0
    assert "  quest: seconds: allocate 0.0, fill " in capsys.readouterr().err


def test_what_a_group_shares_ends_with_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def note(bench: Decoding, case: Any, save: Any) -> dict[str, Any]:
        seen.append(len(bench.shared))
        bench.shared[case.name] = True
        return {}

    monkeypatch.setattr(runner, "MANY", {"host": note, "other": note})
    chosen = runner.Runner(torch.device("cpu"), without=(), quick=True, say=lambda line: None)
    for case in (ALL, BATCHES, replace(ALL, group="other")):
        chosen.run(case, 0)
    assert seen == [0, 1, 0]


@pytest.mark.parametrize(("step", "count"), [(0.001, 64), (0.02, 50), (0.049, 20), (0.2, 5)])
def test_replays_follow_from_the_time_of_a_step(step: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Decoding(torch.device("cpu"), without=(), quick=False, seed=0, say=lambda line: None)
    decoder = SimpleNamespace(cache=SimpleNamespace(columns=3, drop_columns=lambda count: None))
    monkeypatch.setattr(bench, "replays", lambda decoder, capture, steps, warm=8: [step] * steps)
    assert len(bench.enough(decoder, True)) == count


@pytest.mark.parametrize("off", ["attention", "weights"])
def test_a_wrong_sample_is_seen(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MagicPIG every key is compared with its log-weight."""
    if off == "attention":
        attend = MagicPIG.run
        monkeypatch.setattr(MagicPIG, "run", lambda self, call, state: (o := attend(self, call, state))._replace(
            partial=replace(o.partial, out=o.partial.out * 1.001)
        ))  # fmt: skip
    else:
        weigh = lists.weigh

        def heavier(*given: Any, **options: Any) -> Weights:
            found = weigh(*given, **options)
            return found._replace(log_weight=found.log_weight + 0.05)

        monkeypatch.setattr(lists, "weigh", heavier)
    with pytest.raises(WrongResult, match=r"magicpig \(5,5\) group: attention of layer \d is off by"):
        measured(methods=("magicpig",))


def test_an_overflowed_list_makes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "max_keys", lambda capacity, tokens: 1)
    with pytest.raises(
        WrongResult, match=r"magicpig \(5,5\) group: a list of layer \d overflowed, and its head attended densely"
    ):
        measured(methods=("magicpig",))


def test_a_captured_step_with_other_logits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, observe, observing = Dense.run, Decoding.observed_step, list[bool]()

    def later(self: Dense, call: Any, state: Any) -> Any:
        outcome = attend(self, call, state)
        factor = 1.0 if observing else 1.01
        return outcome._replace(partial=replace(outcome.partial, out=outcome.partial.out * factor))

    def observed(self: Decoding, *given: Any) -> Any:
        observing.append(True)
        return observe(self, *given)

    monkeypatch.setattr(Dense, "run", later)
    monkeypatch.setattr(Decoding, "observed_step", observed)
    with pytest.raises(WrongResult, match="the captured step's logits differ"):
        measured(methods=("dense",))


def test_the_limit_grows_with_the_batch() -> None:
    layer = 2 * 98_400 * 8 * 128 * 2
    assert device_limit(ALL, 98_400, 2) == 4 << 30
    for batch, limit in ((2, 4 << 30), (4, 4 * 4 * layer), (8, 8 * 4 * layer)):
        assert device_limit(replace(BATCHES, shape=replace(BATCHES.shape, batch=batch)), 98_400, 2) == limit
    assert device_limit(LONG, (1 << 20) + 100, 2) == 48 << 30


def test_the_largest_batch_fits_into_128_gib_of_host_memory() -> None:
    """All layers but two, which stay in GPU memory with the two staging buffers; one sequence more leaves 4 GiB."""
    assert BATCHES.host is not None
    sizes = []
    for batch in (max(BATCHES.host.batches), max(BATCHES.host.batches) + 1):
        case = replace(BATCHES, shape=replace(BATCHES.shape, batch=batch))
        layer = device_limit(case, 98_400, 2) // 4
        sizes.append(30 * layer / 2**30)
    assert [round(size, 1) for size in sizes] == [112.6, 123.9]


def test_another_batch_or_context_can_be_given() -> None:
    case = tiny(BATCHES).but(batch=2)
    found = [(name, one.batch) for one in wanted(case) for name in one.names.values()]
    assert found == [("dense", 2), *((f"{way}, batch 2", 2) for way in both_ways(GROUP, OWN))]


def test_each_step_of_a_long_answer_is_timed() -> None:
    result = measured(replace(tiny(ANSWER), host=None))
    assert not result["targets"]  # a case of another size has none
    (entry,) = result["entries"]
    assert entry["name"] == GROUP and entry["slowest"]["steps"] == 24 == len(entry["microseconds"]["replays"])
    assert entry["memory"]["state"] > 0 and entry["unchecked"]
    assert "24 steps, median" in "\n".join(remarks(result))


def test_the_slowest_steps_are_named() -> None:
    found = slowest((1.0, 1.0, 1.2, 1.4, 1.0, 2.0))
    assert (found["steps"], found["step"], found["count_above"]) == (6, 5, 1)
    assert found["over_median"] == pytest.approx(2.0 / 1.1)
    entry = {"name": "m", "who": "longreach", "microseconds": {"median": 1.1e6}, "slowest": found}
    target = Target("slowest step over median", 1.3, "m")
    (verdict,) = judge(replace(ANSWER, targets=(target,)), [entry])
    assert verdict["got"] == found["over_median"] and not verdict["reached"]
    assert slowest_line(entry).endswith("slowest 1.82x (step 5); 1 above 1.3x: 5 (1.82x)")
