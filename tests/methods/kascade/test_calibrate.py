"""Similarities of tiles against their definition in plain loops; importance; what a prompt has to hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longreach.methods.kascade.calibrate import (
    TileSimilarity,
    block_tiles,
    change,
    mass_on,
    own_mass,
    tile_tokens,
    tokens_needed,
)
from tests.methods.kascade.brute import tile_shares

LAYERS, HEADS, GROUP = 3, 2, 2


def some_weights(length: int, seed: int = 0) -> Tensor:
    """[L, H, N, N], causal, rows sum to 1; a few keys are heavy, others in each layer and head."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(LAYERS, HEADS * GROUP, length, length, generator=draw)
    logits += 3 * torch.randn(LAYERS, HEADS * GROUP, 1, length, generator=draw)
    return logits.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)


def streamed(weights: Tensor, k: int, tokens: int, passes: list[int], block: int = 1 << 30) -> Tensor:
    """What TileSimilarity finds, in passes of so many tokens and blocks of so many tiles."""
    length = weights.shape[2]
    found = TileSimilarity(LAYERS, HEADS, k, tokens)
    first = 0
    for size in passes:
        last = min(first + size, length)
        starts = [p for p in range(first, last, tokens) if p > k]
        found.start()
        for layer in range(LAYERS):
            for at in range(0, len(starts), block):
                some = starts[at : at + block]
                rows = [weights[layer, :, p : min(p + tokens, last), :last].sum(1) for p in some]
                pooled = torch.stack(rows).unflatten(1, (HEADS, GROUP)).sum(2)
                found.add(layer, pooled, torch.tensor(some))
        first = last
    assert first == length
    return found.finish()


@pytest.mark.parametrize("length", [64, 61, 49])  # whole tiles, and the last cut short
@pytest.mark.parametrize(("k", "tokens"), [(5, 8), (8, 8), (3, 1)])
def test_against_the_definition(length: int, k: int, tokens: int) -> None:
    weights = some_weights(length)
    found = streamed(weights, k, tokens, [length])
    want = tile_shares(weights, GROUP, k, tokens)
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=0)
    above = torch.ones(LAYERS, LAYERS).triu(1).bool()[:, None, :, None].expand_as(want)
    assert 0 < float(want[above].min()) < float(want[above].max()) < 0.98  # there is something to be told apart


def test_passes_and_blocks_change_nothing() -> None:
    weights = some_weights(61)
    whole = streamed(weights, 5, 8, [61])
    for passes, block in (([16, 24, 21], 1 << 30), ([61], 1), ([8] * 8, 2), ([40, 21], 3)):
        assert torch.equal(streamed(weights, 5, 8, passes, block), whole)


def test_a_prompt_without_a_choice_compares_nothing() -> None:
    for length, k in ((9, 8), (8, 8), (30, 32)):
        assert torch.equal(streamed(some_weights(length), k, 8, [length]), torch.ones(LAYERS, HEADS, LAYERS, HEADS))


@pytest.mark.parametrize(("k", "tile", "group"), [(64, 128, 4), (64, 128, 7), (5, 128, 200), (63, 64, 1), (64, 64, 1)])
def test_the_tokens_needed_are_the_fewest_with_a_choice(k: int, tile: int, group: int) -> None:
    tokens, needed = tile_tokens(tile, group), tokens_needed(k, tile, group)
    starts = [p for p in range(0, needed, tokens) if p > k]
    assert len(starts) == 1 and starts[0] == needed - 1


def test_tiles_count_the_heads_of_a_group() -> None:
    assert [tile_tokens(128, group) for group in (1, 4, 7, 128, 200)] == [128, 32, 18, 1, 1]


def test_own_mass_of_a_tile_that_is_cut_short() -> None:
    pooled = torch.arange(10.0)[None, None].repeat(2, 1, 1)
    assert own_mass(pooled, torch.tensor([4, 8]), 4).tolist() == [[4 + 5 + 6 + 7], [8 + 9]]


def test_mass_on_keys_of_other_heads() -> None:
    pooled = torch.tensor([[[1.0, 2, 4, 8], [16, 32, 64, 128]]])
    chosen = torch.tensor([[[0, 1], [3, 2], [0, 3]]], dtype=torch.int32)
    assert mass_on(pooled, chosen).tolist() == [[[3, 48], [12, 192], [9, 144]]]


def test_change_is_one_less_the_cosine_with_the_residual_stream() -> None:
    x, out = torch.tensor([[3.0, 0], [0, 2], [1, 1]]), torch.tensor([[0.0, 4], [0, 1], [-2, -2]])
    torch.testing.assert_close(change(x, out), torch.tensor([1 - 0.6, 0.0, 2.0]))
    torch.testing.assert_close(change(x.bfloat16(), out.bfloat16()), torch.tensor([1 - 0.6, 0.0, 2.0]))


def test_blocks_hold_one_tile_at_least() -> None:
    assert block_tiles(8, 1 << 24) == 1 and block_tiles(8, 1 << 17) == 16
