"""attend_sampled over keys and values in host memory: the GPU samples keys, and the CPU weighs and attends to them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.ops.numba_host_inputs import FLOAT, kind_of, run_program, send_lists, span_of
from longreach.ops.simhash.api import codes, collide
from longreach.ops.simhash.attention import NUMBERS, look_up_bytes
from longreach.ops.simhash.numba import law
from longreach.ops.simhash.numba_host_kernels import JOB, program_for, work_bytes
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import KVView, Partial, Rows

PIECES = 4  # of the lists together, for each thread
LEAST = 512  # keys of a piece that are worth a thread


def attend_sampled(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, limit: Tensor, *,
    least: int, own: bool, sinks: int, floor: float, scale: float, softcap: float | None,
) -> tuple[Partial, None, Tensor]:  # fmt: skip
    calls = kv.calls
    assert calls is not None
    count, heads, dim = rows.q.shape
    group, lists = kv.group(rows), kv.group(rows) if own else 1
    device = rows.q.device
    out, lse = torch.empty(count, heads, dim, device=device), torch.empty(count, heads, device=device)
    numbers = torch.empty(count, kv.heads, len(NUMBERS), dtype=torch.int64, device=device)
    if not count:
        return Partial(out, lse), None, numbers
    by_slot = Rows(rows.q, slots[rows.seq.long()], rows.pos)
    room = tables.ids.shape[3]
    found = collide(
        by_slot, tables, codes(rows.q, projections), capacity=room, least=least, share="own" if own else "group"
    )  # fmt: skip
    small = [
        ("q", rows.q), ("seq", rows.seq.long()), ("pos", rows.pos.long()), ("in_use", kv.seq_lens.long()),
        ("held", slots.long()), ("limit", limit.long()), ("ends", tables.stop), ("centre", centre),
        ("looked_up", found.looked_up),
    ]  # fmt: skip
    if kv.block_table is not None:
        small.append(("table", kv.block_table.long()))
    fields: dict[str, Any] = span_of(kv) | dict(zip((name for name, _ in small), calls.send(*small), strict=True))
    fields |= send_lists(calls, found.index, found.met, "met", found.count)
    workers, items, width = torch.get_num_threads(), count * kv.heads * lists, group // lists
    parts = max(1, min(-(-PIECES * workers // items), -(-room // LEAST))) if workers > 1 else 1
    to = (
        calls.buffer("out", out.shape, FLOAT), calls.buffer("lse", lse.shape, FLOAT),
        calls.buffer("numbers", numbers.shape, torch.int64),
    )  # fmt: skip
    whole, constants = _law(tables.bits, tables.tables, least, floor)
    fields |= {
        "out": to[0].data_ptr(), "lse": to[1].data_ptr(), "numbers": to[2].data_ptr(), "rows": count, "heads": kv.heads,
        "lists": lists, "group": group, "dim": dim, "held_sequences": len(tables.stop), "room": room, "sinks": sinks,
        "parts": parts, "edges": look_up_bytes(group, tables), "lowest": tables.first, "size": tables.size,
        "work": calls.scratch("simhash", work_bytes(items, width, dim, parts)),
        "scale": scale, "softcap": softcap or 0.0, "law": whole, "constants": constants,
    }  # fmt: skip
    run_program(calls, program_for(kind_of(kv.k.dtype)), workers, JOB, fields)
    calls.copy(list(zip(to, (out, lse, numbers), strict=True)))
    return Partial(out, lse), None, numbers


def _law(bits: int, tables: int, least: int, floor: float) -> tuple[int, int]:
    """The addresses of the constants of u, which live as long as the process."""
    arrays = _constants(bits, tables, least, floor)
    whole, parts = (int(x.ctypes.data) for x in arrays)
    return whole, parts


@cache
def _constants(bits: int, tables: int, least: int, floor: float) -> tuple[np.ndarray, np.ndarray]:
    _, _, _, split, scale, coefficients, binomials, low = law(bits, tables, least, floor)
    sizes = [len(x) for x in (coefficients, binomials)]  # type: ignore[arg-type]
    parts = np.concatenate([np.array([split, scale, low], np.float32), coefficients, binomials])  # type: ignore[list-item]
    return np.array([bits, tables, least, *sizes], np.int64), parts.astype(np.float32)
