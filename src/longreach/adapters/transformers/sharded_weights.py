"""Weights that tensor parallelism spreads over ranks, as bytes of the whole weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longreach.errors import Unsupported

PIECE = 1 << 26  # bytes gathered at a time
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor, sharded or replicated."""
    if type(x) in (Tensor, torch.nn.Parameter) or not dist.is_available():
        return False  # without the import, which takes long
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor of which this rank holds only a part."""
    return is_dtensor(x) and not all(p.is_replicate() for p in x.placements)


@torch.no_grad()
def local_of(x: Any) -> Tensor:
    """What this rank holds of a DTensor: the very tensor, not a copy."""
    local: Tensor = x.to_local()
    return local


@torch.no_grad()
def gathered(x: Any, what: str) -> Iterator[Tensor]:
    """The bytes of a sharded weight in row-major order, uint8 on the host, at most about PIECE at a time.

    All ranks must ask for the same weights in the same order. what: names the weight in errors. Raises Unsupported for
    one that is sharded along two dimensions of the device mesh, holds partial sums, or is made of other tensors.
    """
    from torch.distributed.tensor import distribute_tensor

    local = local_of(x).detach()
    spread = [n for n, p in enumerate(x.placements) if not p.is_replicate()]
    if len(spread) != 1 or not hasattr(x.placements[spread[0]], "dim") or type(local) is not Tensor:
        raise Unsupported(
            f"{what} is a DTensor of {type(local).__name__} placed as {tuple(map(str, x.placements))}; a fingerprint "
            f"reads plain weights that are sharded along one dimension of the device mesh"
        )
    mesh, placement = x.device_mesh, x.placements[spread[0]]
    mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[spread[0]]]
    dim, group = placement.dim % x.dim(), mesh.get_group()
    positions = torch.arange(x.shape[dim], device=local.device)
    index = distribute_tensor(positions, mesh, [_along_first(placement)], src_data_rank=None).to_local()  # held here
    bits = local.view(_SAME_SIZE[local.element_size()])
    step = max(1, PIECE // max(1, x.shape[1:].numel() * local.element_size()))
    for first in range(0, x.shape[0], step):
        stop = min(first + step, x.shape[0])
        whole = bits.new_zeros(stop - first, *x.shape[1:])
        if dim == 0:
            here = (index >= first) & (index < stop)
            whole[index[here] - first] = bits[here]
        else:
            whole.index_copy_(dim, index, bits[first:stop])
        flat = whole.reshape(-1).view(torch.uint8)
        dist.all_reduce(flat, group=group)  # each byte is one rank's, and 0 on the others
        yield flat.cpu()


def _along_first(placement: Any) -> Any:
    """The same placement, of a tensor's first dimension."""
    from torch.distributed.tensor import Shard

    if isinstance(placement, Shard):
        return Shard(0)
    return type(placement)(0, split_factor=placement.split_factor)  # gate and up in one weight: a part of each
