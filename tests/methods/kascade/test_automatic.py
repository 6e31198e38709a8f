"""A plan made of a prompt: by Triton's kernels, interpreted without a GPU, and by the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade import automatic
from longreach.methods.kascade.automatic import KascadeMaker, fewest_anchors
from longreach.methods.kascade.plan import KascadePlan
from longreach.methods.plan_maker import PromptRead
from longreach.ops import Rows
from longreach.plans import PlannedModel
from longreach.testing.inputs import random_kv
from tests.ops.attend.kernels import here
from tests.plans.factory import plan

LAYERS, HEADS, GROUP, LENGTH = 3, 2, 2, 150
MAKER = KascadeMaker(GROUP, tiles=4, k=9, tile=16)


def prompt(impl: str, **given: Any) -> PromptRead:
    """The last rows of a prompt of random keys, in a batch of two."""
    model = ModelShape(LAYERS, GROUP * HEADS, HEADS, 16)
    draw = torch.Generator().manual_seed(0)
    pos = torch.arange(LENGTH - MAKER.rows, LENGTH)
    q = torch.randn(MAKER.rows, GROUP * HEADS, 16, generator=draw)
    views, calls = [], dict[int, LayerCall]()
    for layer in range(LAYERS):
        kv = random_kv([70, LENGTH], heads=HEADS, dim=16, seed=layer)
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


def test_a_prompt_that_asks_for_too_little_is_refused() -> None:
    """Equal queries and keys in all layers: the first layer's choice serves every other."""
    given = prompt("reference")
    same = replace(
        given, calls={n: replace(call, rows=given.calls[0].rows, kv=given.views[0]) for n, call in given.calls.items()}
    )
    with pytest.raises(
        InvalidInput, match=r"too easy to plan by: anchors in 1 of 3 layers find 70% .* needs 3 or more"
    ):
        MAKER.make(same)
    assert [fewest_anchors(n) for n in (1, 2, 3, 12, 32, 36, 80)] == [1, 2, 3, 3, 5, 5, 11]


def test_the_report_says_where_most_layers_are_anchors() -> None:
    model = PlannedModel.of("a model", prompt("reference").model)
    for anchors, text in (((0, 1, 2), "anchors 0 1 2 (more than half of the layers: slow)"), ((0,), "anchors 0")):
        values = KascadePlan(anchors, ((0, 1),) * 3, (0, 1, 2), 9, 16).values()
        assert MAKER.about(replace(plan("kascade", arrays={}), model=model, values=values)) == text


def test_rows_of_a_tile_are_taken_from_its_end() -> None:
    given = prompt("reference")
    blocks = list(MAKER._blocks(given.calls[0]))
    rows = torch.cat([rows for rows, _ in blocks])
    assert int(rows[-1]) == MAKER.rows - 1 and set(rows.diff().tolist()) == {MAKER.every}
    assert torch.cat([before for _, before in blocks]).tolist() == [LENGTH - 8 * n for n in (4, 3, 2, 1)]
    few = replace(MAKER, every=1)
    assert sum(len(rows) for rows, _ in few._blocks(given.calls[0])) == MAKER.rows
