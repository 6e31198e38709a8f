"""A model's attention layers: which can be converted, and the parameters that MKA adds to each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach.adapters.transformers.checks import cache_windows, shape_of, text_config
from longreach.adapters.transformers.frequencies import check_frequencies
from longreach.adapters.transformers.rotary import attention_modules
from longreach.errors import Unsupported
from longreach.mka.config import MKAConfig
from longreach.mka.levels import Levels


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """layer -> its attention module."""
    return {int(module.layer_idx): module for module in attention_modules(model.get_decoder())}  # type: ignore[arg-type]


def check_options(model: PreTrainedModel, options: MKAConfig) -> None:
    """Raise InvalidInput for layers that do not exist, Unsupported for layers that MKA does not implement."""
    shape = shape_of(model)
    options.check_model(shape.layers, shape.head_dim)
    windows = [layer for layer in sorted(cache_windows(model)) if options.converts(layer)]
    if windows:
        raise Unsupported(
            f"layers {windows} of {type(model).__name__} have a sliding window, which MKA does not implement; name the "
            f"other layers in layers=(...), or remove the window from the config (sliding_window=None)"
        )
    if options.turns_blocks:
        check_frequencies(type(model).__name__, model.get_decoder(), text_config(model))


def levels_for(model: PreTrainedModel, options: MKAConfig, gate: float) -> dict[int, Levels]:
    """layer -> what MKA adds to it, with the dtype and on the device of the layer's projections."""
    shape = shape_of(model)
    sizes = shape.query_heads, shape.kv_heads, shape.head_dim
    return {
        layer: _placed(Levels(options, layer, *sizes, gate), weight_of(module)).train(model.training)
        for layer, module in attention_layers(model).items()
        if options.converts(layer)
    }


def weight_of(attention: nn.Module) -> Tensor:
    """The first weight of a layer's projections, also of ones that an adapter has wrapped.

    Raises Unsupported for projections without floating-point weights.
    """
    projection: Any = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj
    weight: Tensor | None = next(projection.parameters(), None)
    if weight is None or not weight.dtype.is_floating_point or weight.element_size() < 2:
        found = f"no weights, but {type(projection).__module__}" if weight is None else f"weights of {weight.dtype}"
        raise Unsupported(f"convert: layer {attention.layer_idx} has {found} (quantised?); convert the original")
    return weight


def _placed(levels: Levels, like: Tensor) -> Levels:
    levels.to(like.device)
    for parameter in levels.parameters():
        parameter.data = parameter.data.to(like.dtype)  # planes keep their dtype
    return levels
