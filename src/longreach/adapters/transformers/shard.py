"""Which KV heads this rank holds under transformers' tensor-parallel plan."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from longreach.errors import Unsupported
from longreach.ops import HeadShard


def shard_of(attention: nn.Module, kv_heads: int) -> HeadShard:
    """The shard of an attention module whose keys arrive with `kv_heads` heads on this rank.

    Raises Unsupported where they are neither all heads nor an equal part of them.
    """
    whole = HeadShard.whole(kv_heads)
    if not dist.is_available() or not dist.is_initialized():
        return whole
    from torch.distributed.tensor import DTensor, Shard

    for weight in attention.parameters():
        if isinstance(weight, DTensor) and any(isinstance(p, Shard) for p in weight.placements):
            if hasattr(attention, "kv_lora_rank"):
                raise Unsupported(
                    f"{type(attention).__name__} has one latent KV head (MLA), which ranks cannot share out; load the "
                    f"model on one device, without a tensor-parallel plan"
                )
            mesh, total = tensor_parallel(weight.device_mesh), _all_heads(attention)
            if kv_heads == total:  # the plan gathers heads before attention, as Phi-3's does
                return whole
            if total is not None and kv_heads * mesh.size() != total:
                raise Unsupported(f"a rank of {mesh.size()} with {kv_heads} of {total} KV heads: expected equal parts")
            return _part(mesh, kv_heads)
    return whole


def _all_heads(attention: nn.Module) -> int | None:
    """KV heads over all ranks, by the configuration, which tensor parallelism leaves as it was."""
    config = getattr(attention, "config", None)
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)


def tensor_parallel(mesh: dist.DeviceMesh) -> dist.DeviceMesh:
    """The dimension of a device mesh along which weights are sharded. Raises Unsupported."""
    if mesh.ndim == 1:
        return mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise Unsupported(f"attention weights on a {mesh.ndim}-d device mesh without a 'tp' dimension")
    return mesh["tp"]


def _part(mesh: dist.DeviceMesh, kv_heads: int) -> HeadShard:
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def total(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    return HeadShard(rank * kv_heads, kv_heads, ranks * kv_heads, total)
