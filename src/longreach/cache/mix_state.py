"""State that a model's layers keep of all tokens so far: running means, and sums of blocks of tokens (FastMKA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from longreach.errors import Unsupported
from longreach.ops.carry import CarryMemory
from longreach.ops.types import KVView

PASSES = 8  # states that are kept of each sequence, one after each of its last passes


class Turn(NamedTuple):
    """Entries that a pass reads and writes, int64 [B] each."""

    before: Tensor
    after: Tensor


@dataclass(eq=False)
class LayerMeans:
    """State of one layer, after each of the last passes: mean [slots, PASSES, G, W], weight [slots, PASSES, G].

    sums: [slots, units, G, W], sums of the tokens of each block. last: [slots, PASSES, G, W], the sum of the block that
    the last token of a pass lies in. None for what the layer does not keep.
    """

    mean: Tensor | None
    weight: Tensor | None
    sums: Tensor | None
    last: Tensor | None

    def entries(self) -> list[Tensor]:
        """Tensors [slots, PASSES, ...]."""
        return [x for x in (self.mean, self.weight, self.last) if x is not None]


@dataclass(eq=False)
class _Copy:
    """A snapshot. stale: slots whose tokens were cut below it since."""

    count: Tensor
    turn: Tensor
    entries: dict[int, list[Tensor]]
    stale: set[int] = field(default_factory=set)

    def tokens(self, slot: int) -> int:
        return int(self.count[slot, self.turn[slot]])


class MixState:
    """A SequenceState of all layers of a model, for `slots` sequences.

    Each pass writes a new entry and leaves the PASSES - 1 before it. So a sequence can be cut to where one of its last
    passes began or ended, to 0, and to where a snapshot was taken, as long as that lives; not to other lengths, as
    means cannot be undone. All buffers but `sums` stay at fixed addresses, and nothing waits for the device between
    `begin` and the end of a pass.

    block: tokens of a block whose sums are kept; None: no sums. means: whether running means are kept. variant: named
    in errors.
    """

    def __init__(
        self, slots: int, device: torch.device | str, *, means: bool, block: int | None, variant: str = "fastmka"
    ):
        self.slots, self.means, self.block, self.variant, self._moves = slots, means, block, variant, 0
        self._copies = WeakSet[_Copy]()
        self.layers: dict[int, LayerMeans] = {}
        with torch.inference_mode(False):
            self.turn = torch.zeros(slots, dtype=torch.int64, device=device)
            self.count = torch.full((slots, PASSES), -1, dtype=torch.int64, device=device)
            self.count[:, 0] = 0

    # a pass

    def begin(self, slots: Tensor, seq: Tensor, pos: Tensor) -> Turn:
        """Begin a pass, once for all layers. slots: int [B]; seq, pos: int [R], rows by sequence and position."""
        with torch.no_grad():
            before = self.turn[slots]
            after = (before + 1) % PASSES
            count = self.count[slots, before].scatter_reduce(0, seq.long(), pos.long() + 1, "amax")
            self.count[slots, after] = count
            self.turn[slots] = after
        return Turn(before, after)

    def read(self, layer: int, slots: Tensor, host_slots: Sequence[int], turn: Turn, heads: int, width: int, units: int,
             dtype: torch.dtype) -> tuple[CarryMemory | None, Tensor | None]:  # fmt: skip
        """State of a layer before the pass: running means of [heads, width], in memory that the layer writes for the
        state after it, and sums [B, units, heads, width].

        host_slots: `slots` on the host. units: blocks that a sequence may reach. dtype: fp32 or fp64. The first call of
        a layer allocates its state, and one for more blocks than before moves it, so neither may be captured.
        """
        held = self._ensured(layer, heads, width, units, dtype)
        carry = sums = None
        if held.mean is not None and held.weight is not None:
            carry = CarryMemory(held.mean, held.weight, slots, turn.before, turn.after)
        if held.sums is not None:
            whole = tuple(host_slots) == tuple(range(self.slots))
            sums = held.sums if whole else held.sums[slots]  # without a copy where all are read
        return carry, sums

    def write_sums(self, layer: int, slots: Tensor, turn: Turn, counts: Sequence[int], sums: Tensor) -> None:
        """Sums of a layer after the rows of the pass. counts: rows of each sequence, on the host."""
        held = self.layers[layer]
        assert held.sums is not None and held.last is not None and self.block is not None
        with torch.no_grad():
            end = (self.count[slots, turn.after] - 1).clamp(min=0) // self.block
            own = torch.arange(len(slots), device=end.device)
            held.last[slots, turn.after] = sums.detach()[own, end]
            if max(counts, default=0) <= 1:
                held.sums[slots, end] = sums.detach()[own, end]
            else:
                held.sums[slots] = sums.detach()

    def _ensured(self, layer: int, heads: int, width: int, units: int, dtype: torch.dtype) -> LayerMeans:
        """The layer's tensors, with room for `units` blocks."""
        held, device = self.layers.get(layer), self.turn.device
        if held is None:
            with torch.inference_mode(False):

                def zeros(*shape: int) -> Tensor:
                    return torch.zeros(self.slots, *shape, dtype=dtype, device=device)

                mean, weight = (zeros(PASSES, heads, width), zeros(PASSES, heads)) if self.means else (None, None)
                sums, last = None, None
                if self.block is not None:
                    sums, last = zeros(units, heads, width), zeros(PASSES, heads, width)
            held = self.layers[layer] = LayerMeans(mean, weight, sums, last)
        elif held.sums is not None and held.sums.shape[1] < units:
            room = max(units, 2 * held.sums.shape[1]) - held.sums.shape[1]
            with torch.inference_mode(False), torch.no_grad():
                held.sums = F.pad(held.sums, (0, 0, 0, 0, 0, room))
            self._moves += 1
        return held

    # with the sequences

    def reset(self, slots: Tensor) -> None:
        self._stale(slots.tolist(), [0] * len(slots))
        self._empty(slots)

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Raise Unsupported unless each sequence can be cut to its length. Waits for the device."""
        count, turn = self.count.tolist(), self.turn.tolist()
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            if length and length not in count[slot] and self._copy_at(slot, length) is None:
                raise Unsupported(
                    f"the state that {self.variant} keeps of earlier tokens cannot be cut from "
                    f"{count[slot][turn[slot]]} to {length} tokens: expected 0, a length before or after a late "
                    f"pass ({sorted(n for n in count[slot] if n > 0)}), or one of a snapshot; read the tokens again"
                )

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Cut to lengths that `check_truncate` allows. Waits for the device."""
        count = self.count.tolist()
        each = dict(zip(slots.tolist(), lengths.tolist(), strict=True))
        self._empty(self._tensor([slot for slot, length in each.items() if not length]))
        for slot, length in each.items():
            copy = None if not length or length in count[slot] else self._copy_at(slot, length)
            if copy is not None:
                self._put(copy, [slot])
            elif length:
                self.turn[slot] = count[slot].index(length)
                self.count[slot].masked_fill_(self.count[slot] > length, -1)
                self._cut_sums([slot])
        self._stale(list(each), list(each.values()))

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        self.check_truncate(slots, lengths)
        self.truncate(slots, lengths)

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        """Nothing here is computed from keys."""

    def check_keep(self, layer: int) -> None:
        """Any keys may be evicted: the state is of tokens, whether their keys are kept or not."""

    def kept(self, layer: int, view: KVView) -> None:
        """See `check_keep`."""

    def snapshot(self) -> Callable[[], None]:
        """Copy all entries. While the result lives, sequences can be cut to their present lengths."""
        with torch.inference_mode(False), torch.no_grad():
            entries = {layer: [x.clone() for x in held.entries()] for layer, held in self.layers.items()}
            copy = _Copy(self.count.clone(), self.turn.clone(), entries)
        self._copies.add(copy)

        def restore() -> None:
            self._put(copy, [slot for slot in range(self.slots) if slot not in copy.stale])

        return restore

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> MixState:
        new = MixState(len(slots), self.turn.device, means=self.means, block=self.block, variant=self.variant)
        with torch.inference_mode(False), torch.no_grad():
            new.turn, new.count = self.turn[slots], self.count[slots]
            for layer, held in self.layers.items():
                each = (held.mean, held.weight, held.sums, held.last)
                new.layers[layer] = LayerMeans(*(None if x is None else x[slots] for x in each))
        return new

    def to_save(self) -> dict[str, Tensor]:
        raise Unsupported(f"the running means of {self.variant} cannot be saved; read the prompt again instead")

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """See `to_save`."""

    @property
    def generation(self) -> int:
        return self._moves

    @property
    def nbytes(self) -> int:
        held = [x for layer in self.layers.values() for x in (*layer.entries(), layer.sums) if x is not None]
        return sum(x.nbytes for x in (*held, self.count, self.turn))

    def _copy_at(self, slot: int, length: int) -> _Copy | None:
        """A snapshot in which the sequence has this length."""
        return next((c for c in self._copies if slot not in c.stale and c.tokens(slot) == length), None)

    def _stale(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """These sequences were cut: snapshots of more tokens are of no use to them."""
        for copy in self._copies:
            cut = zip(slots, lengths, strict=True)
            copy.stale.update(slot for slot, length in cut if copy.tokens(slot) > length)

    def _put(self, copy: _Copy, slots: Sequence[int]) -> None:
        """Write a snapshot of these sequences back."""
        at = self._tensor(slots)
        with torch.no_grad():
            self.count[at], self.turn[at] = copy.count[at], copy.turn[at]
            for layer, held in self.layers.items():
                for x, old in zip(held.entries(), copy.entries.get(layer, ()), strict=False):
                    x[at] = old[at]
        self._cut_sums(slots)

    def _cut_sums(self, slots: Sequence[int]) -> None:
        """Sums of blocks past the last token become 0, that of its own block as it was after it."""
        if self.block is None or not slots:
            return
        at = self._tensor(slots)
        with torch.no_grad():
            end = (self.count[at, self.turn[at]] - 1).clamp(min=0) // self.block
            for held in self.layers.values():
                assert held.sums is not None and held.last is not None
                past = torch.arange(held.sums.shape[1], device=at.device) > end[:, None]
                held.sums[at] = held.sums[at].masked_fill(past[..., None, None], 0.0)
                held.sums[at, end] = held.last[at, self.turn[at]]

    def _empty(self, slots: Tensor) -> None:
        with torch.no_grad():
            self.turn[slots] = 0
            self.count[slots] = -1
            self.count[slots, 0] = 0
            for held in self.layers.values():
                for x in (*held.entries(), held.sums):
                    if x is not None:
                        x[slots] = 0.0

    def _tensor(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.turn.device)
