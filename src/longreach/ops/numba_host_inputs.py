"""Inputs and results of programs of several ops: addresses, sizes and strides of rows, views and lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops import numba_host
from longreach.ops.host_calls import HostCalls
from longreach.ops.numba_fit import NO_GRADIENT, wants_gradient
from longreach.ops.types import KVView, Rows

FLOAT = torch.float32
KINDS = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}


def kind_of(dtype: torch.dtype) -> type:
    """The numbers of a dtype as Numba kernels load them. Raises Unsupported."""
    if dtype not in KINDS:
        raise Unsupported(f"attention on the CPU computes in fp32 from bf16, fp16 or fp32, got {dtype}")
    return KINDS[dtype]


def span_of(kv: KVView) -> dict[str, int]:
    """Fields of a job on where keys and values lie. Their memory must be the host's."""
    k, v = kv.k, kv.v
    if kv.slot_pos is not None:
        raise Unsupported("attention on the CPU takes slots in the order of their positions; leave slot_pos out")
    sizes = [1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) for x in (k, v)]
    fields = {"k": k.data_ptr(), "v": v.data_ptr(), "page": kv.page, "sequences": kv.sequences}
    fields |= dict(zip(("k_size", "v_size"), sizes, strict=True))
    fields |= {f"k{i}": k.stride(i) for i in range(3)} | {f"v{i}": v.stride(i) for i in range(3)}
    table = kv.block_table
    return fields if table is None else {**fields, "paged": 1, "pages": table.shape[1]}


def send_lists(calls: HostCalls, index: Tensor, weight: Tensor | None, count: Tensor) -> dict[str, int]:
    """Copy the entries in use of lists [L, lists, C], and their weights, to host memory; fields of a job: addresses."""
    count = count.int().contiguous()
    found = {"count": calls.send(("count", count))[0], "index": send_entries(calls, "index", index, count, torch.int32)}
    return found if weight is None else {**found, "weight": send_entries(calls, "weight", weight, count, FLOAT)}


def send_entries(calls: HostCalls, name: str, lists: Tensor, count: Tensor, dtype: torch.dtype) -> int:
    """Copy the entries in use of lists [..., C] to host memory, count int32 [...]; the address."""
    to = calls.buffer(name, lists.shape, dtype)
    if calls.device.type == "cuda":
        import_module("longreach.ops.triton_copies").copy_lists(lists.contiguous(), to, count)
    else:
        to.copy_(lists)
    return to.data_ptr()


def refuse_gradients(op: str, *given: Any) -> None:
    """Raise Unsupported if an argument requires a gradient."""
    if wants_gradient(*given):
        raise Unsupported(f"{op} on the CPU for a GPU: {NO_GRADIENT}")


def run_program(
    program: Callable[..., None], kind: np.dtype, workers: int, rows: Rows, kv: KVView,
    small: Sequence[tuple[str, Tensor]], fields: dict[str, Any], results: dict[str, Tensor],
) -> None:  # fmt: skip
    """Call a program in the stream's order: inputs go to host memory, the CPU computes, and results come back.

    kind: of its job. small: tensors to be sent by field, in addition to those of the rows and the view. fields: the
    job's numbers and other addresses that are not 0. results, written: by field.
    """
    calls = kv.calls
    assert calls is not None
    sent = [("q", rows.q), ("seq", rows.seq.long()), ("pos", rows.pos.long()), ("in_use", kv.seq_lens.long()), *small]
    if kv.block_table is not None:
        sent.append(("table", kv.block_table.long()))
    view = span_of(kv)
    inputs = dict(zip((name for name, _ in sent), calls.send(*sent), strict=True))
    to = {name: calls.buffer(name, x.shape, x.dtype) for name, x in results.items()}
    outputs = {name: x.data_ptr() for name, x in to.items()}
    job = np.zeros(1, kind)
    shape = {"rows": len(rows.pos), "dim": rows.q.shape[2]}
    head = {"program": numba_host.program(program), "status": calls.status, "workers": workers}
    for name, value in {**fields, **view, **inputs, **outputs, **shape, **head}.items():
        job[name] = value
    job["pool"] = numba_host.pool(workers)
    calls.call(numba_host.address(), job)
    calls.copy([(to[name], x) for name, x in results.items()])
