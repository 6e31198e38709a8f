"""What a captured step has taken from the model for good: another value of it makes the step unusable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

PLAIN = (int, float, bool, str, bytes, type(None))
# attributes of modules that change no pass of a decoder in eval mode
OF_NO_MATTER = frozenset({"name_or_path", "gradient_checkpointing", "_is_hf_initialized"})
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


def model_state(model: nn.Module) -> int:
    """A hash that changes with what the host decides in a pass, and with where weights lie; their values may change.

    In it: modules, where their parameters and buffers lie, their hooks, a `forward` of their own, and numbers and words
    that they keep, in lists and dicts too (adapters in use and their scaling, a norm's epsilon, scaling of rotary
    embeddings). Not in it: anything else that Python code may look at.
    """
    return hash(tuple(part for module in model.modules() for part in _of(module)))


def _of(module: nn.Module) -> Iterator[Any]:
    yield id(module)
    yield type(module)
    for tensors in (module._parameters, module._buffers):
        yield from ((name, None if x is None else x.data_ptr()) for name, x in tensors.items())
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        yield from ((number, id(hook)) for number, hook in hooks.items())
    for name, value in vars(module).items():
        if name == "forward":
            yield name, id(value)
        elif name not in OF_NO_MATTER | OF_TORCH:
            yield name, _plain(value)


def _plain(value: Any) -> Any:
    """Numbers and words, in containers too; the type of what is neither."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_plain, value))
    if isinstance(value, dict):
        return tuple((_plain(name), _plain(item)) for name, item in value.items())
    return type(value)
