"""A method's layers in one sequence: what is timed is a model's mix of layers, checked, beside dense attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench.case import Memory, Stack
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.chosen import check_chosen, check_layer
from longreach.bench.inputs import Inputs
from longreach.bench.run import run_case
from longreach.bench.stack import Layers, planned
from longreach.ops import Lists, Partial, Spans

CPU = torch.device("cpu")
SMALL = tiny(CASES["kascade-128k-b32"])


def test_the_real_proportion_of_layers() -> None:
    for case in CASES.values():
        if case.stack is not None:
            assert (case.stack.anchors[0], len(case.stack.anchors), case.stack.layers) == (0, 5, 32)
    table = [name for name, case in CASES.items() if case.group == "kascade-table"]
    assert len(table) == 15 and CASES["kascade-128k-30pct-b64"].targets[0].bound == 2.17
    assert CASES["kascade-8k-20pct-b64"].stack == Stack(options=(("k", 0.2),))


def test_a_case_runs_beside_dense_attention() -> None:
    result = run_case(SMALL, CPU, without=["flashinfer", "flash_attention_3"], replays=2)
    names = [e["name"] for e in result["entries"]]
    assert names[:4] == ["kascade", "layer 0", "reuse layer", "anchor"] and len(names) == 5
    read = {e["name"]: e["settings"]["bytes_read_a_layer"] for e in result["entries"][:4]}
    dense = result["bytes_needed"]
    assert read["layer 0"] == dense
    keys, entries = 128 * 2 * 2, 4 * 128 * 2 * 2  # of 256; for 2 sequences and heads; bytes of lists
    vector = 4 * SMALL.shape.dim
    assert read["reuse layer"] == 2 * keys * vector + entries
    assert read["anchor"] == dense // 2 + keys * vector + entries
    whole = read["layer 0"] + read["anchor"] + 2 * read["reuse layer"]
    assert read["kascade"] == whole / 4
    assert 0.999 <= result["mass_of_chosen"] <= 1.0
    assert result["error"] < 1e-4


@pytest.fixture
def outcomes() -> Any:
    inputs = Inputs(SMALL, CPU, 0)
    with planned(SMALL, 0) as (method, model, plan):
        yield inputs, plan, Layers(inputs, Memory(), method, model, "reference").all()


def test_lists_come_from_the_run_and_go_through_the_head_map(outcomes: Any) -> None:
    inputs, plan, made = outcomes
    assert inputs.copies == 2
    first, reuse, anchor, last = (o.reads.values[0] for o in made)
    assert isinstance(first, Spans) and all(isinstance(s, Lists) for s in (reuse, anchor, last))
    assert reuse.index.data_ptr() != anchor.index.data_ptr() == last.index.data_ptr()
    assert reuse.head_of is None or reuse.head_of.tolist() == list(plan.head_map[1])


def test_wrong_outputs_and_choices_are_found(outcomes: Any) -> None:
    inputs, _, made = outcomes
    right = made[1]
    assert check_layer("it", inputs, Memory(), 1, right) < 1e-5
    off = Partial(right.partial.out * 1.01, right.partial.lse)
    with pytest.raises(WrongResult, match=r"it: relative error 1\.0"):
        check_layer("it", inputs, Memory(), 1, right._replace(partial=off))
    with pytest.raises(WrongResult, match="relative error"):
        check_layer("it", inputs, Memory(), 0, right)  # of another copy's keys
    lists = made[3].reads.keys[0]
    assert check_chosen(inputs, Memory(), 0, lists) > 0.999
    with pytest.raises(WrongResult, match="hold 0"):
        check_chosen(inputs, Memory(), 1, lists)
    without = replace(lists, count=lists.count - 1)
    with pytest.raises(WrongResult, match="newest"):
        check_chosen(inputs, Memory(), 0, without)
    flipped = replace(right.reads.values[0], index=right.reads.values[0].index.flip(-1))
    with pytest.raises(WrongResult, match="do not ascend"):
        check_layer("it", inputs, Memory(), 1, right._replace(reads=right.reads._replace(values=(flipped,))))
