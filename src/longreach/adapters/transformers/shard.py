"""Which KV heads this rank holds under transformers' tensor-parallel plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longreach.errors import Unsupported
from longreach.ops import HeadShard


def shard_of(attention: nn.Module, kv_heads: int) -> HeadShard:
    """The shard of an attention module whose keys arrive with `kv_heads` heads on this rank."""
    if not dist.is_available():
        return HeadShard.whole(kv_heads)
    from torch.distributed.tensor import DTensor, Shard

    for weight in attention.parameters():
        if not isinstance(weight, DTensor) or not any(isinstance(p, Shard) for p in weight.placements):
            continue
        mesh = weight.device_mesh
        if mesh.ndim != 1:
            if "tp" not in (mesh.mesh_dim_names or ()):
                raise Unsupported(f"attention weights on a {mesh.ndim}-d device mesh without a 'tp' dimension")
            mesh = mesh["tp"]
        group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

        def total(x: Tensor, group: Any = group) -> Tensor:
            x = x.clone()
            dist.all_reduce(x, group=group)
            return x

        return HeadShard(rank * kv_heads, kv_heads, ranks * kv_heads, total)
    return HeadShard.whole(kv_heads)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)
