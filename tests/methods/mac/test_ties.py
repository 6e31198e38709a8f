"""Rows whose queries were equal before rotation: the newest is taken, whatever rounding made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import MAC, attach
from longreach.adapters.transformers import shape_of
from longreach.evals.calibration.gather import gather
from longreach.evals.calibration.mac import MACGather, calibrated
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.mac.calibrate import OF_EQUALS
from longreach.methods.mac.diagnostics import AT
from longreach.methods.mac.plan import SCALES, Scale
from longreach.plans import Plan, PlannedModel
from longreach.testing.tiny import random_tokens, tiny_model
from tests.methods.planned import MADE
from tests.tiers import swept

WINDOW, BAND = 60, 4
METHOD = MAC(window=WINDOW, band=BAND, tau=OF_EQUALS, min_context=0, rest_rows=None)
KINDS, LENGTH, STEPS, HEADS = 9, 82, 12, 4  # each of so many tokens is some nine times in the text


def texts(count: int) -> Tensor:
    """[count, LENGTH] of KINDS tokens."""
    kinds = random_tokens(1, 200)[0].unique()[:KINDS]
    return kinds[torch.randint(0, KINDS, (count, LENGTH), generator=torch.Generator().manual_seed(3))]


@torch.inference_mode()
def gaps(model: Any, tokens: Tensor, mask: Tensor | None = None, method: MAC = METHOD) -> Tensor:
    """[B, STEPS, H]: how far back layer 0 finds a row near enough for each of the last tokens; 0 for none."""
    found: list[Tensor] = []
    mask = torch.ones_like(tokens) if mask is None else mask

    def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
        if phase == "decode" and call.layer == 0:
            assert outcome.notes is not None
            found.append(outcome.notes.tensors[0][..., AT["gap"]].clone())

    with attach(model, decode=method) as session:
        session.on_layer = observe
        cache, length = session.new_cache(len(tokens)), tokens.shape[1] - STEPS
        model(tokens[:, :length], attention_mask=mask[:, :length], past_key_values=cache)
        for n in range(length, tokens.shape[1]):
            model(tokens[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache)
    return torch.stack(found, 1)


def newest(tokens: list[int]) -> list[list[int]]:
    """[STEPS][H]: back to where each of the last tokens came before, in a row that has an entry."""
    found = []
    for n in range(len(tokens) - STEPS, len(tokens)):
        back = [g for g in range(1, WINDOW + 1) if n - g >= BAND and tokens[n - g] == tokens[n]]
        found.append([min(back)] * HEADS)
    return found


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "glm4", "llama_yarn"])
def test_repeated_tokens_take_the_newest(family: str, dtype: torch.dtype) -> None:
    """Queries of layer 0 are those of their tokens: in all heads, so that a KV head's agree on the row. The threshold
    is as tight as a calibrated plan's can be, and accepts them in either dtype."""
    tokens = texts(1)
    assert gaps(tiny_model(family).to(dtype), tokens)[0].tolist() == newest(tokens[0].tolist())


@pytest.mark.parametrize("dtype", swept([torch.bfloat16, torch.float32, torch.float64], 2))
def test_alone_and_in_a_ragged_batch_a_row_takes_the_same(dtype: torch.dtype) -> None:
    """Sums are in another order there; what they differ by decides nothing."""
    model, tokens, paddings = tiny_model("llama").to(dtype), texts(3), (0, 17, 5)
    mask = torch.ones_like(tokens)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = 0
    together = gaps(model, tokens, mask)
    for row, padding in enumerate(paddings):
        alone = tokens[row : row + 1, padding:]
        assert together[row].tolist() == gaps(model, alone)[0].tolist() == newest(alone[0].tolist())


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
def test_a_calibrated_plan_carries_over_to_another_dtype(scale: Scale, dtype: torch.dtype, tmp_path: Path) -> None:
    """Made in fp32 where one pair of unrelated rows in nine is of one token, so that the first layer's threshold is the
    tightest there is; it accepts equal queries, and in bf16 those of no other token, where rounding lets it."""
    model, tokens = tiny_model("llama"), texts(1)
    what = MACGather(shape_of(model), rows=30, window=WINDOW, widest=WINDOW // 2, sinks=0)
    parts = gather(model, [Prompt("p", tuple(torch.cat([tokens[0], tokens[0]]).tolist()))], what)
    plan, rests = calibrated(what, parts, alpha=0.01, epsilon=0.05)
    assert plan.tau[scale][0] == OF_EQUALS and rests["accepted"][scale][0][-1] > 0.9
    path = tmp_path / "p.json"
    Plan("mac", PlannedModel.of("tiny", shape_of(model)), plan.values(), MADE, plan.arrays()).save(path)
    method = replace(METHOD, tau=None, scale=scale, plan=str(path))
    found, words = gaps(model.to(dtype), tokens, method=method)[0], tokens[0].tolist()
    if dtype == torch.float32 or scale == "sqrt2d":
        assert found.tolist() == newest(words)
    else:
        for n, row in enumerate(found.int().tolist(), len(words) - STEPS):
            assert all(words[n - gap] == words[n] for gap in row)
        assert bool((found > 0).float().mean() > 0.9)
