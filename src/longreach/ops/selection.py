"""Selection: which keys each row attends to, as spans or as lists.

A selection names cache *slots*. Of these, only filled slots at positions up to a row's own are visible to it. `mask` is
the definition; every implementation of attend must agree with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longreach.errors import SelectionError
from longreach.ops.types import INTS, KVView, Rows, describe, require

Per = Literal["kv", "query"]


class Bound(NamedTuple):
    """One end of a span: a slot, or (relative) an offset to the row's position. int, or int [R, 1 or heads]."""

    value: int | Tensor
    relative: bool

    def take(self, index: Tensor) -> Bound:
        """The bound of the rows at `index` [r]."""
        return self if isinstance(self.value, int) else Bound(self.value[index], self.relative)


def absolute(slot: int | Tensor) -> Bound:
    """The bound at an absolute slot."""
    return Bound(slot, False)


def relative(offset: int | Tensor) -> Bound:
    """The bound at the row's own position plus `offset`; relative(1) is just after the row itself."""
    return Bound(offset, True)


class Span(NamedTuple):
    """[start, stop), 0-based and half-open; empty if stop <= start, cut to the slots visible to the row."""

    start: Bound
    stop: Bound


class Selection(ABC):
    """What rows attend to. `per`: whether its head axis counts KV heads or query heads; length 1 serves all."""

    per: Per

    @abstractmethod
    def check(self, rows: Rows, kv: KVView, *, entries: bool = True) -> None:
        """Raise InvalidInput where shapes, dtypes or devices do not fit rows and view.

        On a CPU values too: SelectionError for entries that are not in use, or named twice. No device sync.
        entries: False for a caller that checks the entries of lists itself.
        """

    def check_entries(self, rows: Rows, kv: KVView) -> None:  # noqa: B027  spans have no entries
        """Raise SelectionError where a list of some row names a slot that is not in use, or one slot twice."""

    @abstractmethod
    def chosen(self, rows: Rows, kv: KVView, stop: int) -> tuple[Tensor, Tensor | None]:
        """Chosen slots below `stop`, before causality: bool [R, heads, stop], log-weights of that shape or None.

        Raises SelectionError where a list names a slot that is not filled, or one slot twice.
        """

    @abstractmethod
    def keys_read(self, rows: Rows, kv: KVView) -> Tensor:
        """Keys streamed per row and KV head, the union over its query heads: int64 [R, G].

        Takes the selection as valid; no device sync, but for PackedLists' longest length (none where `all_visible`).
        """

    @abstractmethod
    def take(self, index: Tensor) -> Selection:
        """The selection of the rows at `index` [r]."""

    def mask(self, rows: Rows, kv: KVView, stop: int | None = None) -> Tensor:
        """The definition: bool [R, heads, N], true where the row attends to the slot. N = `stop` or capacity."""
        stop = kv.capacity if stop is None else stop
        return self.chosen(rows, kv, stop)[0] & visible(rows, kv, stop, self.per)

    def streamed(self, rows: Rows, kv: KVView, stop: int | None = None) -> Tensor:
        """bool [R, G, N]: slots read for the row by each KV head, the union over its query heads."""
        return self._union(self.mask(rows, kv, stop), rows, kv)

    def _union(self, mask: Tensor, rows: Rows, kv: KVView) -> Tensor:
        if self.per == "query" and mask.shape[1] > 1:
            mask = mask.unflatten(1, (kv.heads, kv.group(rows))).any(2)
        return mask.expand(rows.pos.shape[0], kv.heads, -1)


def check_bound(what: str, bound: Bound, per: Per, rows: Rows, kv: KVView) -> None:
    """Raise InvalidInput or SelectionError where a bound does not fit rows and view."""
    made = isinstance(bound, Bound)
    require(made, lambda: f"{what}: expected bounds made by absolute() or relative(), got {describe(bound)}")
    value = bound.value
    if isinstance(value, int):
        if not bound.relative and value < 0:
            raise SelectionError(f"{what}: absolute bounds must be >= 0, got {value}")
        return
    ok = isinstance(value, Tensor) and value.dtype in INTS and value.dim() == 2
    ok = ok and value.shape[0] == rows.pos.shape[0] and value.device == rows.pos.device
    require(ok, lambda: f"{what}: expected an int or int [R={rows.pos.shape[0]}, heads], got {describe(value)}")
    check_heads(value.shape[1], per, rows, kv, what)
    if not bound.relative and value.device.type == "cpu" and bool((value < 0).any()):
        raise SelectionError(f"{what}: absolute bounds must be >= 0, got {int(value.min())}")


