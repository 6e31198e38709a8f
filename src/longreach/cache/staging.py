"""Buffers through which a pass of many rows reads layers that lie in host memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

from longreach.cache.compact import Pair
from longreach.cache.tiers import STAGING

Filled = Iterable[tuple[int, int]]  # pages, and the slots of each that hold keys


class _Buffer:
    """Memory of one layer. name: of its contents, else None. ready: recorded once a copy on the side stream is done."""

    def __init__(self) -> None:
        self.memory: Pair | None = None
        self.name: Hashable | None = None
        self.ready: torch.cuda.Event | None = None


class Staging:
    """Copies of layers in device memory, of the same shape, so that they stand in the layers' place in a view.

    There are `STAGING` of them; a further layer replaces the one used least recently. On a GPU `prefetch` copies on a
    side stream while kernels launched before go on.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: list[_Buffer] = []  # the one used last is last
        self._side: torch.cuda.Stream | None = None

    def get(self, name: Hashable, source: Pair, filled: Filled) -> Pair:
        """The copy of a layer under this name, ready for kernels that are launched from now on; made if not there."""
        found = next((b for b in self._buffers if b.name == name), None)
        if found is None:
            found = self._oldest(source)
            _copy(source, found, filled)
            found.name = name
        self._wait(found)
        self._buffers.remove(found)
        self._buffers.append(found)
        assert found.memory is not None
        return found.memory

    def prefetch(self, name: Hashable, source: Pair, filled: Filled) -> None:
        """Begin to copy a layer that a later `get` of this name takes."""
        if any(b.name == name for b in self._buffers):
            return
        buffer = self._oldest(source)
        if self.device.type == "cuda":
            self._side = self._side or torch.cuda.Stream(self.device)
            self._side.wait_stream(torch.cuda.current_stream(self.device))  # kernels that read the buffer's last layer
            with torch.cuda.stream(self._side):
                _copy(source, buffer, filled)
                buffer.ready = self._side.record_event()
        else:
            _copy(source, buffer, filled)
        buffer.name = name

    def release(self) -> None:
        """Give the memory back, for kernels that are launched from now on."""
        for buffer in self._buffers:
            self._wait(buffer)
        self._buffers = []

    def _oldest(self, source: Pair) -> _Buffer:
        if len(self._buffers) < STAGING:
            self._buffers.append(_Buffer())
            buffer = self._buffers[-1]
        else:
            buffer = self._buffers[0]
        self._wait(buffer)
        buffer.name = None
        held = None if buffer.memory is None else buffer.memory[0]
        if held is None or held.shape != source[0].shape or held.dtype != source[0].dtype:
            buffer.memory = None  # its memory goes before more is taken
            buffer.memory = (source[0].new_empty(source[0].shape), source[1].new_empty(source[1].shape))
        return buffer

    def _wait(self, buffer: _Buffer) -> None:
        if buffer.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.ready)
            buffer.ready = None


def _copy(source: Pair, buffer: _Buffer, filled: Filled) -> None:
    assert buffer.memory is not None
    for page, slots in filled:
        for x, mine in zip(source, buffer.memory, strict=True):
            for head in range(x.shape[1] if slots else 0):  # contiguous pieces: the copy engine moves them, no kernel
                mine[page, head, :slots].copy_(x[page, head, :slots])
