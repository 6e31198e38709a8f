"""A model made ready for capture: fewer kernels, and none that wait for the host."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longreach.errors import UnknownName

MODES = ("none", "compile")
AUTO = "compile"
HOST_EXPERTS = ("eager", "grouped_mm")
ROTARY = "apply_rotary_pos_emb"  # name of the function that rotates queries and keys in transformers' models


def resolve(how: str, *, captured: bool) -> str:
    """The mode that `how` stands for: "auto" is the fastest for a captured step. Raises UnknownName."""
    if how == "auto":
        return AUTO if captured else "none"
    if how not in MODES:
        raise UnknownName("fusion", how, ("auto", *MODES))
    return how


@contextmanager
def compiled_parts(model: nn.Module, how: str) -> Iterator[None]:
    """Within this block the model's parts are compiled according to `how`; afterwards they are as before.

    "compile": norms, feed-forward blocks and the rotation of queries and keys are compiled. Modules of one class share
    what is compiled. A part that has hooks, or a forward of its own, is left as it is.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        if how == "compile":
            for module in model.modules():
                if _is_part(module):
                    changed.append((module.__dict__, "forward", None))
                    module.__dict__["forward"] = functools.partial(_compiled(type(module).forward), module)
            for space in {id(s): s for s in _namespaces(model)}.values():
                changed.append((space, ROTARY, space[ROTARY]))
                space[ROTARY] = _compiled(space[ROTARY])
        yield
    finally:
        for space, name, before in reversed(changed):
            if before is None:
                del space[name]
            else:
                space[name] = before


@contextmanager
def experts_on_device(model: PreTrainedModel) -> Iterator[None]:
    """Within this block mixtures of experts run as transformers' generate runs them in decoding: as batched products.

    Their other forms ask the host which experts are hit, or may, which no capture allows.
    """
    before: dict[str, str | None] = model.get_experts_implementation()  # type: ignore[operator]
    batched = {name: "batched_mm" if how in HOST_EXPERTS else how for name, how in before.items()}
    if batched != before:
        model.set_experts_implementation(batched)
    try:
        yield
    finally:
        if batched != before:
            model.set_experts_implementation(before)


def _is_part(module: nn.Module) -> bool:
    plain = not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
    return plain and type(module).__name__.endswith(("Norm", "MLP")) and _compilable(module)


def _compilable(module: nn.Module) -> bool:
    """Quantised layers bring kernels of their own."""
    return all(type(m) is nn.Linear for m in module.modules() if hasattr(m, "in_features"))


def _namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Of the files that the model's attention is written in, where they rotate by a function of the usual name."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            for kind in type(module).__mro__:  # a family's class may be the parent of one with MKA
                space = vars(sys.modules[kind.__module__])
                if callable(space.get(ROTARY)):
                    yield space


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
