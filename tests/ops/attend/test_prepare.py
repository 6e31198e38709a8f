"""An attention prepared once attends to what its tensors hold at each call."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.call import LayerCall
from longreach.ops import RowRange, Rows, Span, Spans, absolute, checks, relative
from longreach.ops.attend import prepare
from longreach.ops.impl import has_numba
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend
from longreach.testing.selections import random_lists
from tests.ops.attend.kernels import held_to, here

BOTH = pytest.mark.parametrize("impl", ["reference", "triton"])
LOGITS = {"scale": 0.3, "softcap": 5.0}
SINKS_AND_WINDOW = Spans((Span(absolute(0), absolute(2)), Span(relative(-8), relative(1))))


@BOTH
@pytest.mark.parametrize("layout", ["runs", "sorted", "strided"])
def test_a_later_call_sees_what_changed(impl: str, layout: str) -> None:
    kv = random_kv([40, 23, 31], page=16, memory="packed")
    rows = random_rows(kv, 3 if layout == "runs" else 7, group=2)
    if layout == "runs":
        seq, runs = torch.arange(3), tuple(RowRange(1, n, None) for n in range(3))
        rows = replace(rows, seq=seq, runs=runs)
    elif layout == "strided":
        rows = replace(rows, pos=torch.stack([rows.pos, rows.pos], 1)[:, 0])
    rows, kv = here(rows), here(kv)
    run = prepare(rows, kv, SINKS_AND_WINDOW, impl=impl, **LOGITS)
    run()
    for step in range(2):
        rows.q.copy_(torch.randn(rows.q.shape))
        rows.pos.copy_((rows.pos + 5 * step + 1) % 20)
        kv.k.mul_(-1.1)
        held_to(run(), exact_attend(rows, kv, SINKS_AND_WINDOW, **LOGITS), rows.q.dtype)


@BOTH
def test_no_rows(impl: str) -> None:
    kv = random_kv([5])
    rows = Rows(torch.zeros(0, 4, 16), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    rows, kv = here(rows), here(kv)
    assert prepare(rows, kv, Spans.dense(), scale=1.0, impl=impl)().out.shape == (0, 4, 16)


def test_bad_input_is_refused_before_anything_runs() -> None:
    kv = random_kv([5])
    rows = random_rows(kv, 2, group=2)
    with pytest.raises(InvalidInput, match="scale"):
        prepare(rows, kv, Spans.dense(), scale=float("nan"))


def test_a_call_prepares_again_for_another_selection_and_view() -> None:
    kv, other = random_kv([30]), random_kv([30], seed=1)
    rows = random_rows(kv, 3, group=2)
    call = LayerCall(0, rows, kv, torch.arange(1), 0.3, sink_logit=torch.randn(4))
    lists = random_lists(rows, kv)
    for selection, view, sink in (
        (SINKS_AND_WINDOW, None, True), (SINKS_AND_WINDOW, None, False), (SINKS_AND_WINDOW, other, False),
        (SINKS_AND_WINDOW, None, False), (lists, None, True), (Spans.dense(), None, True), (lists, None, True),
    ):  # fmt: skip
        again = call.observer()
        got = again.attend(selection, kv=view, sink=sink)
        sink_logit = call.sink_logit if sink else None
        held_to(got, exact_attend(rows, view or kv, selection, scale=0.3, sink_logit=sink_logit), torch.float32)
        assert [noted.kv for noted in again.meter.noted] == [view or kv]
        assert again.meter.keys == (selection,)
    assert call.take(torch.tensor([1])).attend(Spans.dense()).out.shape[0] == 1


@pytest.mark.skipif(not has_numba(), reason="Numba is not installed")
def test_layers_of_a_pass_share_checks_and_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on places and lengths alone is found once for layers over the same tensors, and no longer."""
    numba = import_module("longreach.ops.attend.numba")  # an attribute of this name is not there before
    made = list[str]()
    for module, name in ((checks, "_check_places"), (numba, "_work")):
        found = getattr(module, name)

        def counted(*args: Any, name: str = name, found: Any = found) -> Any:
            made.append(name)
            return found(*args)

        monkeypatch.setattr(module, name, counted)
    first = random_kv([30, 21])
    rows, shared = random_rows(first, 3, group=2), dict[Any, Any]()
    slots, want = torch.arange(2), {"scale": 0.3}

    def call(layer: int, rows: Rows, shared: dict[Any, Any]) -> LayerCall:
        k, v = (torch.randn(first.k.shape) for _ in range(2))
        view = replace(first, k=k, v=v)
        return LayerCall(layer, rows, view, slots, 0.3, shared=shared, impl="numba")

    for layer in range(3):
        one = call(layer, replace(rows, q=torch.randn(rows.q.shape)), shared)
        held_to(one.attend(SINKS_AND_WINDOW), exact_attend(one.rows, one.kv, SINKS_AND_WINDOW, **want), rows.q.dtype)
    assert made == ["_check_places", "_work"]
    rows.pos.sub_(2)  # the same call again, over what its tensors hold by now
    held_to(one.attend(SINKS_AND_WINDOW), exact_attend(one.rows, one.kv, SINKS_AND_WINDOW, **want), rows.q.dtype)
    assert made == ["_check_places", "_work", "_work"]
    other = Spans.dense()
    held_to(one.attend(other), exact_attend(one.rows, one.kv, other, **want), rows.q.dtype)
    assert made[3:] == ["_work"]
    again = call(0, rows, {})  # of another pass
    held_to(again.attend(other), exact_attend(rows, again.kv, other, **want), rows.q.dtype)
    assert made[4:] == ["_check_places", "_work"]
    wrong = replace(rows, seq=rows.seq + 2)
    with pytest.raises(InvalidInput, match="seq: expected in"):
        call(3, wrong, shared).attend(other)
