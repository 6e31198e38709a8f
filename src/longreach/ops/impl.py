"""Who computes an op. `impl=` is explicit; "auto" is resolved by one rule and never falls back silently."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from longreach.errors import UnknownName, Unsupported
from longreach.ops.numba_fit import called_by_cpu, few, unfit


@dataclass(frozen=True)
class Implementations:
    """The implementations of one op: name -> "module:function", imported on first use.

    "auto" is Triton on a GPU, if the op has such kernels. On a CPU it is Numba, if the op has such a kernel, Numba is
    installed, and the kernel can compute the arguments and is the faster implementation. Else it is the reference.
    few_rows: for more than `numba_fit.ROWS` rows of a sequence the reference's matrix products are faster than Numba.
    needs: an argument of this type is required by the Numba kernel, None for no such argument.
    fp64: whether the Numba kernel computes in fp64, else it takes no such inputs.
    cpu: the implementation "cpu", "module:function": rows on a GPU, keys and values in host memory, computed by the
    CPU. "auto" is this one for few rows of a view with `calls`.
    """

    op: str
    paths: dict[str, str]
    few_rows: bool = False
    fp64: bool = False
    needs: type | None = None
    cpu: str | None = None

    def names(self) -> tuple[str, ...]:
        return tuple(self.paths)

    def choose(self, impl: str, device: torch.device, *given: Any) -> str:
        """The implementation that `impl` stands for on `device`.

        given: the op's arguments that are tensors or hold some. The choice of Numba depends on them.
        Raises UnknownName, and Unsupported for "numba" where it is not installed. The reference is chosen with a
        warning on a GPU, and (once) on a CPU for want of Numba.
        """
        if impl in ("auto", "cpu") and self.cpu is not None and called_by_cpu(*given):
            return "cpu"
        if impl == "auto":
            name = "triton" if device.type == "cuda" and "triton" in self.paths else "reference"
            if device.type == "cpu" and self._suits_numba(given):
                if _installed("numba"):
                    return "numba"
                _warn_uncompiled()
        else:
            name = impl
        if name not in self.paths:
            raise UnknownName(f"impl of {self.op}", impl, ("auto", *self.paths))
        if name == "reference" and device.type != "cpu":
            _warn_slow(self.op, device.type)
        if name == "numba" and not _installed("numba"):
            raise Unsupported(f"impl 'numba' of {self.op} needs Numba, which is not here: pip install 'longreach[cpu]'")
        return name

    def get(self, impl: str, device: torch.device, *given: Any) -> Callable[..., Any]:
        """The implementation that `choose` names."""
        name = self.choose(impl, device, *given)
        return _load(self.cpu if name == "cpu" and self.cpu is not None else self.paths[name])

    def check(self, impl: str, device: torch.device) -> None:
        """Raise what `choose` raises, whatever the arguments."""
        if impl != "auto":
            self.choose(impl, device)

    def _suits_numba(self, given: tuple[Any, ...]) -> bool:
        if "numba" not in self.paths:
            return False
        complete = self.needs is None or any(isinstance(x, self.needs) for x in given)
        return complete and (few(*given) or not self.few_rows) and unfit(*given, fp64=self.fp64) is None


def has_numba() -> bool:
    """Whether Numba is installed."""
    return _installed("numba")


def compiles(device: torch.device) -> bool:
    """Whether kernels compiled by Numba run there: on a CPU, where Numba is installed."""
    return device.type == "cpu" and _installed("numba")


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)


@cache
def _warn_slow(op: str, device: str) -> None:
    warnings.warn(f"{op} runs its reference implementation on {device}: exact, but slow", stacklevel=4)


@cache
def _warn_uncompiled() -> None:
    warnings.warn(
        "decoding runs PyTorch's reference implementations on this CPU: exact, but slow; pip install 'longreach[cpu]' "
        "to have Numba compile it",
        stacklevel=5,
    )
