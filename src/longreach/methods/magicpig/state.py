"""MagicPIG's state: the hash tables of one layer's keys, of all sequences of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.cache import StatelessOnTruncate
from longreach.methods.call import LayerCall
from longreach.methods.magicpig.holds import Hold
from longreach.methods.magicpig.notes import Summary, summary_of
from longreach.methods.magicpig.schedule import Schedule
from longreach.ops import KVView
from longreach.ops.simhash import HashTables

SEGMENT = 1 << 14  # positions of a segment: sealing sorts the last one again, and a look-up visits all of them
AT_ONCE = 1 << 12  # keys that are copied and hashed at a time


class LayerTables(StatelessOnTruncate):
    """Hash tables, centres and projections of one layer.

    Tables are of slots of the cache, whatever its pages, as a segment of keys is larger than a page. They follow from
    the keys and the number of tokens. So whatever truncation or an overwriting pass takes away is made again from the
    keys in the cache, by `follow`.

    tables: positions are slots of the layer. centre: fp32 [slots, G, D], zeros for no centre. projections: bf16
    [tables, bits, D]. `stop` and `centred` are on the host, a number for each slot: the end of its keys in the tables,
    and of those that its centre was made of.
    """

    def __init__(self, kv: KVView, slots: int, schedule: Schedule, projections: Tensor):
        self.schedule, self.projections, self._moves = schedule, projections, 0
        self._element = kv.k.element_size()
        self.tables, dim = self._empty(slots, kv.heads, kv.capacity), projections.shape[2]
        self.centre = torch.zeros(slots, kv.heads, dim, device=kv.k.device)
        self.stop, self.centred = [schedule.sinks] * slots, [schedule.sinks] * slots

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self.centre.nbytes + self.projections.nbytes

    @property
    def generation(self) -> int:
        return self._moves

    @property
    def summary(self) -> Summary:
        """Makes the report's values for this layer."""
        k, slots = self.centre, len(self.stop)
        one = (self.tables.nbytes + k.numel() * k.element_size()) // slots
        return summary_of(one, 2 * k.shape[1] * self.capacity * k.shape[2] * self._element)

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
        self.tables, self._moves = new, self._moves + 1

    def _empty(self, slots: int, heads: int, room: int) -> HashTables:
        tables, bits, _ = self.projections.shape
        first, device = self.schedule.sinks, self.projections.device
        return HashTables.empty(
            slots, heads, room, bits=bits, tables=tables, size=SEGMENT, first=first, device=device
        )  # fmt: skip

    def follow(self, call: LayerCall, lengths: Sequence[tuple[Hold, int]]) -> list[tuple[Hold, int, int]]:
        """Bring the tables of sequences to what they are at these numbers of tokens.

        Returns the ranges of keys that were read: (sequence, start, stop).
        """
        read = list[tuple[Hold, int, int]]()
        for hold, length in lengths:
            stop = self.schedule.stop(length)
            read += self._recentre(call, hold, stop)
            if self.stop[hold.slot] > stop:
                self._cut(hold.slot, stop)
            elif self.stop[hold.slot] < stop:
                read.append((hold, self.stop[hold.slot], stop))
                self._seal(call, hold, stop)
        return read

    def _recentre(self, call: LayerCall, hold: Hold, stop: int) -> list[tuple[Hold, int, int]]:
        first, last = self.schedule.sinks, self.schedule.centre_stop(stop)
        if self.centred[hold.slot] == last:
            return []
        self._cut(hold.slot, first)
        if last == first:
            return []
        total = self.centre.new_zeros(self.centre.shape[1:], dtype=torch.float64)
        count = total.new_zeros(total.shape[0], 1)
        for begin in range(first, last, AT_ONCE):
            keys = _keys(call.kv, hold.seq, begin, min(begin + AT_ONCE, last))
            finite = keys.isfinite().all(-1, keepdim=True)  # one that is not must not make all others void
            total += torch.where(finite, keys, 0).double().sum(0)
            count += finite.sum(0)
        self.centre[hold.slot] = (total / count.clamp(min=1)).float()
        self.centred[hold.slot] = last
        return [(hold, first, last)]

    def _seal(self, call: LayerCall, hold: Hold, stop: int) -> None:
        """Add the keys up to `stop`, segment by segment."""
        tables, at = self.tables, self.stop[hold.slot]
        slot = torch.tensor([hold.slot], device=tables.ids.device)
        while at < stop:
            end = min((at // tables.size + 1) * tables.size, stop)
            found = []
            for begin in range(at, end, AT_ONCE):
                keys = _keys(call.kv, hold.seq, begin, min(begin + AT_ONCE, end))
                found.append(call.op("simhash_codes", keys, self.projections, centre=self.centre[hold.slot]))
            sorted_before = at - max(at // tables.size * tables.size, tables.first)
            call.read_bytes(sorted_before * tables.heads * tables.tables * tables.ids.element_size())
            codes = found[0] if len(found) == 1 else torch.cat([x.view(torch.int16) for x in found]).view(torch.uint16)
            call.op("simhash_build", tables, codes[None], slot, slot.new_tensor([end - at]))
            at = self.stop[hold.slot] = end

    def _cut(self, slot: int, stop: int) -> None:
        """End the tables of a sequence at `stop`; at its first key without a centre."""
        self.stop[slot] = stop
        self.tables.stop[slot] = stop
        if stop <= self.schedule.sinks:
            self.centred[slot] = self.schedule.sinks
            self.centre[slot] = 0.0

    # SequenceState

    def reset(self, slots: Tensor) -> None:
        for slot in slots.tolist():
            self._cut(slot, self.schedule.sinks)

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            stop = min(self.stop[slot], self.schedule.stop(length))
            kept = self.centred[slot] == self.schedule.centre_stop(stop)
            self._cut(slot, stop if kept else self.schedule.sinks)

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        """Keys from there on are hashed again once the pass has written them."""
        self.truncate(slots, lengths)

    def kept(self, layer: int, view: KVView) -> None:
        """The tables name other keys now: the method refuses the layer until its slots are emptied."""
        for slot in range(len(self.stop)):
            self._cut(slot, self.schedule.sinks)


def _keys(kv: KVView, seq: int, begin: int, end: int) -> Tensor:
    """[end - begin, G, D]: keys of a sequence of the view."""
    slot = torch.arange(begin, end, device=kv.k.device)
    page, offset = kv.locate(torch.full_like(slot, seq), slot)
    return kv.k[page, :, offset]
