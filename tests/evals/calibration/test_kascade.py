"""Kascade's calibration of a model against whole matrices of attention weights that transformers gives out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.adapters.transformers import shape_of
from longreach.errors import Unsupported
from longreach.evals.calibration.gather import gather
from longreach.evals.calibration.kascade import KascadeGather, calibrated
from longreach.evals.calibration.prompts import Prompt
from longreach.testing.tiny import tiny_model
from tests.methods.kascade.brute import tile_shares

K, TILE, LENGTH = 12, 16, 61  # tiles of 8 tokens, the last cut short
GROUP = 2
PROMPTS = [Prompt(str(seed), tuple(((torch.arange(LENGTH) * (7 + seed) + seed) % 250).tolist())) for seed in (0, 1)]


@torch.no_grad()
def weights(model: Any, prompt: Prompt) -> Tensor:
    """[L, H, N, N], by transformers' own eager attention; a virtual sink's share left out."""
    given = model(torch.tensor([prompt.tokens]), output_attentions=True).attentions
    return torch.cat([x[..., :LENGTH] for x in given])


@torch.no_grad()
def changes(model: Any, prompt: Prompt) -> Tensor:
    """[L]: how much attention turns the stream, from the modules' own inputs and outputs (Llama's layers)."""
    found = []
    for layer in model.model.layers:
        kept: dict[str, Tensor] = {}
        hooks = [
            layer.input_layernorm.register_forward_pre_hook(lambda m, args, kept=kept: kept.update(x=args[0])),
            layer.post_attention_layernorm.register_forward_pre_hook(lambda m, args, kept=kept: kept.update(y=args[0])),
        ]
        model(torch.tensor([prompt.tokens]))
        for hook in hooks:
            hook.remove()
        found.append((1 - torch.nn.functional.cosine_similarity(kept["x"][0], kept["y"][0], dim=-1)).mean())
    return torch.stack(found)


@pytest.mark.parametrize("chunk", [LENGTH, 10, 1])
def test_similarity_and_importance_against_transformers_own_weights(chunk: int) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    parts = gather(model, PROMPTS, KascadeGather(shape_of(model), k=K, tile=TILE), chunk=chunk)
    found = calibrated(parts)
    assert found.layers == (0, 1, 2)
    want = sum(tile_shares(weights(model, p), GROUP, K, TILE // GROUP) for p in PROMPTS) / 2
    torch.testing.assert_close(found.heads, want, atol=2e-5, rtol=0)
    assert float(want[0, :, 2].max()) < 0.999  # layers do differ
    turned = sum(changes(model, p) for p in PROMPTS) / 2
    torch.testing.assert_close(found.importance.float(), turned, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "layers", "more"),
    [
        ("gemma2", (1, 3), {"num_hidden_layers": 4}),  # soft caps
        ("gpt_oss", (1, 3), {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("qwen2", (0,), {}),
    ],
)
def test_layers_with_a_window_take_no_part(family: str, layers: tuple[int, ...], more: dict[str, Any]) -> None:
    model = tiny_model(family, **more)
    found = calibrated(gather(model, PROMPTS[:1], KascadeGather(shape_of(model), k=K, tile=TILE), chunk=16))
    assert found.layers == layers and len(found.importance) == model.config.num_hidden_layers
    kept = torch.tensor(layers)
    want = tile_shares(weights(model, PROMPTS[0])[kept], GROUP, K, TILE // GROUP)
    torch.testing.assert_close(found.heads, want, atol=2e-5, rtol=0)
    assert found.plan(len(layers), K, TILE).anchors == layers


def test_a_model_of_windows_alone_has_nothing_to_spare() -> None:
    model = tiny_model("mistral")
    parts = gather(model, PROMPTS[:1], KascadeGather(shape_of(model), k=K, tile=TILE))
    with pytest.raises(Unsupported, match="every layer of this model has a sliding window"):
        calibrated(parts)


def test_groups_that_do_not_divide_a_tile() -> None:
    model = tiny_model("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    what = KascadeGather(shape_of(model), k=K, tile=16)
    assert what.tokens == 5 and what.chunk(12) == 15
    found = calibrated(gather(model, PROMPTS[:1], what, chunk=12))
    want = tile_shares(weights(model, PROMPTS[0]), 3, K, 5)
    torch.testing.assert_close(found.heads, want, atol=2e-5, rtol=0)
