"""What sharing keys keeps, against whole matrices of attention weights and plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.adapters.transformers import shape_of
from longreach.evals.calibration import oracle, sharing
from longreach.evals.calibration.gather import gather
from longreach.evals.calibration.oracle import alone, over_layers
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.calibration.sharing import SharingGather, Tile, budget, kept, pooled, shared
from longreach.methods.kascade.plan import KascadePlan
from longreach.testing.tiny import tiny_model

GROUP, LENGTH, TILE = 2, 90, 16
PROMPTS = [Prompt(str(seed), tuple(((torch.arange(LENGTH) * (7 + seed) + seed) % 250).tolist())) for seed in (0, 1)]
PLAN = KascadePlan((0, 1), ((0, 1), (0, 1), (1, 1), (1, 0)), (0, 1, 2, 3), 64, TILE)


def some_tile(tokens: int = 3, before: int = 9) -> Tile:
    draw = torch.Generator().manual_seed(0)
    n = before + tokens
    q, k, v = (torch.randn(*shape, generator=draw) for shape in ((tokens, GROUP, 8), (n, 8), (n, 8)))
    logits = torch.einsum("tgd,nd->tgn", q, k)
    causal = torch.arange(n) <= before + torch.arange(tokens)[:, None]
    return Tile(logits.masked_fill(~causal[:, None], -torch.inf).softmax(-1), q, k, v, before)


def test_weight_and_error_of_what_is_attended_to() -> None:
    tile, chosen = some_tile(), torch.tensor([1, 4])
    weight, error = kept(tile, chosen)
    weights, errors = [], []
    for t in range(3):
        for g in range(GROUP):
            share = tile.share[t, g]
            seen = [1, 4, *range(9, 12)]
            held = float(share[seen].sum())
            part = (share[seen, None] * tile.v[seen]).sum(0) / held
            whole = (share[:, None] * tile.v).sum(0)
            weights.append(held)
            errors.append(float((part - whole).norm() / whole.norm()))
    assert weight == pytest.approx(sum(weights) / 6, abs=1e-6)
    assert error == pytest.approx(sum(errors) / 6, abs=1e-6)
    assert kept(tile, torch.arange(9)) == (pytest.approx(1), pytest.approx(0, abs=1e-5))


def test_pooling_before_and_after_the_softmax() -> None:
    tile = some_tile()
    torch.testing.assert_close(pooled(tile, "post"), tile.share.sum((0, 1))[:9])
    mean = tile.q.reshape(-1, 8).mean(0)
    torch.testing.assert_close(pooled(tile, "pre"), torch.stack([tile.k[n] @ mean for n in range(9)]))
    assert tile.first(1).share.shape == (1, GROUP, 12) and tile.first(1).before == 9


def test_budgets() -> None:
    assert [budget(p, 0.1, 128) for p in (100, 1000, 1280, 5000)] == [100, 128, 128, 500]
    assert budget(30, 0.1, 1) == 3


def test_tiles_are_whole_and_spread_over_the_last_three_quarters() -> None:
    what = SharingGather(shape_of(tiny_model("llama", num_hidden_layers=4)), PLAN, tiles=4)
    assert what.span == 128 and what.sizes == (2, 4, 8, 16, 32, 64, 128, 256)
    assert what.starts(2048) == [384, 896, 1408, 1920]
    assert what.starts(what.needed) == [256] and not what.starts(what.needed - 1)
    assert what.chunk(300) == 384


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and budgets for prompts of 90 tokens."""
    monkeypatch.setattr(sharing, "SIZES", (2, 8, 16))
    monkeypatch.setattr(sharing, "LEAST", 5)
    monkeypatch.setattr(sharing, "SHARES", (0.1, 0.5))


@torch.no_grad()
def weights(model: Any, prompt: Prompt) -> Tensor:
    return torch.cat(list(model(torch.tensor([prompt.tokens]), output_attentions=True).attentions))


def on(share: Tensor, chosen: Tensor, start: int) -> float:
    """Mean weight of rows [rows, n] on the chosen keys and those from `start` on."""
    seen = sorted({*chosen.tolist(), *range(start, share.shape[-1])})
    return float(share[:, seen].sum(-1).mean())


