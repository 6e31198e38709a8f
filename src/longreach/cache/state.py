"""The interface of state that lives with the KV cache: reset, truncation, eviction, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.types import KVView


class SequenceState(Protocol):
    """State of methods. slots, lengths: int64 [n] on the cache's device; lengths are in tokens."""

    def reset(self, slots: Tensor) -> None:
        """Empty the sequences in `slots`."""

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Raise Unsupported if the sequences in `slots` cannot be cut to `lengths` tokens. Changes nothing."""

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Cut the sequences in `slots` to `lengths` tokens."""

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        """A pass begins that overwrites keys of the sequences in `slots`, the first one at position lengths[b].

        Drop the state of rows from there on: they attended to the old keys.
        """

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        """Such a pass has written these keys of `layer`: compute the state of keys again.

        seq, slot: int64 [n], sequences of `view` and slots. Other new slots of the pass may not be written yet.
        """

    def check_keep(self, layer: int) -> None:
        """Raise Unsupported if keys of `layer` cannot be evicted. Changes nothing."""

    def kept(self, layer: int, view: KVView) -> None:
        """Rebuild the state of the keys of `layer`, which were compacted. view: all sequences, by cache slot."""

    def snapshot(self) -> Callable[[], None]:
        """Copy everything that `truncate` cannot restore. Calling the result restores it, after truncation."""

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> SequenceState:
        """The state of the sequences in `slots`, in this order and in memory of its own. A slot may come several times.

        pages: of each layer that the state is of, int64 [n] on the cache's device: page p of the selected sequences'
        memory is a copy of page pages[p]. Raises Unsupported for a state that cannot be copied.
        """

    def to_save(self) -> dict[str, Tensor]:
        """What a file must hold of the state; the rest is made again from the keys, by `kept` or at the next pass.

        Raises Unsupported for a state that needs more.
        """

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Fill a fresh state with what `to_save` returned. Raises InvalidInput for tensors of another shape."""

    @property
    def generation(self) -> int:
        """How often memory has moved: graphs captured at an earlier generation read freed memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that the state holds."""


class StatelessOnTruncate:
    """Base for states that need no work on reset or truncation: entries past a sequence's length are never read.

    A subclass that holds tensors defines `nbytes`.
    """

    def reset(self, slots: Tensor) -> None:
        pass

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        pass

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        pass

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        pass

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        pass

    def check_keep(self, layer: int) -> None:
        pass

    def kept(self, layer: int, view: KVView) -> None:
        pass

    def snapshot(self) -> Callable[[], None]:
        return _nothing

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> SequenceState:
        if self.nbytes:
            raise Unsupported(f"{type(self).__name__} cannot be copied for other sequences; read the prompt again")
        return self

    def to_save(self) -> dict[str, Tensor]:
        if self.nbytes:
            raise Unsupported(f"{type(self).__name__} cannot be saved; read the prompt again instead")
        return {}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        pass

    @property
    def generation(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return 0


def _nothing() -> None:
    pass
