"""A method's layers against fp64 over the keys it chose: errors are seen to within a few roundings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.bench.check import WrongResult, bound
from longreach.bench.check_method import LayerErrors, judge_method, layer_error
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.ops import KVView, Lists, Partial, Rows, Selection, Span, Spans, absolute, merge, relative
from longreach.ops.doors import Read
from longreach.ops.selection import Per

BATCH, KEYS, GROUP, HEADS, DIM = 3, 40, 2, 2, 16
LENGTHS = torch.tensor([40, 17, 33])


def made(dtype: torch.dtype = torch.float32, page: int | None = None) -> LayerCall:
    torch.manual_seed(0)
    k, v = torch.randn(2, BATCH, HEADS, KEYS, DIM, dtype=dtype).unbind()
    view = KVView(k, v, LENGTHS)
    if page:
        pages = KEYS // page
        order = torch.randperm(BATCH * pages)
        cut = [x.unflatten(2, (pages, page)).transpose(1, 2).flatten(0, 1)[order].contiguous() for x in (k, v)]
        view = KVView(*cut, LENGTHS, order.argsort().view(BATCH, pages).int())
    rows = Rows(torch.randn(BATCH, HEADS * GROUP, DIM, dtype=dtype), torch.arange(BATCH), LENGTHS - 1)
    return LayerCall(0, rows, view, torch.arange(BATCH), DIM**-0.5)


def lists() -> Lists:
    index = torch.stack([torch.randperm(17)[:5].sort().values for _ in range(BATCH * HEADS)]).view(BATCH, HEADS, 5)
    return Lists(index.int(), torch.full((BATCH, HEADS), 5, dtype=torch.int32))


WINDOW = Spans((Span(absolute(0), absolute(2)), Span(relative(-3), relative(1))))
BY_ROW = Spans((Span(relative(1 - torch.tensor([[4], [9], [6]])), relative(1)),))


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize(
    "selection", [Spans.dense(), WINDOW, BY_ROW, lists()], ids=("dense", "window", "rows", "lists")
)
def test_attention_over_what_was_chosen_is_right(selection: Selection, page: int | None) -> None:
    call = made(page=page)
    out = call.attend(selection).out
    assert layer_error(call, out, (selection,)) < 1e-6
    assert layer_error(call, out * (1 + 3e-4), (selection,)) == pytest.approx(3e-4, rel=0.01)
    assert layer_error(call, out, (Spans.window(3),)) > 0.01


def test_a_union_of_selections_counts_each_key_once() -> None:
    call = made()
    both = (Spans((Span(absolute(0), absolute(10)),)), Spans((Span(absolute(8), relative(1)),)))
    assert layer_error(call, call.attend(Spans.dense()).out, both) < 1e-6


@pytest.mark.parametrize("per", ["kv", "query"])
def test_log_weights_count(per: Per) -> None:
    """Beside a span, as MagicPIG attends: two results over disjoint keys, merged."""
    call, heads = made(), HEADS * (GROUP if per == "query" else 1)
    index = torch.stack([torch.randperm(10)[:5].sort().values + 2 for _ in range(BATCH * heads)])
    weight, count = torch.randn(BATCH, heads, 5), torch.full((BATCH, heads), 5, dtype=torch.int32)
    sample = Lists(index.view(BATCH, heads, 5).int(), count, weight, per)
    sinks = Spans((Span(absolute(0), absolute(2)),))
    out = merge(call.attend(sinks), call.attend(sample)).out
    assert layer_error(call, out, (sinks, sample)) < 1e-6
    assert layer_error(call, out, (sinks, replace(sample, log_weight=weight + 0.01))) > 1e-4
    assert layer_error(call, out, (sinks, replace(sample, log_weight=None))) > 0.01


def test_what_is_not_finite_is_nan() -> None:
    call = made()
    out = call.attend(Spans.dense()).out
    out[1, 2, 3] = torch.nan
    assert layer_error(call, out, (Spans.dense(),)) != layer_error(call, out, (Spans.dense(),))


def observed(off: dict[int, float], dtype: torch.dtype = torch.float32) -> LayerErrors:
    """What a hook sees of four layers whose outputs are off by these factors."""
    hook = LayerErrors()
    for layer in range(4):
        call = replace(made(dtype), layer=layer)
        call.count_read(Read.of(call.kv, Spans.dense()))
        exact = made(torch.float32) if dtype == torch.float32 else call
        out = exact.attend(Spans.dense()).out * (1 + off.get(layer, 0.0))
        hook("decode", call, Outcome(Partial(out, torch.zeros(out.shape[:2]))))
    return hook


LOGITS = torch.randn(2, 50)


def test_a_right_step_is_recorded_with_its_bounds() -> None:
    verdict = judge_method("it", observed({}), LOGITS, LOGITS * 1.001, 0.01, 4)
    assert verdict.layers == 4 and verdict.error < 1e-6 and verdict.error_bound == bound(torch.float32)
    assert verdict.of_captured == pytest.approx(0.001, rel=0.01) and verdict.of_captured_bound == 0.02


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 3e-4), (torch.bfloat16, 0.02)])
def test_a_layer_off_by_more_than_rounding_is_named(dtype: torch.dtype, off: float) -> None:
    """Numbers, not multiples of the bound: a bound that is too wide has to be seen."""
    judge_method("it", observed({}, dtype), LOGITS, LOGITS, 0.01, 4)
    with pytest.raises(WrongResult, match="it: attention of layer 2 is off by"):
        judge_method("it", observed({2: off}, dtype), LOGITS, LOGITS, 0.01, 4)
    with pytest.raises(WrongResult, match="attention of layer 1 is off by nan"):
        judge_method("it", observed({1: float("nan"), 2: off}, dtype), LOGITS, LOGITS, 0.01, 4)


def test_missing_layers_and_another_captured_step_are_seen() -> None:
    with pytest.raises(WrongResult, match="4 of 5 layers"):
        judge_method("it", observed({}), LOGITS, LOGITS, 0.01, 5)
    with pytest.raises(WrongResult, match=r"captured step's logits differ .* by 3\.\d+e-02, more than 2\.0e-02"):
        judge_method("it", observed({}), LOGITS, LOGITS * 1.03, 0.01, 4)
    with pytest.raises(WrongResult, match="nan"):
        judge_method("it", observed({}), LOGITS, LOGITS * torch.nan, 0.01, 4)


@pytest.mark.parametrize("steady", [True, False])
def test_a_step_captured_uncompiled_is_judged_whatever_the_method(steady: bool) -> None:
    off = LOGITS * (1.0 if steady else 1.5)  # the timed step of an unsteady method may choose other keys
    verdict = judge_method("it", observed({}), LOGITS, off, 0.01, 4, steady=steady, uncompiled=LOGITS * 1.001)
    assert verdict.of_uncompiled == pytest.approx(0.001, rel=0.01) and verdict.of_uncompiled_bound == 0.02
    assert (verdict.of_captured_bound is None) == (not steady)
    with pytest.raises(WrongResult, match="captured uncompiled differ from the uncaptured step's by"):
        judge_method("it", observed({}), LOGITS, off, 0.01, 4, steady=steady, uncompiled=LOGITS * 1.03)
