"""The processes that hold a model together under tensor parallelism: what they agree on, and how they fail together.

All ranks make the same calls, so each decision about a pass must be the same on all: a rank that runs a pass that the
others do not run waits for them until the process group's timeout. An error on one rank would have the same effect.
So ranks exchange whether they failed: with every value that they gather (`all_values`), at the end of each block of
joint work (`together`), and before each pass (`in_pass`). Then all of them raise.

An error inside a pass cannot be mended this way. The other ranks already wait in a collective of the model's own, and
a further collective would be taken for it. The rank that failed raises alone; the process group's timeout ends the
others. Afterwards the group is of no use: end all processes and begin again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longreach.adapters.transformers.shard import tensor_parallel
from longreach.adapters.transformers.sharded_weights import is_sharded
from longreach.errors import OtherRankFailed

TEXT = 1024  # bytes of an error's text that ranks exchange; each exchange has room for it
# within the outermost block of `together`: errors that are not announced, or not again
_SETTLED: ContextVar[list[BaseException] | None] = ContextVar("longreach_settled", default=None)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that hold a model together, each with its shards. Every method is called on all ranks at once.

    device: of the model; the collectives run there.
    """

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def all_values(self, value: int = 0) -> list[int]:
        """The value that each rank gives, in the order of ranks. Waits for the device.

        Raises OtherRankFailed if another rank failed before it came here (see `together`).
        """
        found = self._exchange(value, "")
        for rank, (_, said) in enumerate(found):
            if said:
                raise OtherRankFailed(rank, self.size, said)
        return [value for value, _ in found]

    def announce(self, error: BaseException) -> None:
        """Tell the other ranks, in the place of this rank's next exchange with them, that it failed."""
        text = str(error)
        self._exchange(0, f"{type(error).__name__}: {text}" if text else type(error).__name__)

    def _exchange(self, value: int, said: str) -> list[tuple[int, str]]:
        """(value, error's text or "") of each rank. One collective of one size, so that any two exchanges match."""
        text = said.encode("utf-8", "replace")[:TEXT]
        mine = torch.zeros(2 + TEXT // 8, dtype=torch.int64)
        mine[0], mine[1] = value, len(text)
        if text:
            mine[2:].view(torch.uint8)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        mine = mine.to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        result = []
        for x in torch.stack(found).cpu():
            given, length = x[:2].tolist()
            kept = bytes(x[2:].view(torch.uint8)[:length].tolist()) if length else b""
            result.append((given, kept.decode("utf-8", "ignore")))
        return result

    def sum(self, x: Tensor) -> Tensor:
        """x summed over ranks. Raises OtherRankFailed as `all_values`."""
        x = x.clone()
        with in_pass(self):
            dist.all_reduce(x, group=self.group)
        return x

    def first(self, x: Tensor) -> Tensor:
        """Rank 0's tensor on all ranks; each gives one of the same shape and dtype. Raises OtherRankFailed."""
        shared = x.clone()
        with in_pass(self):
            dist.broadcast(shared, group_src=0, group=self.group)
        return shared

    def gathered(self, x: Tensor) -> Tensor:
        """[count, ...] of each rank -> [size * count, ...] in the order of ranks. For layers of a pass, which have no
        time to exchange errors."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.group)
        return torch.cat(found)


def ranks_of(decoder: nn.Module) -> Ranks | None:
    """The ranks that share a decoder by a tensor-parallel plan; None where one process holds it. Raises Unsupported."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    for weight in decoder.parameters():
        if is_sharded(weight):
            mesh = tensor_parallel(weight.device_mesh)  # type: ignore[attr-defined]
            return Ranks(mesh.get_group(), weight.device)
    return None


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """A block that succeeds on all ranks or raises on all. May be nested. ranks: None for one process.

    Collectives within the block are those of `Ranks`, or lie in a block of `in_pass`. The rank that failed raises its
    own error; the others raise OtherRankFailed at their next exchange, at the latest at the block's end. An error
    inside a pass is not exchanged.
    """
    if ranks is None:
        yield
        return
    outer = _SETTLED.get()
    token = _SETTLED.set([] if outer is None else outer)
    try:
        yield
        ranks.all_values()
    except BaseException as error:
        if _settle(error, f"This is rank {ranks.rank} of {ranks.size}; the other ranks raise OtherRankFailed."):
            ranks.announce(error)
        raise
    finally:
        _SETTLED.reset(token)


@contextmanager
def in_pass(ranks: Ranks | None) -> Iterator[None]:
    """A block with other collectives, such as a model's pass: all ranks begin it, or all raise.

    An error within it is not exchanged, but for one in a block of `together`.
    """
    if ranks is None:
        yield
        return
    ranks.all_values()
    try:
        yield
    except BaseException as error:
        _settle(
            error,
            f"This is rank {ranks.rank} of {ranks.size}, in the middle of a pass. The other ranks wait in it until the "
            f"process group's timeout; end all processes and begin again.",
        )
        raise


def _settle(error: BaseException, note: str) -> bool:
    """Note an error, and what becomes of the other ranks, unless it or what it was raised from was settled before."""
    settled = _SETTLED.get()
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OtherRankFailed) or any(cause is known for known in settled or ()):
            return False
        cause = cause.__cause__
    error.add_note(note)
    if settled is not None:
        settled.append(error)
    return True
