"""Observe Triton launches as they are made: compiled ones, and those that TRITON_INTERPRET=1 runs in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Observed(NamedTuple):
    """One launch. function: the kernel's Python function; constants: constexpr arguments as they were given.

    options: keywords that are no parameters (num_warps, launch_pdl). warps, stages: what the kernel was compiled with,
    defaults included; None under the interpreter unless given. captured: whether a CUDA graph was being captured.
    """

    function: Callable[..., Any]
    constants: dict[str, Any]
    options: dict[str, Any]
    warps: int | None
    stages: int | None
    grid: tuple[int, ...]
    captured: bool


@contextmanager
def observe_launches(note: Callable[[Observed], None]) -> Iterator[None]:
    """Within this block `note` is called after every launch, in all threads; not where a warm-up only compiles."""
    kinds = (JITFunction, InterpretedFunction)
    before = [kind.run for kind in kinds]
    for kind, run in zip(kinds, before, strict=True):
        kind.run = _observing(run, note)
    try:
        yield
    finally:
        for kind, run in zip(kinds, before, strict=True):
            kind.run = run


def _observing(run: Callable[..., Any], note: Callable[[Observed], None]) -> Callable[..., Any]:
    def observed(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        result = run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if not warmup:
            note(_observed(self.fn, args, grid, kwargs, getattr(result, "metadata", None)))
        return result

    return observed


def _observed(
    function: Callable[..., Any], args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any], compiled: Any
) -> Observed:
    signature = inspect.signature(function)
    options = {name: value for name, value in kwargs.items() if name not in signature.parameters}
    bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in options})
    bound.apply_defaults()
    constants = {
        name: bound.arguments[name]
        for name, parameter in signature.parameters.items()
        if "constexpr" in str(parameter.annotation)
    }
    grid = grid(dict(bound.arguments)) if callable(grid) else grid
    grid = (grid,) if isinstance(grid, int) else grid
    warps, stages = options.pop("num_warps", None), options.pop("num_stages", None)
    return Observed(
        function,
        constants,
        options,
        getattr(compiled, "num_warps", warps),
        getattr(compiled, "num_stages", stages),
        tuple(int(size) for size in grid),
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing(),
    )
