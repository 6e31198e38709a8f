"""Tables of random keys, and who computes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longreach.ops import KVView, Rows
from longreach.ops.simhash import HashTables, build, codes, projections, sealing
from longreach.testing.inputs import random_kv, random_rows

NUMBA = pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs Numba"))
IMPLS = ["reference", NUMBA]


class Case(NamedTuple):
    """Rows over a view whose keys [first, seq_lens) are in tables; keys: their codes [B, N, G, tables]."""

    rows: Rows
    kv: KVView
    centre: Tensor
    tables: HashTables
    queries: Tensor
    keys: Tensor


def cut(keys: Tensor, begin: Tensor, count: Tensor) -> Tensor:
    """Codes of `count` keys of each sequence from `begin` on, padded: uint16 [B, T, G, tables]."""
    at = torch.arange(int(count.max()) if count.numel() else 0)
    at = (begin[:, None] + at).clamp(max=keys.shape[1] - 1)
    some = keys.view(torch.int16).gather(1, at[:, :, None, None].expand(-1, -1, *keys.shape[2:]))
    return some.view(torch.uint16)


def hashed(
    lengths: list[int],
    *,
    dim: int = 16,
    heads: int = 2,
    group: int = 2,
    count: int = 3,
    bits: int = 4,
    number: int = 9,
    size: int = 16,
    first: int = 3,
    page: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    impl: str = "reference",
) -> Case:
    kv = random_kv(lengths, heads=heads, dim=dim, page=page, dtype=dtype, seed=seed)
    rows = random_rows(kv, count, group=group, seed=seed)
    centre = torch.randn(len(lengths), heads, dim, generator=torch.Generator().manual_seed(seed))
    return tabled(rows, kv, centre, bits=bits, number=number, size=size, first=first, seed=seed, impl=impl)


def tabled(
    rows: Rows, kv: KVView, centre: Tensor, *, bits: int = 4, number: int = 9, size: int = 16, first: int = 3,
    seed: int = 0, impl: str = "reference",
) -> Case:  # fmt: skip
    """Tables of all keys of a view from `first` on."""
    lengths = kv.seq_lens.tolist()
    slot = torch.arange(max(lengths)).expand(len(lengths), -1)
    seq = torch.arange(len(lengths))[:, None].expand_as(slot)
    there = torch.where(slot < kv.seq_lens[:, None], slot, 0)
    places = kv.locate(seq, there)
    drawn = projections(kv.k.shape[3], bits, number, seed)
    keys = codes(kv.k[places[0], :, places[1]], drawn, centre=centre[:, None])
    tables = HashTables.empty(
        len(lengths), kv.heads, max(lengths) + 5, bits=bits, tables=number, size=size, first=first
    )
    begin = torch.full((len(lengths),), first)
    end = (kv.seq_lens - begin).clamp(min=0)
    build(tables, cut(keys, begin, end), seq[:, 0], end, impl=impl)
    assert tables.inverse_norms is not None
    for b, length in enumerate(lengths):
        tables.inverse_norms[b, :, :length] = sealing._inverse_norms(kv, b, range(length), centre[b])
    return Case(rows, kv, centre, tables, codes(rows.q, drawn, impl="reference"), keys)


def scattered(case: Case) -> tuple[Tensor, HashTables, Tensor]:
    """(slots, tables, centre) of a case in memory of more sequences, in another order. The others have no keys."""
    count, old = len(case.kv.seq_lens), case.tables
    slots = torch.arange(count).roll(1) + 2  # no sequence keeps its number
    source = torch.zeros(count + 3, dtype=torch.int64)
    source[slots] = torch.arange(count)
    ids, offsets = (x.view(torch.int16)[source].view(x.dtype) for x in (old.ids, old.offsets))
    stop = torch.full((count + 3,), old.first, dtype=torch.int32)
    stop[slots] = old.stop
    centre = torch.randn(count + 3, *case.centre.shape[1:], generator=torch.Generator().manual_seed(1))
    centre[slots] = case.centre
    assert old.inverse_norms is not None
    return slots, HashTables(ids, offsets, stop, old.size, old.first, old.inverse_norms[source]), centre
