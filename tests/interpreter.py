"""Triton's interpreter without work that it repeats: kernels run some two times as fast, and compute the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def make_faster() -> None:
    """Patch triton.runtime.interpreter of this process. Where Triton no longer has these functions, nothing is done.

    _patch_lang replaces the language's functions by interpreted ones, at a launch and again whenever one function of a
    kernel calls another: the second time changes nothing. _get_np_dtype makes its table of dtypes at each call.
    """
    try:
        from triton import language
        from triton.runtime import interpreter

        patch, dtype = interpreter._patch_lang, interpreter._get_np_dtype
    except (ImportError, AttributeError):
        return
    patched: set[int] = set()  # languages whose functions are interpreted ones now

    @functools.cache
    def languages(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)

    def patch_once(function: Callable[..., Any]) -> Any:
        new = languages(function) - patched
        if not new:
            return _Patched(None, patched, new)
        patched.update(new)
        return _Patched(patch(function), patched, new)

    numpys: dict[str, Any] = {}

    def dtype_once(of: Any) -> Any:
        name = of.scalar.name  # that of a block is its elements'
        if name not in numpys:
            numpys[name] = dtype(of)
        return numpys[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once


class _Patched:
    """What a launch undoes when it is done."""

    def __init__(self, scope: Any, patched: set[int], new: frozenset[int]):
        self.scope, self.patched, self.new = scope, patched, new

    def restore(self) -> None:
        if self.scope is not None:
            self.scope.restore()
            self.patched -= self.new
