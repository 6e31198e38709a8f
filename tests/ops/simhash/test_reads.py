"""The bytes that a layer's call counts, and who computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.ops import impl as impls
from longreach.ops import simhash
from longreach.ops.doors import op_named
from longreach.ops.simhash import collide, weigh
from tests.ops.simhash.cases import hashed


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize(("size", "first"), [(16, 3), (8, 20), (65536, 3)])
def test_look_ups_are_counted(share: Any, size: int, first: int) -> None:
    """Two offsets in each segment that holds keys, and the ids between them."""
    case = hashed([60, 2, 33], size=size, first=first)
    op = op_named("simhash_collide")
    assert op is simhash.COLLIDE and op.layer == ("rows",)
    found = collide(case.rows, case.tables, case.queries, share=share, capacity=60)
    (read,) = op.reads(case.rows, case.kv, found, case.tables, case.queries, share=share, capacity=60)
    for r, b in enumerate(case.rows.seq.tolist()):
        stop, ids = int(case.tables.stop[b]), 0
        segments = {n // size for n in range(first, stop)}
        for h in range(4):
            same = case.keys[b, first : max(stop, first), h // 2].long() == case.queries[r, h].long()
            ids += int(same.sum())
        offsets = 4 * 9 * len(segments) * 2
        assert isinstance(read.other, torch.Tensor)
        assert int(read.other[r]) == 2 * ids + offsets * (4 if size == 65536 else 2)
    assert read.selection is None


@pytest.mark.parametrize("share", ["own", "group"])
def test_weighed_keys_are_counted(share: Any) -> None:
    """Each key once in a KV head, none of lists that overflowed; and the centres."""
    case = hashed([60, 40], number=12)
    last = replace(case.rows, pos=case.kv.seq_lens[case.rows.seq] - 1)  # tables hold visible keys alone
    case = case._replace(rows=last)
    capacity = int(collide(case.rows, case.tables, case.queries, share=share, capacity=60).count.median())
    found = collide(case.rows, case.tables, case.queries, share=share, capacity=capacity)
    op = op_named("simhash_weigh")
    weights = weigh(case.rows, case.kv, case.tables, found, case.centre)
    keys, centres = op.reads(case.rows, case.kv, weights, case.tables, found, case.centre)
    assert (keys.key_bytes, keys.value_bytes) == (16 * 4, 0) and centres.other == 3 * 2 * 16 * 4
    assert keys.selection is not None
    read = keys.selection.keys_read(case.rows, case.kv)
    each = 2 if share == "own" else 1
    for r in range(3):
        for g in range(2):
            lists = range(g * each, (g + 1) * each)
            fits = [found.index[r, li, : found.count[r, li]] for li in lists if found.count[r, li] <= capacity]
            assert int(read[r, g]) == len(torch.cat([*fits, torch.zeros(0, dtype=torch.int32)]).unique())


def test_directions_are_counted() -> None:
    op, drawn = op_named("simhash_codes"), simhash.projections(16, 4, 9, 0)
    case = hashed([20])
    (read,) = op.reads(case.rows, case.kv, case.queries, case.rows.q, drawn)
    assert op.layer == () and read.other == 16 * 4 * 9 * 2


def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba where it is installed, else the reference; a GPU without kernels warns."""
    for op in (simhash.CODES, simhash.COLLIDE, simhash.WEIGH):
        for there in (True, False):
            monkeypatch.setattr(impls, "_installed", lambda package, there=there: there)
            assert op.implementations.choose("auto", torch.device("cpu")) == ("numba" if there else "reference")
