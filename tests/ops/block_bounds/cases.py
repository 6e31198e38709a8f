"""Random keys with bounds beside them, and the fp64 oracle of block_bounds in plain loops."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops import KVView, Rows
from longreach.testing.inputs import random_kv, random_rows


@dataclass(frozen=True)
class Case:
    rows: Rows
    kv: KVView
    low: Tensor
    high: Tensor
    per: int
    slot: Tensor | None


def make_case(seed: int, *, half: torch.dtype = torch.float16) -> Case:
    """Any layout the ops promise to take, small; bounds hold NaN until they are computed."""
    dice = random.Random(seed)
    kv = random_kv(
        [dice.choice((0, 1, 2, 7, 16, 17, 31, 40, 65)) for _ in range(dice.choice((1, 2, 3)))],
        heads=dice.choice((1, 2, 3)), dim=dice.choice((8, 16, 24, 40, 64)), page=dice.choice((None, 1, 3, 16, 64)),
        memory=dice.choice(("plain", "packed", "tokens")), evicted=dice.random() < 0.3,
        dtype=dice.choice((half, torch.float32)), ints=dice.choice((torch.int32, torch.int64)), seed=seed,
    )  # fmt: skip
    rows = random_rows(kv, dice.choice((0, 1, 2, 5)), group=dice.choice((1, 2, 3, 4, 7, 16)), seed=seed)
    per = dice.choice((1, 2, 5, 16, 50, 1000))
    # a row's slot: one of its sequence's, some past the last one, some before the first
    slot = (torch.rand(rows.pos.shape) * (kv.seq_lens[rows.seq.long()] + 3)).long() - 1
    plain = kv.slot_pos is None and dice.random() < 0.5
    if plain:
        slot = rows.pos.long()
    low, high = empty_bounds(kv, per, wide=dice.random() < 0.5)
    return Case(rows, kv, low, high, per, None if plain else slot.to(kv.seq_lens.dtype))


def empty_bounds(kv: KVView, per: int, *, wide: bool = False) -> tuple[Tensor, Tensor]:
    """Low and high as NaN; wide: slices of a larger tensor that has more units than needed."""
    pages, heads, page, dim = kv.k.shape
    units = -(-page // per) + 2 * wide
    both = torch.full((pages, heads, units, 2 * dim), torch.nan, dtype=kv.k.dtype)
    if wide:
        return both[..., :dim], both[..., dim:]
    return both[..., :dim].contiguous(), both[..., dim:].contiguous()


def place_of(kv: KVView, seq: int, slot: int) -> tuple[int, int]:
    page = slot // kv.page
    return (seq if kv.block_table is None else int(kv.block_table[seq, page])), slot % kv.page


def unit_of(kv: KVView, seq: int, block: int, per: int) -> tuple[int, int]:
    """Page of memory and unit of a block, by counting the blocks that start in its page before it."""
    first = block * per
    page = first // kv.page
    before = sum(1 for b in range(block) if b * per // kv.page == page)
    return place_of(kv, seq, first)[0], before


def exact_bounds(kv: KVView, seq: int, block: int, per: int) -> tuple[Tensor, Tensor] | None:
    """[G, D] each, or None for a block without a filled slot."""
    slots = range(max(0, block * per), min(int(kv.seq_lens[seq]), block * per + per))
    if block < 0 or not slots:
        return None
    k = torch.stack([kv.k[page, :, offset] for page, offset in (place_of(kv, seq, n) for n in slots)])
    return k.amin(0), k.amax(0)


def newest_of(case: Case) -> list[int]:
    """Each row's newest block, -1 for none."""
    slots = case.rows.pos if case.slot is None else case.slot
    found = []
    for seq, slot in zip(case.rows.seq.tolist(), slots.tolist(), strict=True):
        last = min(slot, int(case.kv.seq_lens[seq]) - 1)
        found.append(last // case.per if last >= 0 else -1)
    return found


def bounded(case: Case, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Copies of the case's bounds in which these blocks (sequence, block) are bounded."""
    low, high = case.low.clone(), case.high.clone()
    for seq, block in pairs:
        found = exact_bounds(case.kv, seq, block, case.per)
        if found is not None:
            page, unit = unit_of(case.kv, seq, block, case.per)
            low[page, :, unit], high[page, :, unit] = found
    return low, high


def all_blocks(case: Case) -> list[tuple[int, int]]:
    kv = case.kv
    return [(b, n) for b in range(kv.sequences) for n in range(-(-int(kv.seq_lens[b]) // case.per))]


def exact_scores(case: Case) -> tuple[Tensor, Tensor]:
    """(scores, error bound) fp64 [R, G, blocks], NaN from a row's newest block on.

    Bound: fp32 sums over the group and over channels of the two products, each term rounded once.
    """
    kv, rows = case.kv, case.rows
    group = kv.group(rows)
    blocks = -(-kv.capacity // case.per)
    scores = torch.full((rows.q.shape[0], kv.heads, blocks), torch.nan, dtype=torch.float64)
    error = scores.clone()
    for r, newest in enumerate(newest_of(case)):
        for block in range(max(0, newest)):
            found = exact_bounds(kv, int(rows.seq[r]), block, case.per)
            assert found is not None
            for g in range(kv.heads):
                low, high = (x[g].double() for x in found)
                q = rows.q[r, g * group : (g + 1) * group].double()
                terms = torch.where(q > 0, q * high, q * low)
                scores[r, g, block] = terms.sum()
                size = (q.abs() * torch.maximum(low.abs(), high.abs())).sum()
                error[r, g, block] = (2 * q.shape[1] + group + 2) * 2**-24 * size + 1e-30
    return scores, error
