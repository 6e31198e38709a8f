"""MagicPIG's state: the hash tables of one layer's keys, of all sequences of a cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longreach.cache import StatelessOnTruncate
from longreach.methods.call import LayerCall
from longreach.methods.magicpig.notes import Summary, summary_of
from longreach.methods.magicpig.schedule import Schedule
from longreach.ops import KVView
from longreach.ops.simhash import HashTables

LAYERS = 64  # whose ends are computed together
SEGMENT = 1 << 13  # positions of a segment: sealing sorts the last one again, and a look-up visits all of them


class LayerTables(StatelessOnTruncate):
    """Hash tables, centres and projections of one layer.

    Tables are of slots of the cache, whatever its pages, as a segment of keys is larger than a page. They follow from
    the keys and the number of tokens. So whatever truncation or an overwriting pass takes away is made again from the
    keys in the cache, by `follow`. After eviction the method refuses the layer until the evicted sequences are emptied,
    and the tables of the other sequences stay right.

    tables: positions are slots of the layer. centre: fp32 [slots, G, D], zeros for no centre. projections: bf16
    [tables, bits, D].
    """

    def __init__(self, kv: KVView, slots: int, schedule: Schedule, layer: int, projections: Tensor):
        self.layer, self.schedule, self.projections, self._moves = layer, schedule, projections, 0
        self._element = kv.k.element_size()
        self.tables, dim = self._empty(slots, kv.heads, kv.capacity), projections.shape[2]
        self.centre = torch.zeros(slots, kv.heads, dim, device=kv.k.device)
        self._behind = True  # more than a block may have to enter, as the cache may already hold keys

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self.centre.nbytes + self.projections.nbytes

    @property
    def generation(self) -> int:
        return self._moves

    @property
    def summary(self) -> Summary:
        """Makes the report's values for this layer."""
        k, slots = self.centre, len(self.tables.stop)
        one = (self.tables.nbytes + k.numel() * k.element_size()) // slots
        tables, bits, _ = self.projections.shape
        return summary_of(bits, tables, one, 2 * k.shape[1] * self.capacity * k.shape[2] * self._element)

    @property
    def capacity(self) -> int:
        """Positions of a sequence that the tables have room for."""
        return self.tables.ids.shape[3]

    def ensure_capacity(self, kv: KVView) -> None:
        """Grow to the layer's capacity. Paged memory grows page by page, so the tables at least double there."""
        if kv.capacity <= self.capacity:
            return
        old, room = self.tables, kv.capacity if kv.page == kv.capacity else max(kv.capacity, 2 * self.capacity)
        slots, heads, _, held = old.ids.shape
        with torch.inference_mode(False), torch.no_grad():
            new = self._empty(slots, heads, room)
            new.ids[..., :held] = old.ids
            new.offsets[..., : old.offsets.shape[3], :] = old.offsets
            new.stop.copy_(old.stop)
            assert old.inverse_norms is not None and new.inverse_norms is not None
            new.inverse_norms[..., :held] = old.inverse_norms
        self.tables, self._moves = new, self._moves + 1

    def _empty(self, slots: int, heads: int, room: int) -> HashTables:
        tables, bits, _ = self.projections.shape
        first, device = self.schedule.sinks, self.projections.device
        room = -(-room // 8) * 8  # look-ups read 8 ids at once
        return HashTables.empty(
            slots, heads, room, bits=bits, tables=tables, size=SEGMENT, first=first, device=device
        )  # fmt: skip

    def follow(self, call: LayerCall, tokens: Tensor, *, step: bool = False) -> None:
        """Bring the tables to what they are at these numbers of tokens, int [B]. step: before a decode step."""
        first = self.layer // LAYERS * LAYERS
        stops = call.once(
            (self.schedule, "stops", first, id(tokens)),
            lambda: self.schedule.stops(tokens, range(first, first + LAYERS)),
        )
        stop = stops[self.layer - first]
        with torch.inference_mode(False), torch.no_grad():
            call.op(
                "simhash_seal", self.tables, self.projections, self.centre, stop, centred=self.schedule.centre,
                block=self.schedule.seal if step and not self._behind else None,
            )  # fmt: skip
        self._behind = step and len(call.rows.pos) > call.kv.sequences  # several tokens of a sequence

    # SequenceState

    def reset(self, slots: Tensor) -> None:
        self.tables.stop[slots.to(self.tables.stop.device).long()] = self.schedule.sinks

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """A centre stays as long as keys are in the tables; the first ones that enter make another."""
        held = self.tables.stop
        slots, lengths = slots.to(held.device).long(), lengths.to(held.device)
        held[slots] = torch.minimum(held[slots], self.schedule.stop(lengths, self.layer).to(held.dtype))

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> LayerTables:
        tables, new = self.tables, copy.copy(self)
        assert tables.inverse_norms is not None
        with torch.inference_mode(False), torch.no_grad():
            new.centre = self.centre[slots]
            new.tables = replace(
                tables,
                ids=_selected(tables.ids, slots),
                offsets=_selected(tables.offsets, slots),
                stop=tables.stop[slots],
                inverse_norms=tables.inverse_norms[slots],
            )
        return new

    def to_save(self) -> dict[str, Tensor]:
        """Nothing: `follow` hashes all keys again at the next pass."""
        return {}

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        """Keys from there on are hashed again once the pass has written them."""
        self.truncate(slots, lengths)


def _selected(x: Tensor, slots: Tensor) -> Tensor:
    """x[slots]; as int16 in between, as torch does not index uint16 on every device."""
    return x.view(torch.int16)[slots].view(x.dtype) if x.dtype == torch.uint16 else x[slots]
