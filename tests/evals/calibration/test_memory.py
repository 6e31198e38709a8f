"""Calibration's memory beyond the model's stays below what is stated, as texts grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.adapters.transformers import shape_of
from longreach.evals.calibration.gather import Gather, gather
from longreach.evals.calibration.kascade import KascadeGather
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.kascade import calibrate
from longreach.ops import reference_chunks
from longreach.testing.tiny import tiny_model
from tests.evals.calibration.allocated import peak

CHUNK, K, TILE, WIDTH = 128, 16, 8, 64


class Passes(Gather):
    """Keeps what a model's passes over a prompt show of it."""

    needs_residuals = True

    def begin(self, prompt: Prompt) -> None:
        self.seen: list[tuple[str, Any, Any, Any]] = []

    def layer(self, call: Any, outcome: Any) -> None:
        self.seen.append(("layer", call, outcome, None))

    def residual(self, layer: int, x: Tensor, out: Tensor) -> None:
        self.seen.append(("residual", layer, x.clone(), out.clone()))

    def finish(self) -> Any:
        return self.seen

    @staticmethod
    def again(seen: list[tuple[str, Any, Any, Any]], what: Gather, prompt: Prompt) -> Any:
        """Show it all to another: no memory is the model's then."""
        what.begin(prompt)
        for kind, *shown in seen:
            if kind == "layer":
                what.layer(*shown[:2])
            else:
                what.residual(*shown)
        return what.finish()


def test_the_measure_counts_what_lives_at_once() -> None:
    def work() -> Tensor:
        x = torch.ones(1000)
        for _ in range(5):
            x = x + 1
        return x

    assert 8000 <= peak(work) < 8100


def test_peak_memory_is_below_the_bound_as_texts_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference_chunks, "SCORES_AT_ONCE", 1 << 13
    )  # else it is nearly all that there is in a small model
    model = tiny_model("llama", num_hidden_layers=3)
    shape = shape_of(model)
    used: dict[int, list[int]] = {1 << 24: [], 1 << 13: []}  # whole passes of tiles, and a few tiles at a time
    for length in (128, 256, 512):
        prompt = Prompt("p", tuple((torch.arange(length) * 7 % 250).tolist()))
        (seen,) = gather(model, [prompt], Passes(), chunk=CHUNK)
        for most, found in used.items():
            monkeypatch.setattr(calibrate, "MOST", most)
            what = KascadeGather(shape, k=K, tile=TILE)
            found.append(peak(lambda seen=seen, what=what, prompt=prompt: Passes.again(seen, what, prompt)))
            bound = calibrate.memory(
                shape.layers, shape.kv_heads, 2, length, k=K, tokens=what.tokens, chunk=CHUNK, width=WIDTH, head_dim=16,
            )  # fmt: skip
            assert found[-1] <= bound <= 4 * found[-1], (used, bound)
    tiles = CHUNK // what.tokens
    assert used[1 << 24][-1] - used[1 << 13][-1] > 0.8 * 4 * tiles * shape.kv_heads * 512 - 4 * (1 << 13)
