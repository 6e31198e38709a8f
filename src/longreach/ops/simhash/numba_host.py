"""attend_sampled over keys and values in host memory: the GPU samples keys, and the CPU weighs and attends to them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.ops.numba_host_inputs import FLOAT, kind_of, run_program, send_entries, span_of
from longreach.ops.simhash.attention import HEADS, NUMBERS, look_up_bytes
from longreach.ops.simhash.numba import law
from longreach.ops.simhash.numba_host_kernels import JOB, program_for, work_bytes
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import KVView, Partial, Rows


def attend_sampled(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, limit: Tensor, *,
    least: int, own: bool, sinks: int, floor: float, scale: float, softcap: float | None,
) -> tuple[Partial, None, Tensor]:  # fmt: skip
    calls = kv.calls
    assert calls is not None
    count, heads, dim = rows.q.shape
    group, device = kv.group(rows), rows.q.device
    out, lse = torch.empty(count, heads, dim, device=device), torch.empty(count, heads, device=device)
    numbers = torch.empty(count, kv.heads, len(NUMBERS), dtype=torch.int64, device=device)
    if not count:
        return Partial(out, lse), None, numbers
    search = import_module("longreach.ops.simhash.triton_attention").search
    found, counts, part, parts = search(rows, kv, slots, tables, projections, least=least)
    small = [
        ("q", rows.q), ("seq", rows.seq.long()), ("pos", rows.pos.long()), ("in_use", kv.seq_lens.long()),
        ("held", slots.long()), ("limit", limit.long()), ("ends", tables.stop), ("centre", centre), ("counts", counts),
    ]  # fmt: skip
    if kv.block_table is not None:
        small.append(("table", kv.block_table.long()))
    fields: dict[str, Any] = span_of(kv) | dict(zip((name for name, _ in small), calls.send(*small), strict=True))
    fields["found"] = send_entries(calls, "found", found, counts[..., HEADS].contiguous(), torch.int32)
    to = (
        calls.buffer("out", out.shape, FLOAT), calls.buffer("lse", lse.shape, FLOAT),
        calls.buffer("numbers", numbers.shape, torch.int64),
    )  # fmt: skip
    whole, constants = _law(tables.bits, tables.tables, least, floor)
    fields |= {
        "out": to[0].data_ptr(), "lse": to[1].data_ptr(), "numbers": to[2].data_ptr(), "rows": count, "heads": kv.heads,
        "group": group, "dim": dim, "held_sequences": len(tables.stop), "part": part, "sinks": sinks, "parts": parts,
        "edges": look_up_bytes(group, tables), "lowest": tables.first, "size": tables.size, "own": own,
        "work": calls.scratch("simhash", work_bytes(count * kv.heads, group, dim, parts)), "scale": scale,
        "softcap": softcap or 0.0, "law": whole, "constants": constants,
    }  # fmt: skip
    workers = torch.get_num_threads()
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
