"""attend_sampled on a CPU, compiled by Numba: one call for the whole step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.checks import limits
from longreach.ops.numba_inputs import floats, integers, memory_of, refuse
from longreach.ops.numba_math import flat, in_turns
from longreach.ops.simhash import numba_attention_kernels as kernels
from longreach.ops.simhash.attention import NUMBERS, look_up_bytes
from longreach.ops.simhash.numba import law
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import KVView, Partial, Rows


def attend_sampled(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, limit: Tensor, *,
    least: int, own: bool, sinks: int, floor: float, scale: float, softcap: float | None,
) -> tuple[Partial, tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
    refuse("attend_sampled", rows, kv)
    count, heads, dim = rows.q.shape
    lists = heads if own else kv.heads
    out, lse = torch.empty(count, heads, dim), torch.empty(count, heads)
    capacity = max(1, limits(limit)[1]) if count else 1
    index = torch.empty(count, lists, capacity, dtype=torch.int32)
    weight, counts = torch.empty(index.shape), torch.empty(count, lists, dtype=torch.int32)
    numbers = torch.empty(count, kv.heads, len(NUMBERS), dtype=torch.int64)
    in_turns(
        min(torch.get_num_threads(), max(1, count * kv.heads)), kernels.attend, flat(rows.q.contiguous()),
        (*memory_of(kv), floats(centre), integers(kv.seq_lens)),
        (flat(tables.ids), tables.ids.stride()[:3], flat(tables.offsets), tables.offsets.stride()[:4], tables.size,
         tables.first, tables.stop.numpy()),
        (flat(projections), projections.stride()[:2], tables.bits, tables.tables),
        (integers(rows.seq), integers(rows.pos), integers(slots), integers(limit)),
        (kv.heads, own, sinks, least, np.float32(scale), float(softcap or 0.0),
         look_up_bytes(heads // kv.heads, tables)),
        law(tables.bits, tables.tables, least, floor), 
        (out.numpy(), lse.numpy(), index.numpy(), weight.numpy(), counts.numpy(), numbers.numpy()),
    )  # fmt: skip
    return Partial(out, lse), (index, counts, weight), numbers
