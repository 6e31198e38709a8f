"""Which KV heads this rank holds under transformers' tensor-parallel plan, and what the ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longreach.adapters.transformers.sharded_weights import is_sharded
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
            mesh, total = _tensor_parallel(weight.device_mesh), _all_heads(attention)
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


def _tensor_parallel(mesh: dist.DeviceMesh) -> dist.DeviceMesh:
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


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that hold a model together under tensor parallelism, each with its shards.

    All of them run the same passes, so each decision about a pass must be the same on all: a rank that runs one that
    the others do not waits for them until the process group's timeout. Every method is called on all ranks at once.
    device: of the model; the collectives run there.
    """

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def all_values(self, value: int) -> list[int]:
        """The value that each rank gives, in the order of ranks."""
        mine = torch.tensor([value], device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        return [int(x) for x in torch.cat(found).tolist()]

    def first(self, x: Tensor) -> Tensor:
        """Rank 0's bool tensor on all ranks; each gives one of the same shape."""
        shared = x.to(torch.uint8)
        dist.broadcast(shared, group_src=0, group=self.group)
        return shared.bool()

    def gathered(self, x: Tensor) -> Tensor:
        """[count, ...] of each rank -> [size * count, ...] in the order of ranks."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.group)
        return torch.cat(found)


def ranks_of(decoder: nn.Module) -> Ranks | None:
    """The ranks that share a decoder by a tensor-parallel plan; None where one process holds it. Raises Unsupported."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    for weight in decoder.parameters():
        if is_sharded(weight):
            mesh = _tensor_parallel(weight.device_mesh)  # type: ignore[attr-defined]
            return Ranks(mesh.get_group(), weight.device)
    return None
