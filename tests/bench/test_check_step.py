"""Timed steps count where rounding explains all that they did: logits, choices, and what they read next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.bench.check import WrongResult
from longreach.bench.check_step import Steps, computing_in, relative, require_right
from longreach.testing.tiny import tiny_model

NOISE = 0.01
FIRST = torch.tensor([7])


@pytest.fixture
def exact() -> torch.Tensor:
    """Three steps over eight tokens: 3, 5, then 2 just before 6."""
    logits = torch.zeros(1, 3, 8)
    logits[0, 0, 3] = logits[0, 1, 5] = logits[0, 2, 2] = 1
    logits[0, 2, 6] = 1 - 3 * NOISE
    return logits


def right(exact: torch.Tensor) -> Steps:
    chosen = exact.argmax(-1)
    return Steps(torch.cat([FIRST[:, None], chosen[:, :-1]], 1), chosen, exact + NOISE / 2)


def judged(steps: Steps, exact: torch.Tensor) -> int:
    return require_right("it", steps, FIRST, exact + NOISE, exact).tokens_that_differ


def test_what_rounding_explains_passes(exact: torch.Tensor) -> None:
    steps = right(exact)
    assert judged(steps, exact) == 0
    logits = exact.clone()
    logits[0, 2, 2] -= 2 * NOISE
    logits[0, 2, 6] += 2 * NOISE
    tied = replace(steps, chosen=torch.tensor([[3, 5, 6]]), logits=logits)
    assert judged(tied, exact) == 1


def test_another_choice_is_seen(exact: torch.Tensor) -> None:
    steps = right(exact)
    with pytest.raises(WrongResult, match="that its logits prefer"):
        judged(replace(steps, chosen=torch.tensor([[3, 5, 6]])), exact)
    logits = exact.clone()
    logits[0, 1, 5] -= 0.5
    logits[0, 1, 1] += 0.5  # two that are one to the step, and 1 apart in truth
    undecided = Steps(torch.tensor([[7, 3, 1]]), torch.tensor([[3, 1, 2]]), logits)
    with pytest.raises(WrongResult, match=r"logit of a chosen token is 1 behind the best, more than 0\.8"):
        require_right("it", undecided, FIRST, exact + 0.2, exact)
    assert require_right("it", undecided, FIRST, exact + 0.3, exact).behind == 1


def test_another_token_read_and_other_logits_are_seen(exact: torch.Tensor) -> None:
    steps = right(exact)
    with pytest.raises(WrongResult, match="did not read"):
        judged(replace(steps, read=steps.read + 1), exact)
    with pytest.raises(WrongResult, match="logits differ"):
        judged(replace(steps, logits=steps.logits + torch.tensor([[[0.0], [0.0], [3 * NOISE]]])), exact)
    with pytest.raises(WrongResult, match="nan"):
        judged(replace(steps, logits=steps.logits * torch.nan), exact)


def test_a_model_computes_in_a_wider_dtype_and_is_as_before() -> None:
    model = tiny_model("llama").bfloat16()
    ids = torch.arange(3, 20)[None]
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    with torch.no_grad():
        plain = model(ids).logits
        with computing_in(model, torch.float32):
            wide = model(ids).logits
        assert [(p.data_ptr(), p.dtype) for p in model.parameters()] == before
        assert torch.equal(model(ids).logits, plain)
        want = model.float()(ids).logits
    assert wide.dtype == torch.float32 and relative(wide, want) < 1e-6 < relative(plain, want)
