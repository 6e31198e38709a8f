"""Conversion of a pretrained model to MKA, in place, and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longreach.adapters.transformers.attach import MARK
from longreach.adapters.transformers.mka.attention import MemoryAttention
from longreach.adapters.transformers.mka.baselines import PREFIX as MLA_PREFIX
from longreach.adapters.transformers.mka.baselines import convert_baseline
from longreach.adapters.transformers.mka.families import FAMILIES, PREFIX, Family, family, install, options_of
from longreach.adapters.transformers.mka.inputs import remove_hook
from longreach.adapters.transformers.mka.layers import attention_layers, check_options, levels_for, weight_of
from longreach.adapters.transformers.mka.levels import take_attention
from longreach.errors import ConcurrentUse, InvalidInput, UnknownName, Unsupported
from longreach.mka.baselines import BASELINES
from longreach.mka.config import MKAConfig
from longreach.ops.types import describe, require


def convert(
    model: PreTrainedModel, variant: str, *, layers: Sequence[int] | None = None, gate: float = 0.0, **options: Any
) -> PreTrainedModel:
    """Give a pretrained model MKA's layers, in place; the same object is returned.

    variant: "fastmka", "mka" or "block_mka". layers: those to convert, None for all. gate: first value of every gate;
    at 0, "fastmka" and "mka" compute bit for bit what the model computed before (mode="gated" up to rounding). options:
    fields of `MKAConfig`.
    Or a baseline, in all layers: "mha" (KV heads repeated, the same function up to rounding), "gqa" with kv_heads
    (repeated or averaged), "mqa" (all averaged), "mla" with rank and rotated (see `MLAConfig`).

    The model's class and config become those of its family with MKA, and its layers get new parameters (router, gates,
    decays), with the dtype and on the device of their projections. Its own weights stay the same tensors, so optimisers
    and adapters keep theirs. `revert` undoes it. Save, load and train the model as any other; `longreach.mka.register`
    lets AutoModelForCausalLM load it.

    Raises UnknownName (variant, option, family), InvalidInput (values of options, layers that do not exist, a model
    that was converted already or is not of transformers), Unsupported (quantised, compiled or wrapped models; layers
    with a sliding window, by number), ConcurrentUse (longreach is attached). After an error the model is unchanged.
    """
    if variant in BASELINES:
        require(layers is None and gate == 0.0, lambda: f"layers, gate: {variant} replaces attention in all layers")
        _family_of(model)
        return convert_baseline(model, variant, **options)
    found, config = _family_and_config(model, variant, layers, options)
    ok = isinstance(gate, (int, float)) and not isinstance(gate, bool) and math.isfinite(gate)
    require(ok, lambda: f"gate: expected a finite number, got {gate!r}")
    made = levels_for(model, config, float(gate))
    _become(model, found.model, found.config, config)
    install(model, made)
    return model


def check_convert(model: PreTrainedModel, variant: str, *, layers: Sequence[int] | None = None, **options: Any) -> None:
    """Raise what `convert` raises about the model and the variant's options. Sizes of a baseline are not checked."""
    if variant in BASELINES:
        _family_of(model)
    else:
        _family_and_config(model, variant, layers, options)


