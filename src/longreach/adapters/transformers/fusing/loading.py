"""Keys and values of a prompt's chunks on their way to the device: some layers at a time, while earlier layers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.ops import HeadShard
from longreach.store import Chunk
from longreach.store.pool import PooledChunk

GROUP_BYTES = 1 << 28  # copied at a time: few copies, and little that the first layer waits for
BUFFERS = 2  # double buffering: layers read one while the next group fills the other


class Loading:
    """Keys before rotation and values of all chunks, layer by layer in ascending order from layer `first` to `stop`.

    On a CUDA device, chunks in page-locked memory (`ChunkPool`) are copied on a stream of their own, groups of layers
    of about GROUP_BYTES ahead of the layers that need them, into two buffers in turn. If any chunk is elsewhere, all
    are copied when a layer is requested.

    shards: for a tensor-parallel rank, by layer the KV heads that it holds: chunks hold all, and these alone are
    copied. An entry must be there when its layer is asked for; copies run ahead if all are there from the beginning.
    values: a layer before `first` whose values alone are asked for; where copies run ahead they are the first.
    """

    def __init__(
        self, chunks: Sequence[Chunk], device: torch.device, first: int = 0, stop: int = 0,
        shards: Mapping[int, HeadShard] | None = None, values: int | None = None,
    ):  # fmt: skip
        self.chunks, self.device, self.shards = list(chunks), device, shards
        self._asked = 0  # bytes copied when a layer asked, or as `values`
        self._early: tuple[int, list[Tensor], torch.cuda.Event] | None = None
        held = [chunk for chunk in chunks if isinstance(chunk, PooledChunk) and chunk.memory.is_pinned()]
        ahead = device.type == "cuda" and first < stop and bool(chunks) and len(held) == len(self.chunks)
        if shards is not None:
            needed = range(first if values is None else values, stop)
            ahead = ahead and all(layer in shards for layer in needed)
        stream = torch.cuda.Stream(device) if ahead else None
        if stream is not None and values is not None:
            copied = torch.cuda.Event()
            with torch.cuda.stream(stream):
                some = self._values(values)
                copied.record(stream)
            self._early = values, some, copied
        self._ahead = None if stream is None else _Ahead(held, device, stream, first, stop, shards)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, G, D] of a layer, S the chunks' tokens, G the KV heads of this rank."""
        if self._ahead is not None:
            return self._ahead.layer(layer)
        pairs = [
            tuple(_own(x[layer], layer, self.shards).to(self.device) for x in (chunk.keys, chunk.values))
            for chunk in self.chunks
        ]
        if self.device.type != "cpu":
            self._asked += sum(k.nbytes + v.nbytes for k, v in pairs)
        k, v = (torch.cat(x, 1).transpose(0, 1) for x in zip(*pairs, strict=True))
        return k, v

    def values(self, layer: int) -> Tensor:
        """Values [S, G, D] of one layer alone, out of turn."""
        if self._early is None or self._early[0] != layer:
            some = self._values(layer)
        else:
            _, some, copied = self._early
            main = torch.cuda.current_stream(self.device)
            main.wait_event(copied)
            for value in some:
                value.record_stream(main)
        return torch.cat(some, 1).transpose(0, 1)

    def _values(self, layer: int) -> list[Tensor]:
        """A layer's values of each chunk, copied to the device on the current stream."""
        some = [
            _own(chunk.values[layer], layer, self.shards).to(self.device, non_blocking=True) for chunk in self.chunks
        ]
        if self.device.type != "cpu":
            self._asked += sum(v.nbytes for v in some)
        return some

    @property
    def bytes(self) -> int:
        """Copied to the device so far."""
        return self._asked + (0 if self._ahead is None else self._ahead.bytes)

    @property
    def runs_ahead(self) -> bool:
        """Whether copies run ahead of the layers, so that waits for them are measured."""
        return self._ahead is not None

    @property
    def waits(self) -> list[Wait]:
        """The times at which the device's stream waited for copies that ran ahead."""
        return [] if self._ahead is None else self._ahead.waits


def _own(x: Tensor, layer: int, shards: Mapping[int, HeadShard] | None) -> Tensor:
    """This rank's KV heads of a layer's keys or values [G, N, D]; a view."""
    return x if shards is None else shards[layer].slice(x)


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
    """Layers [first, stop) of all chunks, one chunk behind the other. copied: when they are there."""

    first: int
    stop: int
    memory: Tensor
    copied: torch.cuda.Event


