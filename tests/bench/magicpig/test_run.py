"""MagicPIG's step is measured on keys that are sampled as a model's are, and is right before it has a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench.case import Memory
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.format import remarks
from longreach.bench.inputs import Inputs, bytes_needed
from longreach.bench.magicpig import layers as layers_of
from longreach.bench.magicpig import run
from longreach.bench.magicpig.check import check_layer
from longreach.bench.magicpig.layers import PARTS, SampledLayers
from longreach.bench.run import run_case
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.errors import InvalidInput, OutOfMemory
from longreach.ops import Partial
from longreach.ops.simhash import SampledAttention

CPU = torch.device("cpu")
WITHOUT = "flashinfer", "flash_attention_3"
BATCH = CASES["magicpig-128k-b32"]
SMALL = tiny(BATCH)


def made(number: int = 0) -> SampledLayers:
    assert SMALL.sampling is not None
    return SampledLayers(Inputs(SMALL, CPU, 0), SMALL.sampling.presets[number], "reference")


def test_what_must_be_reached() -> None:
    group = [case for case in CASES.values() if case.group == "magicpig-decode"]
    assert {(c.shape.batch, c.shape.context >> 10) for c in group} == {
        (1, 8), (1, 16), (1, 32), (1, 64), (1, 128), (1, 256), (8, 32), (32, 128), (64, 8),
    }  # fmt: skip
    bounds = {c.name: [(t.of, t.quantity, t.bound) for t in c.targets] for c in group if c.targets}
    fast, read = "speed over fastest", ("(10,75) group", "% of dense", 4.0)
    assert bounds == {
        "magicpig-128k-b1": [("(10,75) group", fast, 4.0), ("(10,150) own", fast, 3.0), read],
        "magicpig-128k-b32": [("(10,75) group", fast, 12.0), ("(10,150) own", fast, 6.0), read],
    }


def test_a_record_holds_samples_bytes_memory_and_parts() -> None:
    result = run_case(SMALL, CPU, without=WITHOUT, replays=2)
    group, own = result["sampled"].values()
    names = [entry["name"] for entry in result["entries"]]
    assert names[:3] == ["(5,5) group", "(5,5) group: no block is sealed", "(5,5) group: a block is sealed"]
    assert names[6] == "dense" and result["entries"][7]["who"] == "torch_sdpa"
    assert all(0 <= entry["error"] < 1e-4 for entry in result["entries"])
    assert group["keys_in_tables"] == 220  # of 255 tokens: no sinks, no local ones, complete blocks of 16
    for preset in (group, own):
        assert 0 < preset["sampled_head"] < preset["sampled_group"] < 0.5
        assert list(preset["parts_microseconds"]) == [*PARTS[:-1], "rest", "(seal a block)"]
        assert preset["build_seconds"] > 0
        counted = preset["key_bytes"] + preset["value_bytes"] + preset["metadata_bytes"]
        assert counted == pytest.approx(preset["search_bytes"] + preset["attention_bytes"], abs=2)
        assert counted < preset["bytes_read"] < preset["bytes_read_if_sealing"]  # its mean has a block in 16 steps
        assert preset["percent_of_dense"] == pytest.approx(100 * preset["bytes_read"] / bytes_needed(SMALL))
    # K and V of the sampled keys, of sinks and of what is not in the tables
    values = (group["sampled_group"] * 256 + 256 - 220) * 2 * 2 * 16 * 4
    assert group["value_bytes"] == pytest.approx(values)
    assert own["table_bytes"] > 1.6 * group["table_bytes"]  # twice the tables, as many norms
    (said, _) = [line for line in remarks(result) if "samples" in line]
    assert said.startswith("(5,5) group samples") and "a prompt and layer" in said


def test_the_read_share_is_judged() -> None:
    target = [t for t in BATCH.targets if t.quantity == "% of dense"]
    entry = {"name": "(10,75) group", "who": "longreach", "microseconds": {"median": 1.0}, "percent_of_dense": 5.0}
    (judged,) = judge(replace(BATCH, targets=tuple(target)), [entry])
    assert judged["got"] == 5.0 and not judged["reached"] and judged["missed_by"] == pytest.approx(0.25)


def test_a_step_is_the_mean_of_those_between_two_blocks() -> None:
    plain, sealing = Timing.of([1.0, 2.0], 1, "it"), Timing.of([9.0, 2.0], 1, "it")
    assert run.mean_step(plain, sealing, 8).seconds == (2.0, 2.0)


def test_sealing_again_changes_nothing() -> None:
    layers = made()
    before, tables = layers.one().outcome.partial.out, layers.states[0].tables
    ids = tables.ids.clone()
    layers.step(sealing=True)()
    layers.build()()
    assert int(tables.stop[0]) == layers.stops[0] and torch.equal(layers.one().outcome.partial.out, before)
    filled = slice(layers.method.sinks, layers.stops[0])
    assert torch.equal(tables.ids.view(torch.int16)[..., filled].sort().values,
                       ids.view(torch.int16)[..., filled].sort().values)  # fmt: skip


@pytest.mark.parametrize("number", [0, 1], ids=["group", "own"])
def test_a_wrong_step_gets_no_time(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made(number)
    verdict = check_layer(layers)
    assert verdict.error < 1e-5 and verdict.other_keys == verdict.other_weights == 0
    right = layers.one()
    assert right.lists.log_weight is not None

    def refused(message: str, **changed: Any) -> None:
        monkeypatch.setattr(layers, "one", lambda: replace(right, **changed))
        with pytest.raises(WrongResult, match=message):
            check_layer(layers)

    partial = right.outcome.partial
    refused("over its own keys", outcome=right.outcome._replace(partial=Partial(partial.out * 1.01, partial.lse)))
    refused("off by more than", lists=replace(right.lists, log_weight=right.lists.log_weight + 0.1))
    fewer = (right.lists.count - 2).clamp(min=0)
    refused("whose codes collide", lists=replace(right.lists, count=fewer))
    refused("overflowed", lists=replace(right.lists, count=right.lists.count + right.lists.index.shape[2]))


def test_tables_of_other_keys_are_found() -> None:
    layers = made()
    k, _ = layers.inputs.kv(0, Memory())
    k[:, :, 40:200] = k[:, :, 40:200].flip(2)
    with pytest.raises(WrongResult, match="whose codes collide"):
        check_layer(layers)


def test_parts_that_are_not_the_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made()
    real = layers_of.attend_sampled

    def other(*given: Any, **options: Any) -> SampledAttention:
        found = real(*given, **options)
        return found._replace(partial=Partial(found.partial.out * 1.01, found.partial.lse))

    monkeypatch.setattr(layers_of, "attend_sampled", other)
    with pytest.raises(WrongResult, match="parts differ from the step by"):
        layers.parts()


def test_a_step_that_fits_into_the_l2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = made()
    monkeypatch.setattr(run, "l2_bytes", lambda device: 1000)
    run.check_cold(layers, 3000.0)
    with pytest.raises(InvalidInput, match="LEAST_SAMPLED"):
        run.check_cold(layers, 2999.0)


def test_tables_are_counted_among_what_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 and 10 GB of ids beside 17 of keys and values."""
    monkeypatch.setattr(run, "copies_needed", lambda read, device: 1)
    for free, fits in ((45 << 30, True), (38 << 30, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        if fits:
            run.check_room(BATCH, torch.device("cuda"))
        else:
            with pytest.raises(OutOfMemory, match="keys, values and tables take"):
                run.check_room(BATCH, torch.device("cuda"))


def test_several_rows_are_refused() -> None:
    with pytest.raises(InvalidInput, match="rows: expected 1"):
        run_case(SMALL.but(rows=2), CPU, without=WITHOUT)
