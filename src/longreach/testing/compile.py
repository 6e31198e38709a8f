"""Compile Triton kernels for a GPU that is not there: what a launch would compile, down to machine code.

Only where the kernels are not interpreted, i.e. in a process started without TRITON_INTERPRET.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.bool: "*i1",
}


class Compiler:
    """Stands in the place of a kernel: a launch compiles for compute capability `arch` and keeps what came of it."""

    def __init__(self, kernel: Any, found: list[Any], arch: int):
        self.kernel, self.found, self.arch = kernel, found, arch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = self.kernel.arg_names
            given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
            options = {k: v for k, v in kwargs.items() if k not in names}
            signature: dict[str, Any] = {}
            constants: dict[tuple[int, ...], Any] = {}
            attributes: dict[tuple[int, ...], Any] = {}
            for place, name in enumerate(names):
                declared = self.kernel.params[place].is_constexpr
                signature[name] = _describe(given[name], (place,), declared, constants, attributes)
            source = ASTSource(self.kernel, signature, constants, attributes)
            self.found.append(triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options))

        return launch


def _describe(x: Any, path: tuple[int, ...], constant: bool, constants: dict, attributes: dict) -> Any:
    """The type of an argument as Triton would specialise it; fills what is constant and what is divisible by 16."""
    if constant or (type(x) is int and x == 1):
        constants[path] = x
        return "constexpr"
    if isinstance(x, tuple):
        return tuple(_describe(y, (*path, i), False, constants, attributes) for i, y in enumerate(x))
    if isinstance(x, Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[x.dtype]
    if isinstance(x, int):
        if x % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= x < 2**31 else "i64"
    return "fp32"


@contextmanager
def compiling(module: Any, *names: str, arch: int = 90) -> Iterator[list[Any]]:
    """Within this block, launches of module's kernels compile instead; yields the list of what was compiled."""
    found: list[Any] = []
    before = {name: getattr(module, name) for name in names}
    try:
        for name, kernel in before.items():
            setattr(module, name, Compiler(kernel, found, arch))
        yield found
    finally:
        for name, kernel in before.items():
            setattr(module, name, kernel)


def resident(compiled: Any, warps: int) -> int:
    """Programs of a kernel compiled for an H200 that one multiprocessor has registers and shared memory for.

    Registers are dealt by eight a thread out of 65,536; of 228 KB of shared memory each program takes 1 KB more than it
    asks for.
    """
    registers = _attribute(compiled, 0x2F)
    return int(min(65_536 // (-(-registers // 8) * 8 * 32 * warps), 228 * 1024 // (compiled.metadata.shared + 1024)))


def spilled(compiled: Any) -> int:
    """Bytes of each thread's stack, where registers that do not fit are kept."""
    return _attribute(compiled, 0x11)


def _attribute(compiled: Any, number: int) -> int:
    """A number of a kernel from its .nv.info, whose entries are 8 bytes: the kernel's symbol, the number."""
    cubin = compiled.asm["cubin"]
    at = cubin.index(bytes([0x04, number, 0x08, 0x00]))
    return int(struct.unpack_from("<I", cubin, at + 8)[0])
