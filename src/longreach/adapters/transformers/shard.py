"""Which KV heads this rank holds under transformers' tensor-parallel plan."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from longreach.errors import Unsupported
from longreach.ops import HeadShard


def shard_of(attention: nn.Module, kv_heads: int) -> HeadShard:
    """The shard of an attention module whose keys arrive with `kv_heads` heads on this rank."""
    if not dist.is_available() or not dist.is_initialized():
        return HeadShard.whole(kv_heads)
    from torch.distributed.tensor import DTensor, Shard

    for weight in attention.parameters():
        if isinstance(weight, DTensor) and any(isinstance(p, Shard) for p in weight.placements):
            return _on_mesh(weight.device_mesh, kv_heads)
    return HeadShard.whole(kv_heads)


def _on_mesh(mesh: dist.DeviceMesh, kv_heads: int) -> HeadShard:
    if mesh.ndim != 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise Unsupported(f"attention weights on a {mesh.ndim}-d device mesh without a 'tp' dimension")
        mesh = mesh["tp"]
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def total(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    return HeadShard(rank * kv_heads, kv_heads, ranks * kv_heads, total)
