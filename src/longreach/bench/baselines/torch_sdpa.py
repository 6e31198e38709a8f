"""torch's scaled_dot_product_attention on contiguous memory, by backend."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from longreach.bench.cases import Memory
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs

TITLE = "torch SDPA"
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def load() -> dict[str, str]:
    return {}


def candidates(inputs: Inputs) -> list[tuple[dict[str, Any], Any]]:
    if inputs.shape.rows > 1 or inputs.case.reads.kind != "dense":
        return []
    names = ("cudnn", "flash") if inputs.device.type == "cuda" else ("math",)
    return [({"backend": name}, partial(_build, inputs, name)) for name in names]


def _build(inputs: Inputs, name: str) -> Competitor:
    shape, memory = inputs.shape, Memory()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q, k, v, scale=inputs.scale, enable_gqa=True)

    calls = [
        partial(run, inputs.q(copy, 1).view(shape.batch, shape.heads, 1, shape.dim), *inputs.kv(copy, memory))
        for copy in range(inputs.copies)
    ]

    def output(out: Tensor) -> Tensor:
        return out.reshape(-1, shape.heads, shape.dim)

    return Competitor("", "torch_sdpa", memory, 1, calls, output, {"backend": name})
