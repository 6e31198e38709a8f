"""A plan made of a prompt: by Triton's kernels, interpreted without a GPU, and by the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade import automatic
from longreach.methods.kascade.automatic import KascadeMaker
from longreach.methods.plan_maker import PromptRead
from longreach.ops import Rows
from longreach.testing.inputs import random_kv
from tests.ops.attend.kernels import here

LAYERS, HEADS, GROUP, LENGTH = 3, 2, 2, 150
MAKER = KascadeMaker(GROUP, tiles=4, k=9, tile=16)


def prompt(impl: str, **given: Any) -> PromptRead:
    """The last rows of a prompt of random keys, in a batch of two; keys of neighbouring layers are alike."""
    model = ModelShape(LAYERS, GROUP * HEADS, HEADS, 16)
    draw = torch.Generator().manual_seed(0)
    pos = torch.arange(LENGTH - MAKER.rows, LENGTH)
    q = torch.randn(MAKER.rows, GROUP * HEADS, 16, generator=draw)
    views, calls = [], dict[int, LayerCall]()
    for layer in range(LAYERS):
        kv = random_kv([70, LENGTH], heads=HEADS, dim=16, seed=layer // 2)
        views.append(here(kv))
        rows = here(Rows(q + 0.1 * layer, torch.ones_like(pos), pos))
        calls[layer] = LayerCall(layer, rows, views[-1], here(torch.arange(2)), 0.5, model=model, impl=impl, **given)
    changes = {layer: torch.rand(MAKER.rows, generator=draw) for layer in range(LAYERS)}
    return PromptRead(model, LENGTH, 1, views, calls, changes)


@pytest.mark.parametrize("given", [{}, {"softcap": 3.0}, {"sink_logit": here(torch.randn(GROUP * HEADS))}])
def test_kept_logits_give_the_same_plan(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    want = MAKER.make(prompt("reference", **given))
    found = [MAKER.make(prompt("triton", **given))]
    monkeypatch.setattr(automatic, "MOST_LOGITS", 1)  # a tile at a time
    found.append(MAKER.make(prompt("triton", **given)))
    assert 0.1 < float(want.arrays["similarity"][0, :, 2].min()) < 0.99
    for parts in found:
        assert parts.values == want.values
        torch.testing.assert_close(parts.arrays["similarity"], want.arrays["similarity"], atol=2e-3, rtol=0)


def test_keys_are_read_once_where_logits_are_kept() -> None:
    reads = []
    for impl in ("triton", "reference"):
        given = prompt(impl)
        MAKER.make(given)
        reads.append([(noted.read.key_bytes, noted.read.value_bytes) for noted in given.calls[0].meter.noted])
    assert reads == [[(64, 0)], [(64, 64)]]


def test_rows_of_a_tile_are_taken_from_its_end() -> None:
    given = prompt("reference")
    blocks = list(MAKER._blocks(given.calls[0]))
    rows = torch.cat([rows for rows, _ in blocks])
    assert int(rows[-1]) == MAKER.rows - 1 and set(rows.diff().tolist()) == {MAKER.every}
    assert torch.cat([before for _, before in blocks]).tolist() == [LENGTH - 8 * n for n in (4, 3, 2, 1)]
    few = replace(MAKER, every=1)
    assert sum(len(rows) for rows, _ in few._blocks(given.calls[0])) == MAKER.rows