def check_heads(size: int, per: Per, rows: Rows, kv: KVView, what: str) -> None:
    """Raise InvalidInput unless a head axis of `size` entries fits."""
    heads = kv.heads if per == "kv" else rows.q.shape[1]
    require(per in ("kv", "query"), lambda: f"per: expected 'kv' or 'query', got {per!r}")
    require(size in (1, heads), lambda: f"{what}: expected 1 or {heads} {per} heads, got {size}")


def slot_positions(rows: Rows, kv: KVView, stop: int, per: Per) -> Tensor:
    """Position of each slot below `stop`, for each of the row's heads: int64, broadcasts to [R, heads, stop]."""
    slots = torch.arange(stop, device=rows.pos.device)
    if kv.slot_pos is None:
        return slots[None, None]
    page, offset = kv.locate(rows.seq[:, None], slots[None].expand(rows.seq.shape[0], -1))
    page = page.clamp(0, kv.k.shape[0] - 1)  # a table's entries past `seq_lens` may be anything
    position = kv.slot_pos[page, :, offset].transpose(1, 2).long()
    return position if per == "kv" else position.repeat_interleave(kv.group(rows), 1)


def beyond(bound: Bound, rows: Rows, kv: KVView, stop: int, per: Per) -> Tensor:
    """bool, broadcasts to [R, heads, stop]: slots at or past the bound, for each row."""
    value = bound.value if isinstance(bound.value, int) else bound.value[:, :, None]
    if bound.relative:
        return slot_positions(rows, kv, stop, per) >= rows.pos.long()[:, None, None] + value
    return torch.arange(stop, device=rows.pos.device)[None, None] >= value


def visible(rows: Rows, kv: KVView, stop: int, per: Per) -> Tensor:
    """bool, broadcasts to [R, heads, stop]: filled slots at positions up to the row's."""
    filled = torch.arange(stop, device=rows.pos.device) < kv.seq_lens[rows.seq.long()][:, None]
    return filled[:, None] & (slot_positions(rows, kv, stop, per) <= rows.pos[:, None, None])


@dataclass(frozen=True)
class Spans(Selection):
    """The union of spans, the same ones for every row up to their bounds."""

    spans: tuple[Span, ...]
    per: Per = "kv"

    @classmethod
    def dense(cls) -> Spans:
        """Everything visible to a row: [0, pos + 1)."""
        return cls((Span(absolute(0), relative(1)),))

    @property
    def is_dense(self) -> bool:
        """Whether this equals `dense()`."""
        fixed = all(isinstance(bound.value, int) for span in self.spans for bound in span)
        return fixed and self.spans == (Span(absolute(0), relative(1)),)

    @classmethod
    def window(cls, size: int) -> Spans:
        """The last `size` positions, the row's own included."""
        return cls((Span(relative(1 - size), relative(1)),))

    def take(self, index: Tensor) -> Spans:
        return Spans(tuple(Span(s.start.take(index), s.stop.take(index)) for s in self.spans), self.per)

    def check(self, rows: Rows, kv: KVView, *, entries: bool = True) -> None:
        for bound in (b for span in self.spans for b in span):
            check_bound("span", bound, self.per, rows, kv)

    def chosen(self, rows: Rows, kv: KVView, stop: int) -> tuple[Tensor, Tensor | None]:
        def passed(bound: Bound) -> Tensor:
            return beyond(bound, rows, kv, stop, self.per)

        mask = torch.zeros(rows.pos.shape[0], 1, stop, dtype=torch.bool, device=rows.pos.device)
        for span in self.spans:
            mask = mask | (passed(span.start) & ~passed(span.stop))
        return mask, None

    def keys_read(self, rows: Rows, kv: KVView) -> Tensor:
        if kv.slot_pos is not None:
            return self.streamed(rows, kv).sum(-1)
        pos = rows.pos.long()[:, None]
        limit = slots_seen(rows, kv)[:, None]
        if self.is_dense:
            return limit.expand(-1, kv.heads)

        def slots(bound: Bound) -> Tensor:
            fixed = torch.zeros_like(pos) if not bound.relative else pos
            return torch.minimum((fixed + bound.value).clamp(min=0), limit)

        ends = [torch.broadcast_tensors(slots(s.start), slots(s.stop)) for s in self.spans]
        heads = max((start.shape[1] for start, _ in ends), default=1)
        if not ends:
            return torch.zeros(pos.shape[0], kv.heads, dtype=torch.int64, device=pos.device)
        start = torch.stack([a.expand(-1, heads) for a, _ in ends], -1)  # [R, heads, spans]
        stop = torch.stack([b.expand(-1, heads) for _, b in ends], -1)
        if self.per == "query" and heads > 1:  # spans of a group's query heads are one stream
            start, stop = (x.unflatten(1, (kv.heads, -1)).flatten(2) for x in (start, stop))
        start, order = start.sort(-1)
        stop = stop.gather(-1, order)
        seen = torch.cat([torch.zeros_like(stop[..., :1]), stop.cummax(-1).values[..., :-1]], -1)
        return (stop - torch.maximum(start, seen)).clamp(min=0).sum(-1).expand(-1, kv.heads)


