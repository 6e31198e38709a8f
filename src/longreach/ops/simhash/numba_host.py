"""attend_sampled over keys and values in host memory: the GPU samples keys, and the CPU weighs and attends to them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.ops.numba_host_inputs import kind_of, run_program, send_entries
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
        ("held", slots.long()), ("limit", limit.long()), ("ends", tables.stop), ("centre", centre), ("counts", counts),
    ]  # fmt: skip
    whole, constants = _law(tables.bits, tables.tables, least, floor)
    fields: dict[str, Any] = {
        "found": send_entries(calls, "found", found, counts[..., HEADS].contiguous(), torch.int32), "heads": kv.heads,
        "group": group, "held_sequences": len(tables.stop), "part": part, "sinks": sinks, "parts": parts,
        "edges": look_up_bytes(group, tables), "lowest": tables.first, "size": tables.size, "own": own,
        "work": calls.scratch("simhash", work_bytes(count * kv.heads, group, dim, parts)), "scale": scale,
        "softcap": softcap or 0.0, "law": whole, "constants": constants,
    }  # fmt: skip
    results = {"out": out, "lse": lse, "numbers": numbers}
    run_program(program_for(kind_of(kv.k.dtype)), JOB, torch.get_num_threads(), rows, kv, small, fields, results)
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
