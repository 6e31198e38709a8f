"""Tiny converted models, with parameters of MKA that show in every logit."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from longreach.adapters.transformers.mka import convert
from longreach.adapters.transformers.mka.attention import MemoryAttention
from longreach.mka.levels import Levels
from longreach.testing.tiny import FAMILIES, from_config, tiny_model

# family -> fields without which its layers would have sliding windows
ALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3_moe": {},
    "phi3": {},
    "glm4": {},
    "glm": {"attention_bias": True},
}
SMALL = {"block": 4, "window": 8, "blocks": 2}  # so that recall shows in prompts of 30 tokens
TWO: dict[str, Any] = {}
THREE: dict[str, Any] = {"tiers": (1, 2, 3), **SMALL}
HASH: dict[str, Any] = {**THREE, "recall": "hash", "bits": 16, "summary": "mean"}
RECALL: dict[str, Any] = {"tiers": (1, 3), **SMALL, "routing": "top1"}


@cache
def original(family: str) -> Any:
    """The model before conversion, one for each family and process. Tests leave it as it is."""
    if family in FAMILIES:
        return tiny_model(family, **ALL[family])
    fields = {**tiny_model("llama").config.to_dict(), **ALL[family], "model_type": family}
    return from_config(AutoConfig.for_model(**fields))


def converted(family: str = "llama", variant: str = "fastmka", *, seed: int | None = 3, **options: Any) -> Any:
    """A converted copy. seed: of random gates, decays and routers; None: gates of 0."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # of new routers
        model = convert(copy.deepcopy(original(family)), variant, **options)
    return model if seed is None else opened(model, seed)


@torch.no_grad()
def opened(model: Any, seed: int = 3) -> Any:
    """The model with gates, decays and routers at random values."""
    generator = torch.Generator().manual_seed(seed)
    for levels in levels_of(model).values():
        for name, parameter in levels.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.8 + 0.2 * noise if "gate" in name else parameter + 0.3 * noise)
    return model


def levels_of(model: Any) -> dict[int, Levels]:
    """layer -> what MKA adds to it."""
    return {m.layer_idx: m.mka for m in model.modules() if isinstance(m, MemoryAttention)}


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    """Assert equality up to the rounding of fp32."""
    assert got.shape == want.shape
    assert float((got - want).detach().abs().max()) <= tolerance * float(want.detach().abs().max())
