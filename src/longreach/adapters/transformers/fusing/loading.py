"""Keys and values of a prompt's chunks on their way to the device: some layers at a time, while earlier layers run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.store import Chunk

GROUP_BYTES = 1 << 28  # copied at a time: few copies, and little that the first layer waits for
BUFFERS = 2  # of so many bytes: one is read while the other is filled


class Loading:
    """Keys before rotation and values of all chunks, layer by layer in ascending order from layer `first` to `stop`.

    On a CUDA device, chunks in page-locked memory (`ChunkPool`) are copied on a stream of their own, groups of layers
    of about GROUP_BYTES ahead of the layers that need them, into two buffers in turn; others are copied when a layer
    asks. bytes: copied to the device so far.
    """

    def __init__(self, chunks: Sequence[Chunk], device: torch.device, first: int = 0, stop: int = 0):
        self.chunks, self.device, self.first = list(chunks), device, first
        self.bytes = 0
        self._ahead: _Ahead | None = None
        if device.type == "cuda" and first < stop and chunks and all(_pinned(chunk) for chunk in chunks):
            self._ahead = _Ahead(self.chunks, device, first, stop)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, G, D] of a layer, S the chunks' tokens; valid until the layer after next is asked for."""
        if self._ahead is not None:
            pairs = self._ahead.layer(layer)
            self.bytes = self._ahead.bytes
        else:
            pairs = [(chunk.keys[layer].to(self.device), chunk.values[layer].to(self.device)) for chunk in self.chunks]
            if self.device.type != "cpu":
                self.bytes += sum(k.nbytes + v.nbytes for k, v in pairs)
        k, v = (torch.cat(x, 1).transpose(0, 1) for x in zip(*pairs, strict=True))
        return k, v

    def values(self, layer: int) -> Tensor:
        """Values [S, G, D] of one layer alone, out of turn."""
        some = [chunk.values[layer].to(self.device, non_blocking=True) for chunk in self.chunks]
        if self.device.type != "cpu":
            self.bytes += sum(v.nbytes for v in some)
        return torch.cat(some, 1).transpose(0, 1)

    @property
    def waits(self) -> list[Wait]:
        """The times at which the device's stream waited for copies that ran ahead."""
        return [] if self._ahead is None else self._ahead.waits


class Wait(NamedTuple):
    """Of a stream for a copy: the events before and after."""

    before: torch.cuda.Event
    after: torch.cuda.Event

    def seconds(self) -> float:
        """How long it took; waits until it is over."""
        self.after.synchronize()
        return float(self.before.elapsed_time(self.after)) * 1e-3


@dataclass
class _Group:
    """Layers [first, stop) of all chunks in a buffer. copied: when they are there."""

    first: int
    stop: int
    parts: list[Tensor]
    copied: torch.cuda.Event


class _Ahead:
    def __init__(self, chunks: list[Chunk], device: torch.device, first: int, stop: int):
        self.chunks, self.device, self.bytes = chunks, device, 0
        self.stream = torch.cuda.Stream(device)
        each = sum(chunk.bytes for chunk in chunks) / len(chunks[0].keys)
        step = max(1, int(GROUP_BYTES / each))
        self.bounds = [(n, min(n + step, stop)) for n in range(first, stop, step)]
        most = max((sum(_elements(c, a, b) for c in chunks) for a, b in self.bounds), default=0)
        count = min(BUFFERS, len(self.bounds))
        self.buffers = [torch.empty(most, dtype=chunks[0].keys[0].dtype, device=device) for _ in range(count)]
        self.stream.wait_stream(torch.cuda.current_stream(device))  # buffers may be memory that is still in use
        for buffer in self.buffers:
            buffer.record_stream(self.stream)  # a pass may fail while copies are under way
        self.begun = 0
        self.under_way: list[_Group] = []
        self.waits: list[Wait] = []
        for _ in range(count):
            self._begin()

    def layer(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        while self.under_way[0].stop <= layer:
            self.under_way.pop(0)
            # all that reads the group has been launched: the buffer may be filled again behind it
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self._begin()
        group = self.under_way[0]
        if layer == group.first:
            main = torch.cuda.current_stream(self.device)
            wait = Wait(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
            wait.before.record(main)
            main.wait_event(group.copied)
            wait.after.record(main)
            self.waits.append(wait)
        pairs = zip(self.chunks, group.parts, strict=True)
        return [self._pair(chunk, part, group.first, layer) for chunk, part in pairs]

    def _begin(self) -> None:
        """Copy the next group, if there is one."""
        if self.begun == len(self.bounds):
            return
        (first, stop), buffer, start = self.bounds[self.begun], self.buffers[self.begun % len(self.buffers)], 0
        parts, copied = list[Tensor](), torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            for chunk in self.chunks:
                whole = flat(chunk, first, stop)
                parts.append(buffer[start : start + whole.numel()])
                parts[-1].copy_(whole, non_blocking=True)
                start += whole.numel()
                self.bytes += whole.nbytes
            copied.record(self.stream)
        self.begun += 1
        self.under_way.append(_Group(first, stop, parts, copied))

    def _pair(self, chunk: Chunk, part: Tensor, first: int, layer: int) -> tuple[Tensor, Tensor]:
        start = _elements(chunk, first, layer)
        k, v = chunk.keys[layer], chunk.values[layer]
        middle = start + k.numel()
        return part[start:middle].view(k.shape), part[middle : middle + v.numel()].view(v.shape)


def _elements(chunk: Chunk, first: int, stop: int) -> int:
    return sum(x.numel() for n in range(first, stop) for x in (chunk.keys[n], chunk.values[n]))


def _pinned(chunk: Chunk) -> bool:
    return flat_layers(chunk) and chunk.keys[0].is_pinned()


def flat_layers(chunk: Chunk) -> bool:
    """Whether keys and values lie layer by layer in one piece of memory, as a pool keeps them."""
    end = chunk.keys[0].storage_offset()
    storage = chunk.keys[0].untyped_storage().data_ptr()
    for pair in zip(chunk.keys, chunk.values, strict=True):
        for x in pair:
            if x.storage_offset() != end or not x.is_contiguous() or x.untyped_storage().data_ptr() != storage:
                return False
            end += x.numel()
    return True


def flat(chunk: Chunk, first: int, stop: int) -> Tensor:
    """Keys and values of layers [first, stop) as one row of memory; see `flat_layers`."""
    return chunk.keys[first].as_strided((_elements(chunk, first, stop),), (1,))
