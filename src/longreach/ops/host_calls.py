"""Work of the CPU in the order of a stream's work: compiled functions, and memory that they share with the GPU.

A CUDA graph that is being captured gets a host node for each call. Outside of a capture the call waits for the stream
and runs the function. Either way no interpreter runs and no CUDA function is called while it works.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from longreach.errors import HostCallFailed

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
MESSAGES = {
    1: "a list of keys names slots that are not in use",
    2: "a compiled kernel failed, probably for want of memory",
}


class HostCalls:
    """The calls by which the CPU computes attention to a cache's layers, with the memory that they use.

    Buffers and jobs live as long as this object, which must live as long as a graph with its calls. All layers share
    buffers, as a stream runs one call at a time. Jobs with equal fields are the same job.
    """

    def __init__(self, device: torch.device, allocate: Allocate):
        """allocate: returns a tensor on the device that lies in host memory."""
        self.device, self._allocate = device, allocate
        self._buffers: dict[Hashable, Tensor] = {}
        self._jobs: dict[bytes, np.ndarray] = {}
        self._scratch: dict[tuple[str, int], np.ndarray] = {}
        self._status = np.zeros(1, np.int64)

    @property
    def status(self) -> int:
        """The address of the word that programs write errors to."""
        return int(self._status.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory of all buffers, pinned if the device is a GPU."""
        return sum(x.numel() * x.element_size() for x in self._buffers.values())

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host [shape] that the GPU writes and reads: the same one for the same arguments."""
        key = (name, *shape, dtype)
        if key not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[key] = self._allocate(tuple(max(1, n) for n in shape), dtype, self.device)
        found = self._buffers[key]
        return found[tuple(slice(n) for n in shape)]

    def scratch(self, name: str, nbytes: int) -> int:
        """The address of memory that only the CPU uses."""
        key = (name, nbytes)
        if key not in self._scratch:
            self._scratch[key] = np.zeros(nbytes // 8 + 1, np.int64)
        return int(self._scratch[key].ctypes.data)

    def send(self, *named: tuple[str, Tensor]) -> list[int]:
        """Copy tensors to buffers of their names, in the stream's order; the buffers' addresses."""
        pairs = [(x.contiguous(), self.buffer(name, x.shape, x.dtype)) for name, x in named]
        self.copy(pairs)
        return [to.data_ptr() for _, to in pairs]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy contiguous tensors to others of their shape and dtype by one kernel, which may reach host memory."""
        if self.device.type == "cuda":
            import_module("longreach.ops.triton_copies").copy(pairs)
        else:
            for source, to in pairs:
                to.copy_(source)

    def call(self, function: int, job: np.ndarray) -> None:
        """Run the function at an address with the address of this job: now, or whenever the captured graph runs.

        Raises HostCallFailed for errors of this call, or of earlier ones.
        """
        kept = self._jobs.setdefault(job.tobytes(), job)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _launch(torch.cuda.current_stream(self.device).cuda_stream, function, int(kept.ctypes.data))
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(int(kept.ctypes.data))
        self.check()

    def clear(self) -> None:
        """Forget errors of calls so far."""
        self._status[0] = 0

    def check(self) -> None:
        """Raise HostCallFailed if a call has failed since the last check. Waits for calls under way if one has."""
        code = int(self._status[0])
        if code:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # or calls under way would fail what comes next
            self._status[0] = 0
            raise HostCallFailed(
                f"attention on the CPU failed: {MESSAGES.get(code, f'error {code}')}; the tokens of this answer are "
                f"wrong; use CacheConfig(host_attend='link') if it happens again"
            )


def _launch(stream: int, function: int, argument: int) -> None:
    """A host node in the graph that a stream captures. Raises RuntimeError."""
    code = _driver().cuLaunchHostFunc(ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(argument))
    if code:
        raise RuntimeError(f"cuLaunchHostFunc: CUDA error {code}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
