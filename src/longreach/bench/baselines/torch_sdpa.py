"""torch's scaled_dot_product_attention on contiguous memory, by backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from longreach.bench.case import Memory
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs

TITLE = "torch SDPA"
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def load() -> dict[str, str]:
    return {}


def candidates(inputs: Inputs) -> list[tuple[dict[str, Any], Any]]:
    if (inputs.shape.rows > 1 and not inputs.case.prefill) or inputs.case.reads.kind != "dense":
        return []
    names: tuple[str, ...] = ("cudnn", "flash") if inputs.device.type == "cuda" else ("math",)
    if inputs.case.prefill and inputs.shape.rows < inputs.shape.context:  # its triangle alone ends at the last key
        names = tuple(name for name in names if name == "flash")
    return [({"backend": name}, partial(_build, inputs, name)) for name in names]


def _build(inputs: Inputs, name: str) -> Competitor:
    shape, memory = inputs.shape, Memory()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if causal and name == "flash":  # the public call would align the triangle with the first key
            return flash(q, k, v, 0.0, True, scale=inputs.scale)[0]  # type: ignore[no-any-return]
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=inputs.scale, enable_gqa=True)

    causal, flash = inputs.case.prefill, torch.ops.aten._scaled_dot_product_flash_attention
    form = shape.batch, shape.rows, shape.heads, shape.dim
    calls = [
        partial(run, inputs.q(copy, shape.rows).view(form).transpose(1, 2), *inputs.kv(copy, memory))
        for copy in range(inputs.copies)
    ]

    def output(out: Tensor) -> Tensor:
        return out.transpose(1, 2).reshape(-1, shape.heads, shape.dim)

    return Competitor("", "torch_sdpa", memory, shape.rows, calls, output, {"backend": name})
