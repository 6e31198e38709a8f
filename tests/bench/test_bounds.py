"""Error bounds are as narrow as rounding allows: what is off by a few roundings more makes no record."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.bench import anchor_breakdown, check, check_step
from longreach.bench.case import Case, Memory, Shape
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.check_selection import check_layer
from longreach.bench.check_step import Steps, require_right
from longreach.bench.inputs import Inputs
from longreach.bench.run import run_case
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.ops import Partial, Spans, attend

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("float16", 1e-3), ("bfloat16", 2**-7)])
def test_the_bound_of_an_output_is_two_roundings(dtype: str, most: float) -> None:
    assert check.bound(getattr(torch, dtype)) == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 3e-4), ("bfloat16", 0.03)])
def test_an_output_a_few_roundings_off_is_refused(dtype: str, off: float) -> None:
    made = Inputs(Case("it", "group", Shape(2, 64, 1, 4, 2, 16, dtype)), CPU)
    out = attend(made.rows(0, 1), made.view(0, Memory()), made.selection(0, 1), scale=made.scale).out
    check.require_right("it", made, Memory(), 1, out)
    with pytest.raises(WrongResult, match="relative error"):
        check.require_right("it", made, Memory(), 1, out * (1 + off))
    call = LayerCall(0, made.rows(0, 1), made.view(0, Memory()), torch.arange(2), made.scale)
    whole = call.attend(Spans.dense())
    check_layer("it", made, Memory(), 0, call, Outcome(whole))
    with pytest.raises(WrongResult, match="relative error"):
        check_layer("it", made, Memory(), 0, call, Outcome(Partial(whole.out * (1 + off), whole.lse)))


def test_a_case_records_the_bound_its_entries_keep() -> None:
    result = run_case(tiny(CASES["dense-128k-b1"]), CPU, without=("flashinfer", "flash_attention_3"), replays=2)
    assert result["error_bound"] == 1e-4 and all(0 < e["error"] <= 1e-4 for e in result["entries"])


def test_the_bound_of_a_step_is_twice_the_models_own_error() -> None:
    torch.manual_seed(0)
    exact = torch.randn(1, 3, 50).double()
    noise = torch.randn(1, 3, 50).double()
    plain = exact + 0.01 * noise

    def judged(factor: float) -> float:
        logits = exact + factor * 0.01 * noise
        chosen = logits.argmax(-1)
        read = torch.cat([torch.tensor([[7]]), chosen[:, :-1]], 1)
        return require_right("it", Steps(read, chosen, logits), torch.tensor([7]), plain, exact).error_bound

    own = check_step.relative(plain, exact)
    assert judged(1.9) == pytest.approx(2 * own, rel=1e-6)
    with pytest.raises(WrongResult, match="logits differ"):
        judged(2.1)


def test_an_anchors_passes_must_add_up_to_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the passes give is compared with the anchor itself: off by 3e-4 in fp32 they are others."""
    case = replace(tiny(CASES["kascade-128k-b1"]), baselines=())
    run_case(case, CPU, replays=2)
    anchor_passes = anchor_breakdown.anchor_passes

    def off(method: object, call: object, part: object, whole: Outcome) -> object:
        scaled = replace(whole.partial, out=whole.partial.out * (1 + 3e-4))
        return anchor_passes(method, call, part, whole._replace(partial=scaled))  # type: ignore[arg-type]

    monkeypatch.setattr("longreach.bench.stack.anchor_passes", off)
    with pytest.raises(WrongResult, match="passes differ from the anchor"):
        run_case(case, CPU, replays=2)