def _family_and_config(
    model: PreTrainedModel, variant: str, layers: Sequence[int] | None, options: dict[str, Any]
) -> tuple[Family, MKAConfig]:
    """The model's family and the variant's config, after a check that they fit. Raises as `convert`."""
    found = _family_of(model)
    if layers is not None:
        options = {**options, "layers": _ascending(layers)}
    config = MKAConfig.make(variant, **options)
    check_options(model, config)
    _check_layers(model, config)
    return found, config


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `convert`, in place: the model has its family's own classes again, and computes what it did before.

    Only for gates that are all 0: anything else would be another model. Raises InvalidInput for other gates, by layer,
    and for a model without MKA's layers; ConcurrentUse if longreach is attached.
    """
    name = str(getattr(getattr(model, "config", None), "model_type", ""))
    require(name.startswith(PREFIX), lambda: f"revert: expected a model with MKA's layers, got {describe(model)}")
    found = family(name.removeprefix(PREFIX))
    _check_free(model)
    converted = {n: m for n, m in attention_layers(model).items() if isinstance(m, MemoryAttention)}
    open_gates = [n for n, module in converted.items() if bool(module.mka.router.gate.bias.any())]
    require(
        not open_gates,
        lambda: (
            f"revert: the gates of layers {open_gates} are not 0, so the model without MKA's layers would be another "
            f"one; set them to 0 first (module.mka.router.gate.bias), or keep the model"
        ),
    )
    for module in converted.values():
        take_attention(module)
        del module.mka
        module.__class__ = type(module).own  # type: ignore[attr-defined]
    remove_hook(model.get_decoder())
    _become(model, found.base_model, found.base_config, None)
    return model


def _family_of(model: Any) -> Family:
    """The model's family, after a check that it can be converted."""
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        what = "torch.compile" if isinstance(model, torch._dynamo.OptimizedModule) else type(model).__name__
        if any(isinstance(m, PreTrainedModel) for m in model.modules()):
            raise Unsupported(
                f"convert: expected a transformers model, got one wrapped by {what}; convert the model before it is "
                f"compiled or wrapped"
            )
    ok = isinstance(model, PreTrainedModel)
    require(ok, lambda: f"convert: expected a transformers model, got {describe(model)}")
    name = str(model.config.model_type)
    if name.startswith(MLA_PREFIX):
        raise InvalidInput("convert: the model was converted to MLA already; load the original")
    if name.startswith(PREFIX):
        raise InvalidInput(
            f"convert: the model has MKA's layers already (variant {options_of(model.config).variant!r}); "
            f"revert it first (longreach.mka.revert), or load the original"
        )
    if name not in FAMILIES:
        raise UnknownName("family of models for MKA", name, FAMILIES)
    found = family(name)
    if type(model) is not found.base_model:
        raise Unsupported(f"convert: expected a {found.base_model.__name__}, got a {type(model).__name__}")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise Unsupported(f"convert: {type(model).__name__} is quantised; convert the original, then quantise")
    if any(isinstance(m, torch._dynamo.OptimizedModule) for m in model.modules()):
        raise Unsupported(f"convert: layers of {type(model).__name__} are compiled; convert it before torch.compile")
    if any(_compiled(m) for m in model.modules()):
        raise Unsupported(f"convert: {type(model).__name__} is compiled; convert it before torch.compile")
    _check_free(model)
    return found


def _compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, or its forward replaced by a compiled one."""
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_inline")


def _check_free(model: PreTrainedModel) -> None:
    if MARK in model.get_decoder().__dict__:
        raise ConcurrentUse(f"{type(model).__name__} has longreach attached; close the session first")


def _check_layers(model: PreTrainedModel, config: MKAConfig) -> None:
    """Raise Unsupported for attention modules that are not as the family makes them."""
    for layer, module in attention_layers(model).items():
        if not config.converts(layer):
            continue
        if "forward" in module.__dict__:
            raise Unsupported(
                f"convert: attention of layer {layer} has a forward of its own (accelerate's hooks of a device_map?); "
                f"convert the model first, save it, and load it with the device_map"
            )
        if weight_of(module).is_meta:
            raise Unsupported(f"convert: layer {layer} has its weights on the meta device; load them first")


def _ascending(layers: Any) -> tuple[int, ...]:
    """Layer numbers in order. What is none of them is left to MKAConfig's check."""
    try:
        return tuple(sorted(layers))
    except TypeError:
        return layers  # type: ignore[no-any-return]


def _become(model: PreTrainedModel, kind: type, config: type, options: MKAConfig | None) -> None:
    """Change the classes of a model and its config. Other models that share the config object keep it as it is."""
    old = model.config
    new = copy.copy(old)
    new.__dict__.pop("mka", None)
    new.__class__, model.__class__ = config, kind
    if new.architectures:
        new.architectures = [kind.__name__]
    if options is not None:
        new.mka = options.to_json()
    parts: list[Any] = list(model.modules())
    for module in parts:
        if module.__dict__.get("config") is old:
            module.config = new
