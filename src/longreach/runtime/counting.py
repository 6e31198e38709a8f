"""Sums of the reads of one pass, computed with few kernels for any number of layers.

Every column of a layer is a linear combination of counts: slots read by all rows and KV heads, entries of lists, rows.
Equal counts of several layers are computed once; counts of lists of one shape are computed together. The coefficients
are computed on the host, and copied to the device once for passes of the same structure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.methods.call import LayerCall, Noted
from longreach.ops import KVView, Lists, PackedLists, Rows, Selection, Spans, TileLists
from longreach.ops.doors import Later

COLUMNS = ("key_bytes", "value_bytes", "metadata_bytes", "dense_bytes", "overflowed_lists", "rows")
KEYS, VALUES, METADATA, DENSE, OVERFLOWED, ROWS = range(len(COLUMNS))
ListsInUse = Lists | PackedLists


class Term(NamedTuple):
    """Adds `factor` times the count `name` to a column."""

    column: int
    name: Hashable
    factor: int


class _Place(NamedTuple):
    """The parts of rows and view that counts depend on. Queries, keys and entries of lists are large and not held."""

    seq: Tensor
    pos: Tensor
    lengths: Tensor
    table: Tensor | None
    heads: int
    ended: Tensor | None  # bool [R], rows that are not counted; None if all are
    name: Hashable  # equal for equal places while the tensors live

    @property
    def seen(self) -> Tensor:
        """int64 [R]: the slots visible to each row."""
        return torch.minimum(self.pos.long() + 1, self.lengths[self.seq.long()].long()).clamp(min=0)


class _Visible(NamedTuple):
    """Lists with `all_visible`. in_use: entries, int [L, heads]. capacity: longer lists overflow; None: no limit.

    cut: whether a row ends within its newest block, which is in every list.
    """

    in_use: Tensor
    capacity: int | None
    block: int
    cut: bool
    row_to_list: Tensor | None
    place: _Place

    @property
    def batch_key(self) -> Hashable:
        """Equal for lists that can be counted together."""
        return (
            self.in_use.shape,
            self.in_use.dtype,
            self.capacity,
            self.block,
            self.cut,
            id(self.row_to_list),
            self.place.name,
        )


class Counting:
    """Counts of one pass. ended: bool [R], rows of its masked layers that are not counted; None if all are."""

    def __init__(self, ended: Tensor | None = None):
        self.ended = ended
        self.layers: list[tuple[Any, tuple[Term, ...]]] = []
        self._counts: dict[Hashable, Tensor] = {}  # name -> int64 []
        self._visible: dict[Hashable, _Visible] = {}
        self._maps: dict[Hashable, dict[int, Tensor | None]] = {}  # lists -> id of a head map -> head map
        self._places: dict[Hashable, _Place] = {}
        self._spans: dict[Hashable, list[Term]] = {}  # (place, selection, bytes per slot) -> terms
        self._per_row: dict[Hashable, tuple[Tensor, _Place]] = {}  # int [R, ...]
        self._later: dict[Hashable, tuple[Later, _Place]] = {}
        self._ended: dict[int, Tensor] = {}  # id of an index of rows -> its part of `ended`
        self._alive: list[Any] = []  # keeps objects whose ids are in names alive

    def add(
        self, place: Any, noted: Sequence[Noted], call: LayerCall, dense: Selection | None, *, masked: bool = True
    ) -> None:
        """Count the reads of one layer that the host has not counted.

        dense: the selection of exact attention; None for an observer. masked: whether `ended` is of the call's rows.
        """
        counted = (one for one in noted if not isinstance(one.read.counted, int))
        terms = [term for one in counted for term in self._terms(one, masked)]
        if dense is not None:
            where = self._place(call.rows, call.kv, call.index, masked)
            slot = call.kv.k.shape[3] * call.kv.k.element_size() * (1 if call.kv.values_in_keys else 2)
            terms += self._slots(call.rows, call.kv, where, dense, {DENSE: slot})
            terms.append(Term(ROWS, self._rows(where), 1))
        self.layers.append((place, tuple(terms)))

    def columns(self, coefficients: dict[Hashable, Tensor]) -> tuple[tuple[Any, ...], Tensor]:
        """(places, int64 [L, 6]) of all layers. coefficients: a cache that the caller keeps between passes."""
        self._count_visible()
        self._count_per_row()
        self._count_later()
        number = {name: n for n, name in enumerate(dict.fromkeys(t.name for _, terms in self.layers for t in terms))}
        factors: dict[tuple[int, int, int], int] = {}
        for layer, (_, terms) in enumerate(self.layers):
            for term in terms:
                at = (layer, term.column, number[term.name])
                factors[at] = factors.get(at, 0) + term.factor
        counts = [self._counts[name] for name in number]
        counted = torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64)
        key = (len(self.layers), len(counts), counted.device, tuple(factors.items()))
        if key not in coefficients:
            matrix = torch.zeros(len(self.layers), len(COLUMNS), len(counts), dtype=torch.int64)
            for at, factor in factors.items():
                matrix[at] = factor
            coefficients[key] = matrix.to(counted.device)
        return tuple(place for place, _ in self.layers), (coefficients[key] * counted).sum(-1)

    def _terms(self, noted: Noted, masked: bool) -> list[Term]:
        read, where = noted.read, self._place(noted.rows, noted.kv, noted.part, masked)
        terms: list[Term] = []
        if isinstance(read.other, Later):
            terms.append(Term(METADATA, self._compute_later(read.other, where), 1))
        elif isinstance(read.other, Tensor):
            terms.append(Term(METADATA, self._sum_later(read.other, where), 1))
        elif read.other:
            terms.append(Term(METADATA, self._share(where, read.other), 1))
        if read.overflowed is not None:
            terms.append(Term(OVERFLOWED, self._sum_later(read.overflowed, where), 1))
        factors = {KEYS: read.key_bytes, VALUES: read.value_bytes, METADATA: read.metadata_bytes}
        factors = {column: factor for column, factor in factors.items() if factor}
        if read.selection is None:
            return terms
        if isinstance(read.counted, Tensor):
            return terms + [Term(column, self._sum_later(read.counted, where), n) for column, n in factors.items()]
        return terms + self._slots(noted.rows, noted.kv, where, read.selection, factors)

    def _slots(
        self, rows: Rows, kv: KVView, where: _Place, selection: Selection, factors: dict[int, int]
    ) -> list[Term]:
        """Terms of the slots that all rows read in all KV heads, and for lists of their entries and overflows."""
        if isinstance(selection, TileLists):  # a tile's list ends before its own keys begin
            own = self._slots(rows, kv, where, selection.own, factors)
            return [*self._listed(rows, kv, where, selection.lists, factors), *own]
        if isinstance(selection, (Lists, PackedLists)):
            return self._listed(rows, kv, where, selection, factors)
        known = (where.name, id(selection), *factors.items())
        if known not in self._spans:
            name = ("slots", where.name, self._spans_name(selection))
            if name not in self._counts:
                self._counts[name] = self._total(selection.keys_read(rows, kv), where)
            self._spans[known] = [Term(column, name, factor) for column, factor in factors.items()]
        return self._spans[known]

    def _listed(self, rows: Rows, kv: KVView, where: _Place, lists: ListsInUse, factors: dict[int, int]) -> list[Term]:
        if lists.all_visible:
            slots, used, over = self._defer(lists, where)
        else:  # some listed slots may be invisible to a row, so each entry is read now
            slots, used, over = ((kind, len(self._counts)) for kind in ("listed", "entries", "over"))
            self._counts[slots] = self._total(lists.keys_read(rows, kv), where)
            self._counts[used] = self._total(entries_used(lists, kv), where)
            self._counts[over] = self._overflows(lists, where)
        entry = lists.index.element_size() + (0 if lists.log_weight is None else lists.log_weight.element_size())
        terms = [Term(column, slots, factor) for column, factor in factors.items()]
        return [*terms, Term(METADATA, used, entry), Term(OVERFLOWED, over, 1)]

    def _overflows(self, lists: ListsInUse, where: _Place) -> Tensor:
        if isinstance(lists, PackedLists):
            return torch.zeros((), dtype=torch.int64, device=lists.offsets.device)
        over = lists.overflowed.long()
        return self._total(over, where) if lists.row_to_list is None else over.sum()

    def _defer(self, lists: ListsInUse, where: _Place) -> tuple[Hashable, Hashable, Hashable]:
        """Names of the counts of slots, entries and overflows. They are computed at the end of the pass."""
        count, capacity = _counts(lists)
        lengths = lists.offsets if isinstance(lists, PackedLists) else lists.count
        cut = lists.block > 1 and not (isinstance(lists, Lists) and lists.complete)
        name = ("lists", where.name, capacity, lists.block, cut, id(lengths), id(lists.row_to_list))
        self._visible.setdefault(name, _Visible(count, capacity, lists.block, cut, lists.row_to_list, where))
        self._maps.setdefault(name, {})[id(lists.head_map)] = lists.head_map
        self._alive.append((lengths, lists.row_to_list, lists.head_map))
        return ("listed", name, id(lists.head_map)), ("entries", name, id(lists.head_map)), ("over", name)

    def _count_visible(self) -> None:
        """Count visible lists; those of equal shapes together."""
        groups: dict[Hashable, list[Hashable]] = {}
        for name, one in self._visible.items():
            groups.setdefault(one.batch_key, []).append(name)
        for names in groups.values():
            first = self._visible[names[0]]
            where, of = first.place, None if first.row_to_list is None else first.row_to_list.long()
            counts = torch.stack([self._visible[name].in_use for name in names]).long()  # [n, L, heads]
            over = None if first.capacity is None else counts > first.capacity
            used, overflowed = counts, None
            if over is not None:
                used = counts.masked_fill(over, 0)
                overflowed = (self._masked(over, where, 1) if of is None else over).sum((1, 2))
            if of is not None:
                used, over = used[:, of], None if over is None else over[:, of]
            slots = used if first.block == 1 else used * first.block
            if first.cut:
                past = first.block - 1 - where.pos.long() % first.block
                slots = (slots - past[:, None]).clamp(min=0)
            if over is not None:
                slots = torch.where(over, where.seen[:, None], slots)
            both = self._masked(torch.stack([slots, used]), where, 2).sum(2)  # [2, n, heads]
            overflows = both.new_zeros(len(names)) if overflowed is None else overflowed
            for n, name in enumerate(names):
                self._counts["over", name] = overflows[n]
            self._map_heads(names, both, where.heads)

    def _map_heads(self, names: list[Hashable], both: Tensor, heads: int) -> None:
        """Sum over the KV heads, which use one list each. both: slots and entries, int64 [2, n, heads of the lists]."""
        single = both.shape[2] == 1
        plain = both[:, :, 0] * heads if single else both.sum(2)  # [2, n]
        mapped: list[tuple[int, Hashable, int, Tensor]] = []
        for n, name in enumerate(names):
            for key, head_map in self._maps[name].items():
                if head_map is None or single:
                    self._counts["listed", name, key], self._counts["entries", name, key] = plain[0, n], plain[1, n]
                else:
                    mapped.append((n, name, key, head_map))
        if mapped:
            maps = torch.stack([head_map for *_, head_map in mapped]).long()  # [m, G]
            picked = torch.stack([both[:, n] for n, *_ in mapped], 1)  # [2, m, heads]
            sums = picked.gather(2, maps.expand(2, -1, -1)).sum(2)
            for m, (_, name, key, _) in enumerate(mapped):
                self._counts["listed", name, key], self._counts["entries", name, key] = sums[0, m], sums[1, m]

    def _sum_later(self, given: Tensor, where: _Place) -> Hashable:
        """The name of the sum of int [R, ...] over the rows; sums of equal shapes are computed together at the end."""
        if given.is_floating_point() or given.dtype == torch.bool:
            raise TypeError(f"bytes and slots of rows: expected int [R, ...], got {given.dtype}")
        name = ("given", id(given), where.name)
        self._per_row[name] = (given, where)
        return name

    def _compute_later(self, later: Later, where: _Place) -> Hashable:
        """The name of the sum over the rows of what is computed at the end."""
        name = ("later", id(later.numbers[0]), where.name)
        self._later[name] = (later, where)
        return name

    def _count_later(self) -> None:
        """Compute what was deferred; of equal functions and shapes together."""
        groups: dict[Hashable, list[Hashable]] = {}
        for name, (later, where) in self._later.items():
            alike = (*((x.shape, x.dtype) for x in later.numbers), *(id(x) for x in later.shared))
            groups.setdefault((later.of, alike, where.name), []).append(name)
        for names in groups.values():
            (first, _, shared), where = self._later[names[0]]
            numbers = zip(*(self._later[name][0].numbers for name in names), strict=True)
            rows = first(*(torch.stack(each) for each in numbers), *shared)
            sums = self._masked(rows[..., None], where, 1).sum((1, 2), dtype=torch.int64)
            for n, name in enumerate(names):
                self._counts[name] = sums[n]

    def _count_per_row(self) -> None:
        groups: dict[Hashable, list[Hashable]] = {}
        for name, (given, where) in self._per_row.items():
            groups.setdefault((given.shape, given.dtype, id(where.ended)), []).append(name)
        for names in groups.values():
            given = torch.stack([self._per_row[name][0] for name in names])
            sums = self._masked(given, self._per_row[names[0]][1], 1).flatten(1).sum(1, dtype=torch.int64)
            for n, name in enumerate(names):
                self._counts[name] = sums[n]

    def _share(self, where: _Place, amount: int) -> Hashable:
        """The name of the counted rows' share of an amount. amount: of all rows together."""
        name, rows = ("share", amount, where.name), where.pos.shape[0]
        if name not in self._counts:
            # filled on the device, as copying a number to it would be a sync
            whole = torch.full((), amount, dtype=torch.int64, device=where.pos.device)
            if where.ended is not None:
                whole = whole * self._counts[self._rows(where)] // max(1, rows)
            self._counts[name] = whole
        return name

    def _rows(self, where: _Place) -> Hashable:
        """The name of the number of rows that are counted."""
        name = ("rows", where.name)
        if name not in self._counts:
            count = torch.full((), where.pos.shape[0], dtype=torch.int64, device=where.pos.device)
            if where.ended is not None:
                count = count - where.ended.sum()
            self._counts[name] = count
        return name

    def _place(self, rows: Rows, kv: KVView, index: Tensor | None, masked: bool) -> _Place:
        parts = (id(rows.seq), id(rows.pos), id(kv.seq_lens), id(kv.block_table), id(index))
        name = (*parts, kv.k.shape[1], rows.q.shape[1], masked)
        if name not in self._places:
            if index is not None:
                self._alive.append(index)
            ended = self._ended_at(index) if masked else None
            self._places[name] = _Place(rows.seq, rows.pos, kv.seq_lens, kv.block_table, kv.heads, ended, name)
        return self._places[name]

    def _ended_at(self, index: Tensor | None) -> Tensor | None:
        """`ended` of the rows that `index` names; without an index, of all rows. Computed once for an index."""
        if index is None:
            return self.ended
        if self.ended is None:
            return None
        if id(index) not in self._ended:
            self._ended[id(index)] = self.ended[index]
        return self._ended[id(index)]

    def _spans_name(self, selection: Selection) -> Hashable:
        self._alive.append(selection)
        bounds = [bound.value for span in selection.spans for bound in span] if isinstance(selection, Spans) else [None]
        if isinstance(selection, Spans) and all(isinstance(value, int) for value in bounds):
            return (selection.spans, selection.per)
        return id(selection)

    def _total(self, per_row: Tensor, where: _Place) -> Tensor:
        """int64 []: the sum of [R, ...] over the rows that are counted."""
        return self._masked(per_row, where, 0).sum(dtype=torch.int64)

    def _masked(self, x: Tensor, where: _Place, axis: int) -> Tensor:
        """x with zeros for the rows, along `axis`, that are not counted."""
        if where.ended is None:
            return x
        return _without(x, where.ended, axis)


