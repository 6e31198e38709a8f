"""Dense attention by torch over the same keys and values, and a copy at memory speed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longreach.bench.cpu.inputs import Problem, huge
from longreach.ops import Spans, attend

MATMUL, SDPA, COPY, OURS = "torch matmul", "torch SDPA", "copy of keys", "longreach dense"


def largest_logit(problem: Problem) -> float:
    """Of any query head and key."""
    shape = problem.shape
    q = problem.rows.q.view(shape.kv_heads, -1, shape.dim).float() * shape.scale
    return max(float((q[head] @ problem.kv.k[0, head].float().T).abs().max()) for head in range(shape.kv_heads))


def baselines(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """By name: calls that return [H, D] (the copy: the keys)."""
    shape, kv, rows = problem.shape, problem.kv, problem.rows
    k, v = kv.k[0], kv.v[0]
    q = rows.q.view(shape.kv_heads, -1, shape.dim)
    target = huge(tuple(k.shape), k.dtype)

    def matmul() -> Tensor:
        logits = (q @ k.transpose(1, 2)).float() * shape.scale
        return (torch.softmax(logits, -1).to(v.dtype) @ v).view(shape.heads, shape.dim)

    def sdpa() -> Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            rows.q.view(1, shape.heads, 1, shape.dim), k[None], v[None], enable_gqa=True
        )
        return found.view(shape.heads, shape.dim)

    def copy() -> Tensor:
        return target.copy_(k)

    def ours() -> Tensor:
        return attend(rows, kv, Spans.dense(), scale=shape.scale, impl="numba").out[0]

    return {MATMUL: matmul, SDPA: sdpa, COPY: copy, OURS: ours}
