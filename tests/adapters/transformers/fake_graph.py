"""A CUDA graph's behaviour on the CPU, so that steps captured in pieces are tested without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGraph:
    """Ops between `begin` and `end` take effect at `replay` alone: writes are undone, new floats hold NaN until then.

    What it cannot show: a read on the host, which a GPU refuses while it records.
    """

    def __init__(self) -> None:
        self.recorder = _Recorder()
        self.replays = 0
        self.state = "new"

    def begin(self) -> None:
        self.state = "recording"
        self.recorder.__enter__()

    def end(self) -> None:
        assert self.state == "recording", self.state
        self.state = "recorded"
        self.recorder.__exit__(None, None, None)
        for written, before in reversed(self.recorder.overwritten):
            written.copy_(before)
        for out in self.recorder.made:
            if out.is_floating_point():
                out.fill_(torch.nan)

    def replay(self) -> None:
        assert self.state == "recorded", self.state
        self.replays += 1
        for func, args, kwargs, outs in self.recorder.ops:
            again = func(*args, **kwargs)
            for old, new in zip(_new(func, outs), _new(func, again), strict=True):
                old.copy_(new)

    def reset(self) -> None:
        self.state = "reset"


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                self.overwritten += [(x, x.clone()) for x in tree_leaves(given) if isinstance(x, Tensor)]
        outs = func(*args, **kwargs)
        self.ops.append((func, args, kwargs, outs))
        self.made += _new(func, outs)
        return outs


def _new(func: Any, outs: Any) -> list[Tensor]:
    """The results of an op that have memory of their own."""
    several = outs if isinstance(outs, (tuple, list)) and len(func._schema.returns) > 1 else (outs,)
    owned = [x for x, how in zip(several, func._schema.returns, strict=True) if how.alias_info is None]
    return [x for x in tree_leaves(owned) if isinstance(x, Tensor)]