def assert_rows_by_themselves(oracle: dict[str, Any], given: list[Tensor], starts: list[int]) -> None:
    """Each row's best keys, weighed over the query heads of a KV head, in each layer."""
    shares, layers = oracle["shares"], 4
    want = torch.zeros(layers, len(shares), dtype=torch.float64)
    for share_of in given:
        for start in starts:
            for row in range(start, start + TILE // GROUP):
                grouped = share_of[:, :, row].double().unflatten(1, (2, GROUP)).sum(2)  # [L, G, n]
                for place, share in enumerate(shares):
                    most = grouped.topk(max(1, int(share * (start + 1) + 1e-9)), -1).values.sum(-1) / GROUP
                    want[:, place] += most.mean(-1) / (len(given) * len(starts) * (TILE // GROUP))
    got = torch.tensor(oracle["layers"]["weight"], dtype=torch.float64)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(oracle["all"]["weight"]), want.mean(0).float(), atol=1e-4, rtol=0)
    dense = (want[1:].sum(0) + 1) / layers
    torch.testing.assert_close(torch.tensor(oracle["first_dense"]["weight"]), dense.float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(oracle["first"]["weight"]), want[0].float(), atol=1e-4, rtol=0)


def test_a_row_by_itself() -> None:
    """Weight and error of its best keys, by hand; with all keys nothing is lost."""
    tile = some_tile(tokens=2, before=18)
    found = alone(tile.share, tile.v, 40)
    place = oracle.SHARES.index(0.1)
    weights, errors = [], []
    for row in tile.share:
        best = row.sum(0).topk(4).indices
        for share in row:
            held = float(share[best].sum())
            part = share[best] @ tile.v[best] / held
            whole = share @ tile.v
            weights.append(held)
            errors.append(float((part - whole).norm() / whole.norm()))
    assert found[:, place].tolist() == pytest.approx([sum(weights) / 4, sum(errors) / 4], abs=1e-5)
    assert alone(tile.share, tile.v, 200)[:, place].tolist() == pytest.approx([1.0, 0.0], abs=1e-5)
    said = over_layers(torch.stack([found, found / 2], -1), [0, 1])
    assert said["first_dense"]["error"][place] == pytest.approx(float(found[1, place]) / 4)
    assert said["first"]["error"][place] == pytest.approx(float(found[1, place]))


def test_against_transformers_own_weights(small: None) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    what = SharingGather(shape_of(model), PLAN, tiles=3)
    found = shared(what, gather(model, PROMPTS, what, chunk=20))
    starts = what.starts(LENGTH)
    assert len(starts) == 3 and found["tiles"] == 6
    want = {size: 0.0 for size in what.sizes}
    ways = {(way, share): 0.0 for way in sharing.MAPPINGS for share in sharing.SHARES}
    for prompt in PROMPTS:
        given = weights(model, prompt)
        for start in starts:
            for layer in range(1, 4):
                for size in want:
                    rows = given[layer, :, start : start + size // GROUP].unflatten(0, (2, GROUP)).transpose(1, 2)
                    for head in range(2):
                        mine = rows[head].reshape(-1, LENGTH)
                        best = mine.sum(0)[:start].topk(budget(start, 0.1, 5)).indices
                        want[size] += on(mine, best, start) / (2 * 3 * 3 * 2)
            tile = given[:, :, start : start + TILE // GROUP].unflatten(1, (2, GROUP)).transpose(2, 3)
            scores = tile.sum((2, 3))[..., :start]  # [L, G, start]
            for layer in (2, 3):
                for head in range(2):
                    for share in sharing.SHARES:
                        of = {
                            "mapped": scores[1, PLAN.head_map[layer][head]], "own": scores[1, head],
                            "all": scores[1].sum(0), "oracle": scores[layer, head],
                        }  # fmt: skip
                        for way, mass in of.items():
                            best = mass.topk(budget(start, share, 1)).indices
                            mine = tile[layer, head].reshape(-1, LENGTH)
                            ways[way, share] += on(mine, best, start) / (2 * 3 * 2 * 2)
    assert found["pooling"]["post"]["weight"] == pytest.approx([want[size] for size in what.sizes], abs=1e-4)
    for way in sharing.MAPPINGS:
        expected = [ways[way, share] for share in sharing.SHARES]
        assert found["mapping"][way]["weight"] == pytest.approx(expected, abs=1e-4)
    assert_rows_by_themselves(found["oracle"], [weights(model, prompt) for prompt in PROMPTS], starts)
    best_own, own = (found["mapping"][way]["weight"] for way in ("oracle", "own"))
    assert all(best > other for best, other in zip(best_own, own, strict=True))
    assert len(found["top_256"]) == 4 and found["top_256"][2] == pytest.approx([1.0] * 4)  # 90 keys: all of them


def test_layers_with_a_window_and_plans_of_anchors_alone(small: None) -> None:
    model = tiny_model("gemma2", num_hidden_layers=4)
    plan = KascadePlan((1, 3), ((0, 1),) * 4, (1, 3), 64, TILE)
    what = SharingGather(shape_of(model), plan, tiles=2)
    found = shared(what, gather(model, PROMPTS[:1], what))
    assert found["mapping"]["own"] == {"weight": None, "error": None}
    assert found["pooling"]["pre"]["weight"] and found["top_256"][0] == [0.0] * 4
