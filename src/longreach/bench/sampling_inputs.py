"""Random keys and queries that SimHash samples as it samples a model's.

Independent normal keys lie almost at right angles to a query, so hashing finds hardly any of them. These keys share a
component, which centring removes, and differ most along one direction; queries of a KV head agree in part and are long.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHARED = 3.0  # size of the component that all keys of a KV head have in common, in units of a key's own
ALIKE = 0.5  # size of the component that the queries of a KV head have in common, likewise
SPREAD = 0.6  # size of a direction along which keys differ most
LENGTH = 3.0  # of queries: some keys then have most of the weight


def draw_sequence(k: Tensor, v: Tensor, group: int, draw: torch.Generator) -> Tensor:
    """Fill k and v [G, N, D] in place; the result is the queries of one row, fp32 [G, group, D].

    Numbers are drawn in fp32 on the generator's device, which must be that of k and v. A KV head at a time: needs
    about 12 N D bytes.
    """

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, device=draw.device)

    heads, context, dim = k.shape
    shared = SHARED * normal(heads, dim)
    for head in range(heads):
        k[head] = normal(context, dim) + SPREAD * normal(context, 1) * normal(1, dim) + shared[head]
        v[head] = normal(context, dim)
    return (normal(heads, group, dim) + ALIKE * normal(heads, 1, dim)) * LENGTH
