"""FlashAttention-3 through its compiled operator: contiguous and paged, its own number of splits and fixed ones.

The operator is the file _vllm_fa3_C.abi3.so of vllm's wheel; LONGREACH_FA3 names it. Its schedule is computed outside
the timed graph.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longreach.bench.baselines.splits import split_counts
from longreach.bench.case import Memory
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs
from longreach.errors import Unsupported

TITLE = "FlashAttention-3"
VARIABLE = "LONGREACH_FA3"
PAGES = (None, 16, 64, 256)
MOST_SPLITS = 128  # what its kernel that combines splits takes


def load() -> dict[str, str]:
    remedy = f"set {VARIABLE} to vllm's _vllm_fa3_C.abi3.so, or measure without it: --without flash_attention_3"
    place = os.environ.get(VARIABLE)
    if not place or not Path(place).is_file():
        raise Unsupported(f"baseline flash_attention_3 cannot be loaded: {place or VARIABLE} is no file; {remedy}")
    try:
        torch.ops.load_library(place)
    except OSError as error:
        raise Unsupported(f"baseline flash_attention_3 cannot be loaded ({error}); {remedy}") from error
    return {"flash_attention_3": os.environ.get("LONGREACH_FA3_VERSION", Path(place).name)}


def candidates(inputs: Inputs) -> list[tuple[dict[str, Any], Any]]:
    if inputs.case.reads.kind != "dense":
        return []
    found: list[tuple[dict[str, Any], Any]] = []
    prefill = inputs.case.prefill  # it fills the GPU without splits
    for page in (None,) if prefill else PAGES:
        for order in ("tokens", "heads"):
            for splits in (0, *(() if prefill else split_counts(inputs, MOST_SPLITS))):
                settings = {"page": page, "order": f"{order} first", "splits": splits}
                memory = Memory(page, order)  # type: ignore[arg-type]
                for more in ({"scheduled": True}, {"scheduled": False}) if prefill else ({},):
                    found.append((settings | more, partial(_build, inputs, memory, settings | more)))
    return found


def _build(inputs: Inputs, memory: Memory, settings: dict[str, Any]) -> Competitor:
    """settings: scheduled: True gives lengths on the device and a schedule, as in decoding; False shapes alone."""
    shape, splits = inputs.shape, settings["splits"]
    ops: Any = torch.ops._vllm_fa3_C
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=inputs.device) * shape.rows
    table = None if memory.page is None else inputs.table(memory.page)
    causal = shape.rows > 1
    scheduled = settings.get("scheduled", True)
    filled = inputs.seq_lens if scheduled else None
    schedule = None if not scheduled else ops.get_scheduler_metadata(
        shape.batch, shape.rows, shape.context, shape.heads, shape.kv_heads, shape.dim, shape.dim, inputs.dtype,
        inputs.seq_lens, None if table is None else starts, None, None, None, None, memory.page, 0, causal, -1, -1,
        False,
        splits, None, 0,
    )  # fmt: skip

    def call(copy: int) -> Any:
        k, v = (x.transpose(1, 2) for x in inputs.kv(copy, memory))
        q = inputs.q(copy, shape.rows)
        if table is None:  # a batch of equal rectangles; no starts
            q = q.view(shape.batch, shape.rows, shape.heads, shape.dim)
        return partial(
            ops.fwd, q, k, v, None, None, None, None, None if table is None else starts, None, None, None,
            filled, shape.rows, shape.context, table, None, None, None, None, None, None, None, None,
            inputs.scale, causal, -1, -1, 0.0, True, schedule, splits, None, 0, None, 1, 0, None,
        )  # fmt: skip

    calls = [call(copy) for copy in range(inputs.copies)]

    def output(result: Any) -> torch.Tensor:
        return result[0].reshape(-1, shape.heads, shape.dim)

    return Competitor("", "flash_attention_3", memory, shape.rows, calls, output, settings)
