"""Refuses, by name and before attaching, models that need features longreach lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from longreach.adapters.transformers.frequencies import check_frequencies
from longreach.adapters.transformers.hybrid import attends_by_interface, check_hybrid, rotates
from longreach.adapters.transformers.latent import check_latent
from longreach.adapters.transformers.rotary import attention_modules
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import ModelShape
from longreach.methods.model_config import (
    BOTH,
    NEITHER,
    STATE,
    attention_layers,
    is_hybrid,
    is_latent,
    shape_of_config,
)
from longreach.methods.slots import Eviction
from longreach.ops.impl import has_numba

KNOWN_LAYERS = ("full_attention", "sliding_attention", *STATE, *BOTH, *NEITHER)


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model, also inside a model of several parts."""
    return model.config.get_text_config(decoder=True)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The model's shape, for methods to check their options against."""
    return shape_of_config(text_config(model))


def cache_windows(model: PreTrainedModel) -> dict[int, int]:
    """layer -> window, for layers that transformers' own cache keeps only a window of.

    Counted are layers that attend: in a hybrid model the others have no number.
    """
    config = text_config(model)
    layers: list[Any] = DynamicCache(config=config).layers
    if is_hybrid(config):
        layers = [layers[n] for n in attention_layers(config)]
    return {n: int(layer.sliding_window) for n, layer in enumerate(layers) if getattr(layer, "is_sliding", False)}


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The decoder that longreach wraps. Raises InvalidInput, Unsupported."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidInput(
            f"expected a transformers model, got {type(model).__name__}; attach to the model itself, before "
            f"it is compiled or wrapped"
        )
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder; longreach attaches to decoder-only models")
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        raise Unsupported(f"{type(model).__name__} has no decoder of its own to attach to")
    return decoder


def check_chunks(model: nn.Module) -> None:
    """Raise Unsupported for a model whose keys and values of a chunk cannot be computed without the text before it."""
    variant = mka_variant(model)
    if isinstance(model, PreTrainedModel) and is_latent(text_config(model)):
        raise Unsupported(
            f"{type(model).__name__} has multi-head latent attention (MLA), whose cached vectors longreach does not "
            f"store in chunks; read whole prompts (no chunk store, fuse=None)"
        )
    if isinstance(model, PreTrainedModel) and shape_of(model).by_layer:
        raise Unsupported(
            f"{type(model).__name__} has keys whose shape differs by layer, which longreach does not store in chunks; "
            f"read whole prompts (no chunk store, fuse=None)"
        )
    if isinstance(model, PreTrainedModel) and is_hybrid(text_config(model)):
        raise Unsupported(
            f"{type(model).__name__} has recurrent layers: their state depends on all tokens before, so that of a "
            f"chunk cannot be stored and used elsewhere; read whole prompts (no chunk store, fuse=None)"
        )
    if variant is not None:
        why = "its keys are attended to through blocks, which begin at multiples of their size in each prompt"
        if variant != "block_mka":
            why = "its keys depend on the tokens before"
        raise Unsupported(
            f"{type(model).__name__} has {variant} layers: {why}, so those of a chunk cannot be stored and used "
            f"elsewhere; read whole prompts (no chunk store, fuse=None)"
        )


def mka_variant(model: Any) -> str | None:
    """The variant of MKA that a model was converted to; None for other models."""
    options = getattr(getattr(model, "config", None), "mka", None)
    return options.get("variant") if isinstance(options, dict) else None


def check_levels(model: nn.Module, *, evicts: bool = False, **methods: str) -> None:
    """Raise Unsupported where layers of MKA cannot take what is attached. methods: slot -> name of its method."""
    variant, name = mka_variant(model), type(model).__name__
    if variant not in ("mka", "block_mka"):
        return
    if evicts:
        raise Unsupported(f"{name} has {variant} layers, whose blocks need all keys; leave evict out")
    for slot, method in methods.items():
        if variant == "block_mka" and method != "dense":
            raise Unsupported(
                f"{name} has block_mka layers, which choose their keys themselves: expected {slot}=None, got {method}"
            )