def host_bytes(noted: Sequence[Noted]) -> tuple[int, int, int]:
    """Bytes of keys, values and metadata of the reads that the host has counted."""
    keys = values = metadata = 0
    for one in noted:
        read, count = one.read, one.read.counted
        if isinstance(count, int):
            keys, values = keys + count * read.key_bytes, values + count * read.value_bytes
            metadata += count * read.metadata_bytes
    return keys, values, metadata


def entries_used(lists: ListsInUse, kv: KVView) -> Tensor:
    """int64 [R, G]: entries of lists that one pass reads for each row and KV head."""
    count, capacity = _counts(lists)
    used = count.long() if capacity is None else count.long().masked_fill(count > capacity, 0)
    used = used if lists.row_to_list is None else used[lists.row_to_list.long()]
    if used.shape[1] == 1:
        return used.expand(-1, kv.heads)  # all KV heads read the same list
    return used if lists.head_map is None else used[:, lists.head_map.long()]


def _counts(lists: ListsInUse) -> tuple[Tensor, int | None]:
    """Entries in use, int [L, heads], and the capacity of a list; None if lists cannot overflow."""
    if isinstance(lists, PackedLists):
        return lists.offsets.diff().unflatten(0, (-1, lists.heads)), None
    return lists.count, lists.index.shape[2]


def _without(x: Tensor, ended: Tensor, axis: int) -> Tensor:
    return x.masked_fill(ended.view(*(1,) * axis, -1, *(1,) * (x.dim() - axis - 1)), 0)
