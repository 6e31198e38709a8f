"""What a model needs that longreach lacks, refused by name before anything is attached."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longreach.errors import InvalidInput, Unsupported

KNOWN_LAYERS = ("full_attention", "sliding_attention")


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model, also inside a model of several parts."""
    return model.config.get_text_config(decoder=True)


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The decoder whose forward pass longreach stands around. Raises InvalidInput, Unsupported."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidInput(f"expected a transformers model, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder; longreach attaches to decoder-only models")
    return model.get_decoder()


def check_model(model: PreTrainedModel) -> None:
    """Raise Unsupported where the model's attention is not of a kind that longreach computes."""
    name, config = type(model).__name__, text_config(model)
    if not getattr(model, "_supports_attention_backend", False):
        raise Unsupported(f"{name} does not take its attention from transformers' attention interface")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise Unsupported(f"{name} uses multi-head latent attention (MLA), which longreach does not implement")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - set(KNOWN_LAYERS))
    if strange:
        raise Unsupported(f"{name} has layers of type {', '.join(strange)}; longreach knows {', '.join(KNOWN_LAYERS)}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise Unsupported(f"{name} shares keys and values between layers, which longreach does not implement")
    places = {str(d) for d in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        raise Unsupported(f"{name} is spread over {', '.join(sorted(places))} by device_map; load it on one device")
