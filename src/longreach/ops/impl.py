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


@dataclass(frozen=True)
class Implementations:
    """The implementations of one op: name -> "module:function", imported on first use.

    numba_needs: an argument of this type is required by the Numba kernel, None for no such argument.
    compiled: "auto" on a CPU is Numba where that is installed, whatever the arguments.
    """

    op: str
    paths: dict[str, str]
    numba_needs: type | None = None
    compiled: bool = False

    def names(self) -> tuple[str, ...]:
        return tuple(self.paths)

    def resolve(self, impl: str, device: torch.device) -> str:
        """The name `impl` stands for on `device`: "auto" is Triton on a GPU if the op has kernels, else the reference.

        On a CPU it is Numba for ops that are `compiled`, where Numba is installed.
        The reference on a GPU is resolved with a warning.
        """
        kernels = "triton" if device.type == "cuda" and "triton" in self.paths else "reference"
        kernels = "numba" if self.compiled and compiles(device) else kernels
        name = kernels if impl == "auto" else impl
        if name not in self.paths:
            raise UnknownName(f"impl of {self.op}", impl, ("auto", *self.paths))
        if name == "reference" and device.type != "cpu":
            _warn_slow(self.op, device.type)
        if name == "numba" and not _installed("numba"):
            raise Unsupported(f"impl 'numba' of {self.op} needs Numba, which is not here: pip install 'longreach[cpu]'")
        return name

    def choose(self, impl: str, device: torch.device, *given: Any) -> str:
        """The same for an op of the arguments `given`: "auto" on a CPU is Numba where that is installed and suits them.

        given: all arguments that are tensors or hold some.
        """
        name = self.resolve(impl, device)
        if impl == "auto" and given and "numba" in self.paths and compiles(device):
            from longreach.ops.numba_inputs import suits

            complete = self.numba_needs is None or any(isinstance(x, self.numba_needs) for x in given)
            return "numba" if complete and suits(*given) else name
        return name

    def get(self, impl: str, device: torch.device, *given: Any) -> Callable[..., Any]:
        """The implementation that `choose` names."""
        return _load(self.paths[self.choose(impl, device, *given)])


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
