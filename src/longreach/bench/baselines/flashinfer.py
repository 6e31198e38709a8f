"""FlashInfer: paged decode on tensor cores, page sizes, both layouts, its own split and fixed ones; whole prompts."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from longreach.bench.baselines.splits import split_counts
from longreach.bench.case import Memory
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs
from longreach.errors import Unsupported

TITLE = "FlashInfer"
PAGES = (16, 64, 256)
LAYOUTS = {"heads": "HND", "tokens": "NHD"}
WORKSPACE = 512 << 20  # bytes, for the parts of split sequences


def load() -> dict[str, str]:
    try:
        return {"flashinfer": str(import_module("flashinfer").__version__)}
    except ImportError as error:
        raise Unsupported(
            f"baseline flashinfer cannot be loaded ({error}); pip install flashinfer-python==0.6.4, "
            f"or measure without it: --without flashinfer"
        ) from error


def candidates(inputs: Inputs) -> list[tuple[dict[str, Any], Any]]:
    shape = inputs.shape
    if inputs.case.prefill and shape.batch == 1 and shape.rows == shape.context and inputs.case.reads.kind == "dense":
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=inputs.device)
        return [({"backend": "fa3"}, partial(_prefill, inputs, "fa3", workspace))]
    if inputs.case.prefill or shape.rows > 1 or inputs.case.reads.kind != "dense":
        return []
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=inputs.device)
    found: list[tuple[dict[str, Any], Any]] = []
    for page in PAGES:
        parts = split_counts(inputs, shape.context // page)
        sizes = sorted({-(-shape.context // page // count) for count in parts})
        for order in ("heads", "tokens"):
            plans: list[dict[str, Any]] = [{"graph": True}, {"graph": False}]
            for plan in plans + [{"graph": False, "split": size} for size in sizes]:
                memory = Memory(page, order)  # type: ignore[arg-type]
                settings = {"page": page, "layout": LAYOUTS[order], **plan}
                found.append((settings, partial(_build, inputs, memory, settings, workspace)))
    return found


def _prefill(inputs: Inputs, backend: str, workspace: torch.Tensor) -> Competitor:
    """Causal attention of one whole prompt, tokens first, by the wrapper for ragged batches, planned in advance."""
    flashinfer: Any = import_module("flashinfer")
    shape, memory = inputs.shape, Memory(None, "tokens")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
    ends = torch.tensor([0, shape.context], dtype=torch.int32, device=inputs.device)
    wrapper.plan(
        ends, ends, shape.heads, shape.kv_heads, shape.dim, causal=True, sm_scale=inputs.scale,
        q_data_type=inputs.dtype,
    )  # fmt: skip

    def call(copy: int) -> Any:
        k, v = (x[0].transpose(0, 1) for x in inputs.kv(copy, memory))
        return partial(wrapper.run, inputs.q(copy, shape.rows), k, v)

    calls = [call(copy) for copy in range(inputs.copies)]
    return Competitor("", "flashinfer", memory, shape.rows, calls, lambda out: out, {"backend": backend})


def _build(inputs: Inputs, memory: Memory, settings: dict[str, Any], workspace: torch.Tensor) -> Competitor:
    """settings: graph: planned for a graph of any lengths or for these; split: pages of a part, else its own choice."""
    flashinfer: Any = import_module("flashinfer")
    shape, page = inputs.shape, settings["page"]
    table = inputs.table(page)
    pages = table.shape[1]
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=inputs.device) * pages
    last = torch.full((shape.batch,), page, dtype=torch.int32, device=inputs.device)
    buffers = {}
    if settings["graph"]:
        buffers = {"paged_kv_indptr_buffer": starts.clone(), "paged_kv_indices_buffer": table.flatten().clone(),
                   "paged_kv_last_page_len_buffer": last.clone()}  # fmt: skip
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, settings["layout"], use_cuda_graph=settings["graph"], use_tensor_cores=True, **buffers
    )
    wrapper.plan(
        starts, table.flatten(), last, shape.heads, shape.kv_heads, shape.dim, page, q_data_type=inputs.dtype,
        sm_scale=inputs.scale, fixed_split_size=settings.get("split"),
    )  # fmt: skip

    def call(copy: int) -> Any:
        k, v = inputs.kv(copy, memory)
        if memory.order == "tokens":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return partial(wrapper.run, inputs.q(copy, 1), (k, v))

    calls = [call(copy) for copy in range(inputs.copies)]
    return Competitor("", "flashinfer", memory, 1, calls, lambda out: out, settings)