class _Ahead:
    def __init__(
        self, chunks: list[PooledChunk], device: torch.device, stream: torch.cuda.Stream, first: int, stop: int,
        shards: Mapping[int, HeadShard] | None = None,
    ):  # fmt: skip
        self.chunks, self.device, self.shards, self.bytes = chunks, device, shards, 0
        by_length = {} if shards is None else {len(chunk.tokens): chunk for chunk in chunks}
        self.starts = {length: self._own_starts(chunk, stop) for length, chunk in by_length.items()}
        self.stream = stream
        self.equal_lengths = [list(some) for _, some in groupby(chunks, key=lambda chunk: len(chunk.tokens))]
        each = sum(self._starts(chunk)[stop] for chunk in chunks) * chunks[0].memory.element_size() / stop
        step = max(1, int(GROUP_BYTES / each))
        self.bounds = [(n, min(n + step, stop)) for n in range(first, stop, step)]
        most = max(sum(self._starts(c)[b] - self._starts(c)[a] for c in chunks) for a, b in self.bounds)
        count = min(BUFFERS, len(self.bounds))
        self.buffers = [torch.empty(most, dtype=chunks[0].memory.dtype, device=device) for _ in range(count)]
        self.stream.wait_stream(torch.cuda.current_stream(device))  # buffers may be memory that is still in use
        for buffer in self.buffers:
            buffer.record_stream(self.stream)  # a pass may fail while copies are under way
        self.started = 0
        self.in_flight: list[_Group] = []
        self.waits: list[Wait] = []
        for _ in range(count):
            self._start_next()

    def _own_starts(self, chunk: PooledChunk, stop: int) -> tuple[int, ...]:
        """As PooledChunk.starts, of this rank's KV heads alone."""
        pairs = zip(chunk.keys[:stop], chunk.values[:stop], strict=True)
        sizes = (sum(_own(x, n, self.shards).numel() for x in pair) for n, pair in enumerate(pairs))
        return (0, *accumulate(sizes))

    def _starts(self, chunk: PooledChunk) -> tuple[int, ...]:
        return chunk.starts if self.shards is None else self.starts[len(chunk.tokens)]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        while self.in_flight[0].stop <= layer:
            self.in_flight.pop(0)
            # all that reads the group has been launched: the buffer may be filled again behind it
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self._start_next()
        group = self.in_flight[0]
        if layer == group.first:
            main = torch.cuda.current_stream(self.device)
            wait = Wait(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
            wait.before.record(main)
            main.wait_event(group.copied)
            wait.after.record(main)
            self.waits.append(wait)
        return self._gathered(group, layer)

    def _start_next(self) -> None:
        """Copy the next group, if there is one."""
        if self.started == len(self.bounds):
            return
        (first, stop), buffer, start = self.bounds[self.started], self.buffers[self.started % len(self.buffers)], 0
        copied = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            for chunk in self.chunks:
                for part in self._parts(chunk, first, stop):
                    buffer[start : start + len(part)].copy_(part, non_blocking=True)
                    start += len(part)
            copied.record(self.stream)
        self.bytes += start * buffer.element_size()
        self.started += 1
        self.in_flight.append(_Group(first, stop, buffer, copied))

    def _parts(self, chunk: PooledChunk, first: int, stop: int) -> list[Tensor]:
        """What is copied of layers [first, stop): all at once, or each layer's keys and values of this rank's heads."""
        if self.shards is None:
            return [chunk.memory[chunk.starts[first] : chunk.starts[stop]]]
        pairs = ((n, x) for n in range(first, stop) for x in (chunk.keys[n], chunk.values[n]))
        return [_own(x, n, self.shards).reshape(-1) for n, x in pairs]

    def _gathered(self, group: _Group, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, G, D]; one kernel for each run of chunks of one length."""
        tokens = sum(len(chunk.tokens) for chunk in self.chunks)
        (heads, _, dim), (_, _, value_dim) = (
            _own(x[layer], layer, self.shards).shape for x in (self.chunks[0].keys, self.chunks[0].values)
        )
        k, v = (group.memory.new_empty(tokens, heads, width) for width in (dim, value_dim))
        start = token = 0
        for some in self.equal_lengths:
            count, length = len(some), len(some[0].tokens)
            starts = self._starts(some[0])
            each = starts[group.stop] - starts[group.first]
            parts = group.memory[start : start + count * each].view(count, each)
            offset, here = starts[layer] - starts[group.first], slice(token, token + count * length)
            for out, width in ((k, dim), (v, value_dim)):
                part = parts[:, offset : offset + heads * length * width].unflatten(1, (heads, length, width))
                out[here].view(count, length, heads, width).copy_(part.transpose(1, 2))
                offset += heads * length * width
            start, token = start + count * each, token + count * length
        return k, v
