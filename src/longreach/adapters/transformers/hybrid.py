"""Hybrid models: which of their layers attend, and which keep a recurrent state (linear attention, Mamba, convolution).

longreach counts the layers that attend: its layer n is the model's n-th layer with attention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longreach.adapters.transformers.rotary import attention_modules
from longreach.adapters.transformers.step import ModelFacts
from longreach.errors import Unsupported
from longreach.methods.call import ModelShape
from longreach.methods.model_config import BOTH, STATE, attention_layers, is_hybrid, is_latent, layer_types
from longreach.runtime import Report

METHODS = ("update_conv_state", "update_recurrent_state")  # by which a layer keeps its state in transformers' cache


def facts_of(config: Any, decoder: PreTrainedModel, shape: ModelShape, windows: dict[int, int]) -> ModelFacts:
    """What a session knows of its model. config: of its language model. shape, windows: of the layers that attend, by
    longreach's numbers."""
    kinds, layers = getattr(config, "layer_types", None), attention_layers(config)
    return ModelFacts(
        shape,
        windows,
        decoder=decoder,
        layer_types=None if kinds is None else tuple(kinds[layer] for layer in layers),
        numbers={layer: n for n, layer in enumerate(layers)} if is_hybrid(config) else None,
        latent=is_latent(config),
    )


def numbered(report: Report, layers: tuple[int, ...]) -> Report:
    """The report with the model's numbers of layers. layers: those that attend."""
    if layers == tuple(range(len(layers))):
        return report
    memory = report.memory
    if memory is not None:
        some = memory.host_layers, memory.device_layers, memory.cpu_layers
        host, device, cpu = (tuple(layers[n] for n in each) for each in some)
        memory = replace(memory, host_layers=host, device_layers=device, cpu_layers=cpu)
    rows = tuple(replace(row, layer=layers[row.layer]) for row in report.layers)
    return replace(report, layers=rows, memory=memory)


def recurrent_layers(config: Any) -> tuple[int, ...]:
    """Numbers of the model's layers that keep a recurrent state, ascending."""
    return tuple(n for n, kind in enumerate(layer_types(config)) if kind in (*STATE, *BOTH))


def attends_by_interface(decoder: nn.Module) -> bool:
    """Whether all attention modules of a decoder take their attention from transformers' interface."""
    modules = attention_modules(decoder)
    return bool(modules) and all(
        hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS") for module in modules
    )


def rotates(decoder: nn.Module) -> bool:
    """Whether a decoder has a rotary module: the config of a hybrid model has parameters of one it may not have."""
    return any("Rotary" in type(module).__name__ for module in decoder.modules())


def check_hybrid(name: str, decoder: nn.Module, config: Any) -> None:
    """Raise Unsupported for a hybrid model whose state longreach's cache cannot hold, or whose layers do not attend."""
    attending = attention_layers(config)
    if not attending:
        raise Unsupported(f"{name} has no layers with attention, so there is nothing for longreach to attach to")
    if _numbers(m for m in decoder.modules() if keeps_state(type(m))) != list(recurrent_layers(config)):
        raise Unsupported(
            f"{name} has recurrent layers that keep their state outside transformers' cache layers, so longreach's "
            f"cache does not hold it"
        )
    found = _numbers(attention_modules(decoder))
    if found != list(attending):
        raise Unsupported(
            f"{name} has attention modules of their own in layers {found}, and layers {list(attending)} attend "
            f"(shared between layers?); longreach needs one in each"
        )


def _numbers(modules: Iterable[nn.Module]) -> list[int]:
    numbers = [getattr(module, "layer_idx", None) for module in modules]
    return sorted(n for n in numbers if isinstance(n, int))


def keeps_state(kind: type[nn.Module]) -> bool:
    """Whether a module's own code calls one of METHODS."""
    functions = (inspect.unwrap(f) for f in vars(kind).values() if callable(f))
    names = {name for f in functions if hasattr(f, "__code__") for name in f.__code__.co_names}
    return not names.isdisjoint(METHODS)
