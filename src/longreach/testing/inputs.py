"""Random Rows and KVViews in every layout the ops promise to take; what is not filled is poison.

Memory no sequence has filled holds NaN, block table entries past `seq_lens` name no page, and positions of
unfilled slots are 0, so that reading any of them shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from longreach.ops import KVView, Rows

Memory = Literal["plain", "packed", "tokens"]
NOWHERE = torch.iinfo(torch.int32).max


def random_kv(
    lengths: Sequence[int],
    *,
    heads: int = 2,
    dim: int = 16,
    page: int | None = None,
    memory: Memory = "plain",
    evicted: bool = False,
    dtype: torch.dtype = torch.float32,
    ints: torch.dtype = torch.int64,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> KVView:
    """Sequences of `lengths` filled slots, normal keys and values.

    page: None for contiguous memory (3 slots larger than the longest sequence), else paged, the physical pages
        a random choice from a pool that is 3 pages larger than needed.
    memory: how k and v lie: "plain" [P, G, page, D], "packed" [P, G, page, 2D] holding both (as vLLM does),
        "tokens" [P, page, G, D] (as models make them).
    evicted: give slot_pos: each KV head keeps its own positions below twice the length, odd heads in no order.
    """
    draw = torch.Generator().manual_seed(seed)
    size = page or max(lengths, default=0) + 3
    need = [1 if page is None else -(-n // size) for n in lengths]
    total = len(lengths) if page is None else sum(need) + 3
    order = range(total) if page is None else torch.randperm(total, generator=draw).tolist()
    held = [order[sum(need[:b]) : sum(need[: b + 1])] for b in range(len(lengths))]
    k, v = _poisoned(memory, (total, heads, size, dim), dtype, device)
    slot_pos = torch.zeros(total, heads, size, dtype=ints, device=device) if evicted else None
    for pages, length in zip(held, lengths, strict=True):
        slot = torch.arange(length, device=device)
        at = (torch.tensor(pages, dtype=torch.int64, device=device)[slot // size], slice(None), slot % size)
        for x in (k, v):
            x[at] = torch.randn(length, heads, dim, generator=draw, dtype=torch.float64).to(device, dtype)
        if slot_pos is not None:
            slot_pos[at] = _kept(length, heads, draw).to(device, ints)
    width = max(need, default=0) + 1
    table = [[*pages, *[NOWHERE] * (width - len(pages))] for pages in held]
    return KVView(
        k,
        v,
        torch.tensor(list(lengths), dtype=ints, device=device),
        None if page is None else torch.tensor(table, dtype=ints, device=device).view(len(lengths), width),
        slot_pos,
    )


def random_rows(kv: KVView, count: int, *, group: int = 2, seed: int = 0) -> Rows:
    """`count` normal queries of random sequences at random positions, some past the last slot, in no order."""
    draw = torch.Generator().manual_seed(seed)
    ints, device = kv.seq_lens.dtype, kv.k.device
    q = torch.randn(count, group * kv.heads, kv.k.shape[3], generator=draw, dtype=torch.float64).to(kv.k.dtype)
    seq = torch.randint(0, max(1, kv.sequences), (count,), generator=draw)
    length = kv.seq_lens.cpu().long()[seq] * (1 if kv.slot_pos is None else 2)
    pos = (torch.rand(count, generator=draw) * (length + 2)).long()
    return Rows(q.to(device), seq.to(device, ints), pos.to(device, ints))


def poison(kv: KVView, seq: int, head: int, slots: Iterable[int]) -> None:
    """Overwrite keys and values of one KV head at `slots` with NaN, in place."""
    for slot in slots:
        page = seq if kv.block_table is None else int(kv.block_table[seq, slot // kv.page])
        kv.k[page, head, slot % kv.page] = torch.nan
        kv.v[page, head, slot % kv.page] = torch.nan


def _poisoned(
    memory: Memory, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    pages, heads, size, dim = shape

    def full(*sizes: int) -> Tensor:
        return torch.full(sizes, torch.nan, dtype=dtype, device=device)

    if memory == "packed":
        both = full(pages, heads, size, 2 * dim)
        return both[..., :dim], both[..., dim:]
    if memory == "tokens":
        return full(pages, size, heads, dim).transpose(1, 2), full(pages, size, heads, dim).transpose(1, 2)
    return full(*shape), full(*shape)


def _kept(length: int, heads: int, draw: torch.Generator) -> Tensor:
    """[length, heads]: the positions each KV head kept."""
    columns = []
    for head in range(heads):
        some = torch.randperm(2 * length, generator=draw)[:length]
        columns.append(some if head % 2 else some.sort().values)
    return torch.stack(columns, 1)