@dataclass(frozen=True)
class Lists(Selection):
    """A list of keys, or of blocks of `block` consecutive keys, per row and head; entries are distinct.

    index: int [L, heads, C]; count: int [L, heads], entries in use. A count above the capacity C is an
    overflow: the row then reads its dense span instead of the entries, and `overflowed` shows it, so nothing
    is cut silently. Entries past the count may be anything.
    log_weight: float [L, heads, C] or None, added to the logit of every key of the entry.
    row_to_list: int [R], the list each row uses (tiles share one); None means row r uses list r.
    head_map: int [G] (per="kv") or [H], the entry of the head axis that each head uses: lists made in one layer serve
        another through its head map, many to one, and are not copied. None: head h uses entry h, or the only one.
    all_visible: every key that a list's entries in use name is visible to its rows, except the end of a row's newest
        block, which must be among them if blocks have more than one key (unless `complete`). It must be true. The keys
        read are then counted without reading the entries.
    complete: with all_visible: all keys of the blocks in use are visible; the row's newest block may be among them only
        if the row is its last key.
    """

    index: Tensor
    count: Tensor
    log_weight: Tensor | None = None
    per: Per = "kv"
    block: int = 1
    row_to_list: Tensor | None = None
    head_map: Tensor | None = None
    all_visible: bool = False
    complete: bool = False

    @property
    def overflowed(self) -> Tensor:
        """bool [L, heads]: lists with a count above the capacity."""
        return self.count > self.index.shape[2]

    def check(self, rows: Rows, kv: KVView, *, entries: bool = True) -> None:
        index, count, weight = self.index, self.count, self.log_weight
        ok = isinstance(index, Tensor) and index.dtype in INTS and index.dim() == 3
        require(ok, lambda: f"index: expected int [L, heads, C], got {describe(index)}")
        _check_head_axis("index", index.shape[1], self.head_map, self.per, rows, kv)
        ok = isinstance(count, Tensor) and count.dtype in INTS and count.shape == index.shape[:2]
        require(ok, lambda: f"count: expected int {list(index.shape[:2])}, got {describe(count)}")
        if weight is not None:
            ok = isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape == index.shape
            require(ok, lambda: f"log_weight: expected float {list(index.shape)}, got {describe(weight)}")
        _check_block(self.block)
        _check_all_visible(self, kv)
        _check_list_of(self.row_to_list, index.shape[0], rows)
        for name, x in (("index", index), ("count", count), ("log_weight", weight)):
            on = x is None or x.device == rows.pos.device
            require(on, lambda: f"{name}: expected on {rows.pos.device} like the rows, got {describe(x)}")
        if count.device.type == "cpu" and count.numel():
            require(int(count.min()) >= 0, lambda: f"count: expected >= 0, got {int(count.min())}")
            if entries:
                self.check_entries(rows, kv)

    def take(self, index: Tensor) -> Lists:
        return replace(self, row_to_list=index if self.row_to_list is None else self.row_to_list[index])

    def _per_row(self, x: Tensor) -> Tensor:
        x = x if self.row_to_list is None else x[self.row_to_list.long()]
        return x if self.head_map is None else x[:, self.head_map.long()]

    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's entries, whether they are in use [R, heads, C], and whether the row overflowed [R, heads]."""
        index, count = self._per_row(self.index).long(), self._per_row(self.count)
        over = count > index.shape[2]
        used = (torch.arange(index.shape[2], device=index.device) < count[..., None]) & ~over[..., None]
        return index, used, over

    def chosen(self, rows: Rows, kv: KVView, stop: int) -> tuple[Tensor, Tensor | None]:
        self.check_entries(rows, kv)
        return self._painted(stop)

    def check_entries(self, rows: Rows, kv: KVView) -> None:
        """Raise SelectionError where a list of some row names a slot that is not in use, or one slot twice.

        Reads all entries: on a GPU a device sync.
        """
        of = torch.arange(len(rows.pos), device=rows.pos.device) if self.row_to_list is None else self.row_to_list
        which, of = of.unique(return_inverse=True)
        heads = slice(None) if self.head_map is None else self.head_map.unique().long()
        index, count = self.index[which.long()][:, heads].long(), self.count[which.long()][:, heads]
        column = torch.arange(index.shape[2], device=index.device)
        used = (column < count[..., None]) & (count <= index.shape[2])[..., None]
        blocks = -(-kv.seq_lens[rows.seq.long()].long() // self.block)  # of each row
        fewest = blocks.new_full((len(which),), torch.iinfo(torch.int64).max).scatter_reduce(0, of, blocks, "amin")
        bad = used & ((index < 0) | (index >= fewest[:, None, None]))
        if bool(bad.any()):
            first = bad.nonzero()[0]
            entry, unit = int(index[tuple(first)]), "slots" if self.block == 1 else f"blocks of {self.block} slots"
            row = int(((of == first[0]) & ((blocks <= entry) | (entry < 0))).nonzero()[0])
            raise SelectionError(
                f"list entry {entry} lies outside the {int(blocks[row])} {unit} that sequence {int(rows.seq[row])} "
                f"holds (row at position {int(rows.pos[row])}); was the list made for another cache?"
            )
        if bool(((index[..., 1:] > index[..., :-1]) | ~used[..., 1:]).all()):  # ascending lists spare the sort
            return
        ordered = torch.where(used, index, -1 - column).sort(-1).values  # spare ones are distinct, no entry is negative
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if bool(twice.any()):
            row = int((of == twice.nonzero()[0, 0]).nonzero()[0])
            raise SelectionError(
                f"a list of sequence {int(rows.seq[row])} (row at position {int(rows.pos[row])}) names an entry "
                "twice; entries must be distinct"
            )

    def _painted(self, stop: int) -> tuple[Tensor, Tensor | None]:
        """`chosen` of lists that are known to be valid; no device sync."""
        index, used, over = self._entries()
        width = -(-stop // self.block)
        place = torch.where(used & (index >= 0) & (index < width), index, width)  # a spare column, cut off again

        def paint(values: Tensor) -> Tensor:
            sheet = torch.zeros(*index.shape[:2], width + 1, dtype=values.dtype, device=index.device)
            return sheet.scatter(2, place, values)[..., :width].repeat_interleave(self.block, 2)[..., :stop]

        mask = paint(torch.ones_like(place, dtype=torch.bool)) | over[..., None]
        return mask, None if self.log_weight is None else paint(self._per_row(self.log_weight))

    def keys_read(self, rows: Rows, kv: KVView) -> Tensor:
        if self.all_visible:
            keys = self._per_row(self.count).long() * self.block
            if self.block > 1 and not self.complete:  # the row cuts the newest block, which is among those in use
                keys = (keys - (self.block - 1 - rows.pos.long() % self.block)[:, None]).clamp(min=0)
            keys = torch.where(self._per_row(self.overflowed), slots_seen(rows, kv)[:, None], keys)
            return keys.expand(-1, kv.heads)
        if kv.slot_pos is not None:
            mask = self._painted(kv.capacity)[0] & visible(rows, kv, kv.capacity, self.per)
            return self._union(mask, rows, kv).sum(-1)
        if self.head_map is not None and self.per == "kv":  # count each list once, however many heads it serves
            keys = replace(self, head_map=None)._counted(rows, kv)
            return keys[:, self.head_map.long()]
        return self._counted(rows, kv).expand(-1, kv.heads)

    def _counted(self, rows: Rows, kv: KVView) -> Tensor:
        """Keys streamed for each list, or their union per KV head: int64 [R, entries of the head axis, or G]."""
        index, used, over = self._entries()
        if self.per == "query" and index.shape[1] > 1:  # lists of a group's query heads are one stream
            spare = -1 - torch.arange(index.shape[2], device=index.device)
            index = torch.where(used, index, spare).unflatten(1, (kv.heads, -1)).flatten(2).sort(-1).values
            first = torch.ones_like(index[..., :1], dtype=torch.bool)
            used = (index >= 0) & torch.cat([first, index[..., 1:] != index[..., :-1]], -1)
            over = over.unflatten(1, (kv.heads, -1)).any(2)
        dense = slots_seen(rows, kv)[:, None]
        start = index.clamp(min=0) * self.block
        keys = (torch.minimum(start + self.block, dense[..., None]) - start).clamp(min=0)
        return torch.where(over, dense, (keys * used).sum(-1))


@dataclass(frozen=True)
class PackedLists(Selection):
    """Lists of varying length behind one another: prefill tiles, where a common capacity would waste memory.

    index: int [E]; offsets: int [L * heads + 1], list l of head h is index[offsets[l*heads+h] : offsets[l*heads+h+1]].
    heads: entries of the head axis; log_weight: float [E] or None; row_to_list: int [R] or None (row r uses list r);
    head_map, all_visible: as in Lists.
    """

    index: Tensor
    offsets: Tensor
    heads: int = 1
    log_weight: Tensor | None = None
    per: Per = "kv"
    block: int = 1
    row_to_list: Tensor | None = None
    head_map: Tensor | None = None
    all_visible: bool = False

    def check(self, rows: Rows, kv: KVView, *, entries: bool = True) -> None:
        for name in ("index", "offsets"):
            x = getattr(self, name)
            ok = isinstance(x, Tensor) and x.dtype in INTS and x.dim() == 1 and x.device == rows.pos.device
            require(ok, lambda: f"{name}: expected int, one dimension, on {rows.pos.device}, got {describe(x)}")
        _check_head_axis("heads", self.heads, self.head_map, self.per, rows, kv)
        lists, rest = divmod(self.offsets.shape[0] - 1, self.heads)
        require(
            rest == 0 and lists >= 0,
            lambda: f"offsets: expected L * {self.heads} + 1 entries, got {describe(self.offsets)}",
        )
        if self.log_weight is not None:
            ok = isinstance(self.log_weight, Tensor) and self.log_weight.is_floating_point()
            ok = ok and self.log_weight.shape == self.index.shape
            ok = ok and self.log_weight.device == self.index.device
            require(ok, lambda: f"log_weight: expected float {list(self.index.shape)}, got {describe(self.log_weight)}")
        _check_block(self.block)
        _check_all_visible(self, kv)
        _check_list_of(self.row_to_list, lists, rows)
        if self.offsets.device.type == "cpu":
            self._lengths()
            if entries:
                self.check_entries(rows, kv)

    def check_entries(self, rows: Rows, kv: KVView) -> None:
        self.padded().check_entries(rows, kv)

    def take(self, index: Tensor) -> Lists:
        return self.padded().take(index)

    def _lengths(self) -> Tensor:
        """[L * heads]: entries of each list. Raises SelectionError where offsets do not ascend within the index."""
        length = self.offsets[1:] - self.offsets[:-1]
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first < 0 or bool((length < 0).any()) or last > self.index.shape[0]:
            raise SelectionError(
                f"offsets: expected to ascend within the {self.index.shape[0]} entries of index, got {first} to {last}"
            )
        return length

    def padded(self) -> Lists:
        """The same lists with a common capacity (host work: it reads the longest length)."""
        length = self._lengths()
        column = torch.arange(max(1, int(length.max()) if length.numel() else 1), device=self.index.device)
        entry = (self.offsets[:-1, None] + column).clamp(max=max(self.index.shape[0] - 1, 0))

        def spread(x: Tensor) -> Tensor:  # entries past a list's end are its successor's, and not in use
            return (x[entry] if x.shape[0] else x.new_zeros(entry.shape)).unflatten(0, (-1, self.heads))

        weight = None if self.log_weight is None else spread(self.log_weight)
        count = length.unflatten(0, (-1, self.heads))
        index = spread(self.index)
        return Lists(index, count, weight, self.per, self.block, self.row_to_list, self.head_map, self.all_visible)

    def chosen(self, rows: Rows, kv: KVView, stop: int) -> tuple[Tensor, Tensor | None]:
        return self.padded().chosen(rows, kv, stop)

    def keys_read(self, rows: Rows, kv: KVView) -> Tensor:
        if not self.all_visible:
            return self.padded().keys_read(rows, kv)
        keys = self.offsets.long().diff().unflatten(0, (-1, self.heads))
        keys = keys if self.head_map is None else keys[:, self.head_map.long()]
        keys = keys if self.row_to_list is None else keys[self.row_to_list.long()]
        return keys.expand(-1, kv.heads)


def slots_seen(rows: Rows, kv: KVView) -> Tensor:
    """int64 [R]: slots visible to each row, if slots are positions."""
    return torch.minimum(rows.pos.long() + 1, kv.seq_lens[rows.seq.long()].long()).clamp(min=0)


def _check_head_axis(what: str, size: int, head_map: Tensor | None, per: Per, rows: Rows, kv: KVView) -> None:
    if head_map is None:
        check_heads(size, per, rows, kv, what)
        return
    require(per in ("kv", "query"), lambda: f"per: expected 'kv' or 'query', got {per!r}")
    require(size >= 1, lambda: f"{what}: expected lists of one head or more, got {size}")
    heads = kv.heads if per == "kv" else rows.q.shape[1]
    ok = isinstance(head_map, Tensor) and head_map.dtype in INTS
    ok = ok and head_map.shape == (heads,) and head_map.device == rows.pos.device
    require(ok, lambda: f"head_map: expected int [{heads} {per} heads] on {rows.pos.device}, got {describe(head_map)}")
    if head_map.device.type == "cpu":
        low, high = int(head_map.min()), int(head_map.max())
        require(low >= 0 and high < size, lambda: f"head_map: expected values in [0, {size}), got {low} to {high}")


def _check_block(block: int) -> None:
    require(isinstance(block, int) and block >= 1, lambda: f"block: expected a count of keys >= 1, got {block!r}")


def _check_all_visible(lists: Lists | PackedLists, kv: KVView) -> None:
    blocks = isinstance(lists, PackedLists) and lists.block > 1
    fits = not lists.all_visible or (lists.per == "kv" and kv.slot_pos is None and not blocks)
    require(
        fits,
        "all_visible: expected lists per KV head (of keys, if packed), of slots that are positions; leave it out for "
        "others",
    )


def _check_list_of(row_to_list: Tensor | None, lists: int, rows: Rows) -> None:
    count = rows.pos.shape[0]
    if row_to_list is None:
        require(lists == count, lambda: f"lists: expected one per row ({count}) or row_to_list, got {lists}")
        return
    ok = isinstance(row_to_list, Tensor) and row_to_list.dtype in INTS
    ok = ok and row_to_list.shape == (count,) and row_to_list.device == rows.pos.device
    require(ok, lambda: f"row_to_list: expected int [R={count}] on {rows.pos.device}, got {describe(row_to_list)}")
    if row_to_list.device.type == "cpu" and count:
        inside = int(row_to_list.min()) >= 0 and int(row_to_list.max()) < lists
        require(
            inside,
            lambda: (
                f"row_to_list: expected values in [0, {lists}), got {int(row_to_list.min())} to "
                f"{int(row_to_list.max())}"
            ),
        )
