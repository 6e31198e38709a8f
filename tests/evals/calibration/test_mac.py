"""MAC's calibration of a model: what is gathered, pass by pass, is what the prompt's rows and keys are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import attach
from longreach.adapters.transformers import shape_of
from longreach.evals.calibration.gather import DenseBeforeRotation, gather, unpacked
from longreach.evals.calibration.mac import MACGather, calibrated, windows_of
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.mac.calibrate import BANDS, counts, nearest, unrelated
from longreach.testing.tiny import random_tokens, tiny_model

WINDOW, ROWS, SINKS = 80, 12, 3


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=2)


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p/{n}", tuple(random_tokens(1, length, seed=n)[0].tolist())) for n, length in enumerate(lengths)]


def what(model: Any, widest: int = WINDOW // 2) -> MACGather:
    return MACGather(shape_of(model), rows=ROWS, window=WINDOW, widest=widest, sinks=SINKS)


def seen(model: Any, prompt: Prompt) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(queries before rotation [N, H, D], keys before rotation [N, G, D], weights [H, N, N]) of each layer."""
    found = []

    def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
        assert call.pre_rope is not None
        q, k = call.pre_rope()
        keys = call.kv.k[0, :, : len(prompt.tokens)].repeat_interleave(2, 0)
        x = torch.einsum("nhd,hmd->hnm", call.rows.q, keys) * call.scale
        weight = x.masked_fill(torch.ones_like(x).triu(1).bool(), -torch.inf).softmax(-1)
        found.append((q.clone(), k.clone(), weight))

    with torch.no_grad(), attach(model, prefill=DenseBeforeRotation()) as session:
        session.on_layer = observe
        model(torch.tensor([prompt.tokens]), past_key_values=session.new_cache())
    return found


@pytest.mark.parametrize("chunk", [512, 37])
def test_what_a_prompt_gives(model: Any, chunk: int) -> None:
    (prompt,) = prompts(200)
    (part,) = gather(model, [prompt], what(model), chunk=chunk)
    rows = [WINDOW + (200 - WINDOW) * n // ROWS for n in range(ROWS)]
    assert part["tokens"] == 200 and part["rows"] == ROWS and part["taken"] == [True, True]
    for layer, (q, k, weight) in enumerate(seen(model, prompt)):
        square = k.double().square().mean(0)
        pair = (square[:, :8] + square[:, 8:]) / 2
        energies = unpacked(part["energy"])[layer]
        torch.testing.assert_close(energies, torch.cat([pair, pair], 1), rtol=1e-4, atol=1e-7)
        mass = unpacked(part["mass"])[layer]
        for place, band in enumerate(BANDS[:5]):
            want = torch.stack([weight[:, r, max(SINKS, r + 1 - band) : r + 1].sum(-1)
                                / weight[:, r, SINKS : r + 1].sum(-1) for r in rows]).sum(0)  # fmt: skip
            torch.testing.assert_close(mass[:, place], want.double(), rtol=1e-3, atol=1e-3)
        close = counts(torch.stack([nearest(q[r], q[r - WINDOW : r], windows_of(WINDOW))[-1] for r in rows]))
        found = unpacked(part["close"]["sqrt2d"])[layer, -1]
        assert int(found.sum()) == ROWS * 4 and int((found - close).abs().sum()) <= 4  # rounding, at a bin's edge
        far = counts(unrelated(q[rows], torch.tensor(rows), WINDOW))
        assert int((unpacked(part["far"]["sqrt2d"])[layer] - far).abs().sum()) <= 4
        by_logits = q[rows] * (energies.sqrt() * 0.25).repeat_interleave(2, 0).float()
        far = counts(unrelated(by_logits, torch.tensor(rows), WINDOW))
        assert int((unpacked(part["far"]["calibrated"])[layer] - far).abs().sum()) <= 8


def test_prompts_together_and_what_an_earlier_run_kept(model: Any) -> None:
    some, kept = prompts(200, 170, 260), dict[str, Any]()
    one = what(model)
    whole = gather(model, some, one, keep=kept.__setitem__)
    again = gather(model, some, what(model), done={"p/0": kept["p/0"], "p/2": kept["p/2"]})
    options = {"alpha": 0.02, "epsilon": 0.3}
    (plan, rests), (other, _) = (calibrated(one, parts, **options) for parts in (whole, again))
    assert plan.values() == other.values() and torch.equal(plan.energy, other.energy)
    keys = torch.cat([seen(model, p)[1][1] for p in some]).double().square().mean(0)
    pair = (keys[:, :8] + keys[:, 8:]) / 2
    torch.testing.assert_close(plan.energy[1], torch.cat([pair, pair], 1), rtol=1e-4, atol=1e-7)
    assert rests["windows"] == [64, 80] and len(rests["mass"]) == 2 and len(rests["mass"][0]) == len(BANDS)
    for layer in range(2):
        assert all(a <= b + 1e-9 for a, b in zip(rests["mass"][layer], rests["mass"][layer][1:], strict=False))
        for scale in ("sqrt2d", "calibrated"):
            assert 0 <= plan.tau[scale][layer] < 1  # type: ignore[index]
            first, last = rests["accepted"][scale][layer]
            assert first <= last


def test_layers_with_windows_take_no_part() -> None:
    model = tiny_model("gemma2", num_hidden_layers=4)
    one = what(model)
    plan, rests = calibrated(one, gather(model, prompts(200), one), alpha=0.02, epsilon=0.9)
    assert rests["taken"] == [False, True, False, True]
    assert plan.window[::2] == (1, 1) and plan.band[::2] == (None, None) and not bool(plan.energy[::2].any())
    assert None not in plan.band[1::2]


def test_a_band_as_long_as_the_context_is_not_asked(model: Any) -> None:
    """Rows of less than twice the widest band would hold most of their weight in it, whatever they look at."""
    (part,) = gather(model, prompts(200), what(model, widest=70))
    rows = [140 + 60 * n // ROWS for n in range(ROWS)]
    _, _, weight = seen(model, prompts(200)[0])[1]
    band = BANDS.index(64)
    want = torch.stack([weight[:, r, r + 1 - 64 : r + 1].sum(-1) / weight[:, r, SINKS : r + 1].sum(-1) for r in rows])
    torch.testing.assert_close(unpacked(part["mass"])[1, :, band], want.sum(0).double(), rtol=1e-3, atol=1e-3)


def test_windows_that_are_tried() -> None:
    assert windows_of(1024) == (64, 128, 256, 512, 1024) and windows_of(50) == (50,) and windows_of(64) == (64,)
