"""Host memory that a GPU reads and writes in place, over the link: huge pages where the system has them, pinned.

Pinned memory has one address for the host and the GPU, so a tensor on the GPU can lie in it. Kernels and torch ops use
that tensor as any other; only its bandwidth is the link's.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longreach.errors import CapacityError, Unsupported

HUGE_PAGE = 1 << 21
REMEDY = (
    "Lower the batch, CacheConfig(capacity=...), the prompt or max_new_tokens, or keep more layers in GPU memory "
    "(raise CacheConfig(device_bytes=...), --device-memory)"
)


@dataclass(frozen=True)
class Purpose:
    """Why host memory is taken, and what to do if there is too little, for error messages."""

    name: str
    remedy: str


KEYS = Purpose("keys and values", REMEDY)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, purpose: Purpose = KEYS) -> Tensor:
    """Zeros [shape] on `device` that lie in host memory; on a CPU plain memory. Freed with the last tensor on it.

    Raises CapacityError if there is no such memory or it cannot be pinned, Unsupported if the device cannot read it in
    place. Nothing stays allocated then.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _touched(nbytes, purpose, forked=device.type != "cuda")
    if device.type == "cuda":
        memory = _on_device(memory, device, purpose)
    return memory.view(dtype).view(*shape)


def check_available(nbytes: int) -> None:
    """Raise CapacityError if the host has less than this memory free, before any of it is used."""
    free = available_bytes()
    if free is not None and free < nbytes:
        gc.collect()  # caches that nothing refers to may wait for it
        free = available_bytes()
    if free is not None and free < nbytes:
        raise CapacityError(
            f"keys and values need {gib(nbytes)} of host memory, and {gib(free)} are free; nothing was written. "
            f"{REMEDY}"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Host memory that this process can still take: the system's, within the limit of its control group.

    root: the root of the file system. None if the system does not report it.
    """
    found = []
    with contextlib.suppress(OSError):
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        if "MemAvailable" in fields:
            found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                found += _left_in_group(root / "sys/fs/cgroup" / controllers, path, unified=not controllers)
    return min(found, default=None)


def _left_in_group(mount: Path, path: str, *, unified: bool) -> list[int]:
    """Bytes that a control group and those around it leave; files in the page cache count as free."""
    names = ("memory.max", "memory.current", "inactive_file")
    limit, used, cached = (
        names if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    group, found = mount / path.strip("/"), []
    for at in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such file, or "max"
            stat = dict(line.split() for line in (at / "memory.stat").read_text().splitlines())
            taken = int((at / used).read_text()) - int(stat[cached])
            found.append(max(0, int((at / limit).read_text()) - taken))
        if at == mount:
            break
    return found


def gib(nbytes: int) -> str:
    """Bytes in words: "1.50 GiB", "12.00 MiB"."""
    unit, name = (1 << 30, "GiB") if nbytes >= 1 << 30 else (1 << 20, "MiB") if nbytes >= 1 << 20 else (1 << 10, "KiB")
    return f"{nbytes / unit:.2f} {name}"


def _touched(nbytes: int, purpose: Purpose = KEYS, *, forked: bool = False) -> Tensor:
    """uint8 [nbytes] of private anonymous memory, aligned to huge pages and backed by physical memory.

    forked: whether processes forked from this one have it too. They must not copy pages that are pinned.
    """
    try:  # private, as the system gives shared memory no huge pages
        block = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"the system gave no {gib(nbytes)} of host memory for {purpose.name} ({error}); {_free()}. {purpose.remedy}"
        ) from error
    for advice in ("MADV_HUGEPAGE", *(() if forked else ("MADV_DONTFORK",))):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel that lacks it refuses; the memory is as good without
                block.madvise(getattr(mmap, advice))
    whole = torch.frombuffer(block, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    memory = whole[start : start + nbytes]
    memory[:: mmap.PAGESIZE].zero_()  # by all of torch's threads: registering would touch the pages with one
    return memory


def _on_device(memory: Tensor, device: torch.device, purpose: Purpose) -> Tensor:
    """The same bytes as a tensor on a GPU, at the same address."""
    view = torch.as_tensor(Registered(memory, device, purpose), device=device)
    if view.data_ptr() != memory.data_ptr():
        raise Unsupported(
            f"{device} cannot read host memory in place: torch made a copy; keep keys and values in GPU memory "
            f"(CacheConfig(host=False))"
        )
    return view


class Registered:
    """Host memory registered with CUDA, for torch to make a tensor on. Unregistered when nothing refers to it.

    memory: uint8 [n] on the host, which this keeps alive. Raises CapacityError if CUDA cannot pin it.
    """

    def __init__(self, memory: Tensor, device: torch.device, purpose: Purpose = KEYS):
        _release_waiting()
        address, nbytes, cudart = memory.data_ptr(), memory.numel(), torch.cuda.cudart()
        with torch.cuda.device(device):
            code = cudart.cudaHostRegister(address, nbytes, 0)
        if int(code) != 0:
            _forget_error(device)
            raise CapacityError(
                f"{gib(nbytes)} of host memory for {purpose.name} could not be pinned (cudaHostRegister: "
                f"{cudart.cudaGetErrorString(code)}); {_free()}, but a container or the driver may limit pinned "
                f"memory. {purpose.remedy}, or keep keys and values in GPU memory (CacheConfig(host=False), no --host)"
            )
        # bytes, as the interface has no bfloat16
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip
        weakref.finalize(self, _release, memory, device).atexit = False  # the end of the process frees it


_waiting: list[tuple[Tensor, torch.device]] = []  # memory whose last tensor went during a capture


def _release(memory: Tensor, device: torch.device) -> None:
    if torch.cuda.is_current_stream_capturing():  # which waiting for the device would end with an error
        _waiting.append((memory, device))
        return
    torch.cuda.synchronize(device)  # kernels that were launched may still use it
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _release_waiting() -> None:
    while _waiting and not torch.cuda.is_current_stream_capturing():
        _release(*_waiting.pop())


def _forget_error(device: torch.device) -> None:
    """CUDA reports a failed call again at the next launch: take that report now."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _free() -> str:
    free = available_bytes()
    return "free host memory is unknown" if free is None else f"{gib(free)} are free"
