"""Text prompts for the decoders of multimodal models; images are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForImageTextToText, PreTrainedModel

from longreach import attach, generate
from longreach.errors import Unsupported
from longreach.testing.tiny import HYBRIDS, SHAPE, WINDOW, from_config
from tests.adapters.transformers.reference import padded_batch, prompt

NEW = 64
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
          "patch_size": 4, "spatial_merge_size": 2}  # fmt: skip
IMAGES = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 262, "vision_end_token_id": 263}
# name -> class, fields of the text, fields of the vision part, of the whole
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", AXES, {**VISION, "fullatt_block_indexes": [0]}, IMAGES),
    "qwen3_vl": ("Qwen3VL", AXES, {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, IMAGES),
    "qwen3_5": (
        "Qwen3_5",
        {**HYBRIDS["qwen3_5"][1], "num_hidden_layers": 4,
         "rope_parameters": {**AXES["rope_parameters"], "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
        {**VISION, "num_position_embeddings": 16},
        IMAGES,
    ),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "patch_size": 14, "image_size": 28},
        {"image_token_index": 260, "boi_token_index": 261, "eoi_token_index": 262, "mm_tokens_per_image": 4},
    ),
}  # fmt: skip


def made(name: str) -> PreTrainedModel:
    if name == "gemma3_text":
        fields = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        return from_config(transformers.Gemma3TextConfig(**SHAPE, **fields))
    of, text, vision, whole = MODELS[name]
    config = getattr(transformers, f"{of}Config")(text_config={**SHAPE, **text}, vision_config=vision, **whole)
    return from_config(config, auto=AutoModelForImageTextToText)


@pytest.mark.parametrize("name", [*MODELS, "gemma3_text"])
def test_text_prompts(name: str) -> None:
    model, (tokens, mask) = made(name), padded_batch()
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    alone = model.generate(prompt(), **options)
    chunks = name.startswith("gemma") or Version(transformers.__version__) >= Version(
        "5.18"
    )  # 5.17 cannot cut Qwen's positions
    batch = model.generate(tokens, attention_mask=mask, **options)
    with attach(model) as session:
        assert torch.equal(model.generate(prompt(), **options), alone)
        if chunks:
            assert torch.equal(model.generate(prompt(), prefill_chunk_size=16, **options), alone)
        assert torch.equal(model.generate(tokens, attention_mask=mask, **options), batch)
        assert torch.equal(generate(session, prompt(), max_new_tokens=NEW).sequences, alone)
        assert torch.equal(generate(session, tokens, mask, max_new_tokens=NEW).sequences, batch)
    assert torch.equal(model.generate(prompt(), **options), alone)
    with attach(model, decode="streaming_llm sinks=1 window=4") as session:
        model.generate(prompt(), **options)
        assert (session.report().fraction("decode") or 1.0) < 0.9


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_images(name: str) -> None:
    model, tokens = made(name), prompt()
    axes = torch.arange(tokens.shape[1]).expand(4, 1, -1).clone()
    with attach(model), torch.no_grad():
        model(tokens, position_ids=axes)
        axes[2, :, 10:14] = 10
        with pytest.raises(Unsupported, match="position_ids differ by axis, as those of images and videos do"):
            model(tokens, position_ids=axes)
        model(tokens)


def test_images_that_see_each_other() -> None:
    model, tokens = made("gemma3"), prompt()
    kinds = torch.zeros_like(tokens)
    with attach(model), torch.no_grad():
        want = model(tokens).logits
        assert torch.equal(model(tokens, token_type_ids=kinds).logits, want)
        kinds[:, 10:14] = 1
        with pytest.raises(Unsupported, match="neither causal nor a sliding window"):
            model(tokens, token_type_ids=kinds)
        assert torch.equal(model(tokens).logits, want)