def check_model(
    model: PreTrainedModel, decoder: PreTrainedModel, *, rotary: bool, frequencies: bool = False, placed: bool = True
) -> None:
    """Raise Unsupported where the model's attention is not of a kind that longreach computes.

    rotary: whether a method needs queries before rotation. frequencies: whether one needs those of the rotation.
    placed: whether the weights must be on one device; False for a model without memory.
    """
    name, config = type(model).__name__, text_config(model)
    hybrid = is_hybrid(config)
    if not decoder._supports_attention_backend and not (hybrid and attends_by_interface(decoder)):
        raise Unsupported(f"{name} does not take its attention from transformers' attention interface")
    if is_latent(config):
        check_latent(name, config, attention_modules(decoder))
        if frequencies:
            raise Unsupported(
                f"{name} has multi-head latent attention (MLA), which rotates a part of its cached channels, and a "
                f"method needs the frequencies of all; use another method"
            )
    if getattr(decoder, "_is_stateful", False) and not hybrid:
        raise Unsupported(f"{name} has recurrent layers, whose state longreach's cache does not hold")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - set(KNOWN_LAYERS))
    if strange:
        raise Unsupported(
            f"{name} has layers of type {', '.join(strange)}; longreach supports {', '.join(KNOWN_LAYERS)}"
        )
    if hybrid:
        check_hybrid(name, decoder, config)
    if getattr(config, "num_kv_shared_layers", 0):
        raise Unsupported(f"{name} shares keys and values between layers, which longreach does not implement")
    if config.output_attentions:
        raise Unsupported(f"{name}'s config sets output_attentions; longreach never holds attention weights")
    rotated = getattr(config, "rope_parameters", None) is not None and (not hybrid or rotates(decoder))
    if rotary and not rotated:
        raise Unsupported(f"{name} has no rotary embedding, and a method needs queries before rotation")
    if frequencies:
        if not rotated:
            raise Unsupported(f"{name} has no rotary embedding, and a method needs its frequencies")
        check_frequencies(name, decoder, config)
    if any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
        raise Unsupported(f"{name} is compiled; longreach attaches to models as they are, before model.compile()")
    if placed:
        _check_places(name, model)


def _check_places(name: str, model: PreTrainedModel) -> None:
    places = {str(d) for d in (getattr(model, "hf_device_map", None) or {}).values()}
    places = places if len(places) > 1 else {str(p.device) for p in model.parameters()}
    if "meta" in places:
        raise Unsupported(f"{name} has weights on the meta device; load them first")
    if len(places) > 1:
        raise Unsupported(f"{name} is spread over {', '.join(sorted(places))} by device_map; load it on one device")


def check_pass(decoder: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise Unsupported if a forward pass requests anything that longreach does not do."""
    name = type(decoder).__name__
    wanted = kwargs.get("output_attentions")
    if decoder.config.output_attentions if wanted is None else wanted:
        raise Unsupported("output_attentions=True: longreach never holds attention weights")
    if decoder.training and any(getattr(m, "gradient_checkpointing", False) for m in decoder.modules()):
        raise Unsupported(f"gradient checkpointing of {name} with longreach attached: disable it, or call model.eval()")


def check_host_attend(config: CacheConfig, device: torch.device, impl: str) -> None:
    """Raise Unsupported for attention by the CPU where it cannot be. impl: of the session."""
    if config.host_attend == "cpu":
        why = None
        if device.type != "cuda":
            why = f"it needs a model on a cuda device, and this one is on {device}"
        elif not has_numba():
            why = "it needs Numba, which is not here: pip install 'longreach[cpu]'"
        elif impl != "auto":
            why = f"impl={impl!r} names another implementation; leave impl out"
        if why is not None:
            raise Unsupported(f"host_attend='cpu' (--host-attend): {why}; or leave host_attend out")


def check_host(config: CacheConfig, evict: Eviction | None, shape: ModelShape) -> None:
    """Raise Unsupported for eviction from a cache in host memory, and for layers that it cannot hold."""
    if config.host and (shape.values_in_keys or shape.by_layer):
        what = "a latent cache (MLA)" if shape.values_in_keys else "layers of different shapes"
        raise Unsupported(f"CacheConfig(host=True) (--host): host memory does not hold {what}; use host=False")
    if config.host and evict is not None:
        raise Unsupported(
            f"evict={evict.name}: keys in host memory cannot be evicted; leave evict out, or use "
            f"CacheConfig(host=False)"
        )
