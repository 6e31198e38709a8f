"""A decode step recorded in pieces: one CUDA graph for each stretch between two attentions, host work between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from longreach.runtime.collector import collector_off


class Graph(Protocol):
    """Records the work launched between `begin` and `end` without running it; `replay` runs it."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Pieces:
    """One step as an ordered list of graphs and host work.

    `recording` runs a step and records it: each graph is replayed as soon as it is recorded, so host work always
    gets the tensors of a real step. Within that block `cut` and `host` name the host work. `replay` runs the step
    again.

    All graphs share one memory pool. A block that is freed while graph i is recorded may be reused by graph i or a
    later one, never by an earlier one. That is safe because every replay runs all pieces in the recorded order on one
    stream: a tensor that crosses a cut is referenced until its last reader is recorded, so only later work reuses its
    block. Host work runs again at each replay, so its inputs must stay allocated: its closure references them.
    """

    def __init__(self, new_graph: Callable[[], Graph]):
        self.failed_in_graph = False  # after an error in `recording`: whether a graph was being recorded
        self._new_graph = new_graph
        self._graphs: list[Graph] = []
        self._work: list[Callable[[], Any]] = []
        self._open: Graph | None = None

    @property
    def graphs(self) -> int:
        """Graphs of a step."""
        return len(self._graphs)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record and run the step within this block. An error discards all graphs."""
        with collector_off():
            try:
                self._begin()
                yield
                self._end()
            except BaseException:
                self.failed_in_graph = self._open is not None
                self._discard()
                raise

    def cut(self, compute: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """The result of `compute` in `dtype`, in a buffer that every replay overwrites.

        `compute` runs on the host now and at each replay, between the graph so far and the next one.
        """
        self._end()
        out = compute()
        with torch.inference_mode(False):  # made outside the pool: host work writes it, the next graph reads it
            buffer = torch.empty(out.shape, dtype=dtype, device=out.device)
        buffer.copy_(out)
        self._work.append(lambda: buffer.copy_(compute()))
        self._begin()
        return buffer

    def host(self, work: Callable[[], None]) -> None:
        """Run `work` on the host now and at each replay, between the graph so far and the next one."""
        self._end()
        work()
        self._work.append(work)
        self._begin()

    def replay(self) -> None:
        """Run the step again."""
        for work in self._work:
            work()

    def _begin(self) -> None:
        graph = self._new_graph()
        graph.begin()
        self._open = graph

    def _end(self) -> None:
        graph = self._open
        assert graph is not None, "cut and host belong inside recording()"
        graph.end()
        self._open = None
        self._graphs.append(graph)
        self._work.append(graph.replay)
        graph.replay()

    def _discard(self) -> None:
        if self._open is not None:
            with contextlib.suppress(RuntimeError):  # a capture that an error invalidated also fails to end
                self._open.end()
            self._graphs.append(self._open)
            self._open = None
        for graph in self._graphs:
            graph.reset()
        self._graphs, self._work = [], []


class CudaGraph:
    """A CUDA graph recorded on a side stream into a memory pool that it shares."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any):
        self._stream, self._pool = stream, pool
        self._on_stream = contextlib.ExitStack()
        self._graph = torch.cuda.CUDAGraph()
        self.replay, self.reset = self._graph.replay, self._graph.reset

    def begin(self) -> None:
        with contextlib.ExitStack() as entered:
            entered.enter_context(torch.cuda.stream(self._stream))
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._on_stream = entered.pop_all()

    def end(self) -> None:
        with self._on_stream:
            self._graph.capture_end()


def cuda_graphs(device: torch.device) -> Callable[[], Graph]:
    """A factory of CUDA graphs that share a fresh memory pool."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # the pool cannot use memory that is cached outside it
    stream, pool = _side_stream(device), torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(stream, pool)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)
