"""Estimates of attention from some keys, with exact scores: the best ones, independent draws, systematic sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.evals.sampling_study.exact import Exact
from longreach.methods.base import budget
from longreach.ops.sample.api import Sampled, draw, sample

SINKS = 4  # first keys
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # of the context: the best keys
BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # of the context: keys of top-k and of systematic sampling
DRAWS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # of the context: draws of iid sampling, which hit fewer keys


def mass_of_best(share: Tensor, context: Tensor) -> dict[str, Tensor]:
    """The weight on the best keys of each query head, for SHARES of the context: fp64 [R, H, len(SHARES)] each.

    share: [R, H, n], context: int [R]. all: of all keys. without_first: the first SINKS keys are left out, of the keys
    and of the whole weight (MagicPIG, Fig. 2).
    """
    found = {}
    for name, some in (("all", share), ("without_first", share[..., SINKS:])):
        held = some.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
        keys = context - (share.shape[-1] - some.shape[-1])
        places = torch.stack([budget(part, keys) - 1 for part in SHARES], -1)
        got = held.gather(-1, places[:, None].expand(-1, share.shape[1], -1))
        found[name] = got / held[..., -1:].clamp(min=1e-30)
    return found


def top_k(exact: Exact) -> list[tuple[Tensor, Tensor]]:
    """(share of the context read, error), fp64 [R, H] each, for each of BUDGETS: the keys with the largest weights."""
    place = ranks(exact.share)
    return [
        (_shares(count, exact), exact.error(exact.estimate((place < count[:, None, None]).float())))
        for count in (budget(part, exact.context) for part in BUDGETS)
    ]


def systematic(exact: Exact, random: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """As `top_k`, of `ops.sample`: each query head draws by its own exact weights."""
    found = []
    for part in BUDGETS:
        count = budget(part, exact.context)
        offset = torch.rand(exact.sink.shape, generator=random, device=random.device).to(exact.sink.device)
        some = sample(exact.share, count[:, None].expand(exact.sink.shape).contiguous(), exact.context, offset,
                      capacity=int(count.max()))  # fmt: skip
        found.append((_shares(some.used, exact), exact.error(exact.estimate(_weights(some, exact)))))
    return found


def iid(exact: Exact, random: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """As `top_k`, for each of DRAWS: independent draws by the exact weights (MagicPIG, Def. 3.1).

    A key that is drawn twice is read once, so fewer keys are read than drawn (Theorem 3.3).
    """
    found = []
    for part in DRAWS:
        count = (part * exact.context.double()).ceil().long()
        shape = (*exact.sink.shape, int(count.max()))
        numbers = torch.rand(shape, generator=random, dtype=torch.float64, device=random.device)
        some = draw(exact.share, count[:, None].expand(exact.sink.shape).contiguous(), exact.context,
                    numbers.to(exact.share.device))  # fmt: skip
        found.append((_shares(some.used, exact), exact.error(exact.estimate(_weights(some, exact)))))
    return found


def best_of_group(exact: Exact, count: Tensor, always: Tensor | None = None) -> Tensor:
    """The error, fp64 [R, H], of the `count` int [R, G] best keys of each KV head by pooled weights.

    always: bool [R, G, n], keys that are read in addition to these.
    """
    pooled = exact.pooled()
    if always is not None:
        pooled = pooled.masked_fill(always, -1.0)
    mask = ranks(pooled) < count[..., None]
    mask = mask if always is None else mask | always
    group = exact.share.shape[1] // count.shape[1]
    return exact.error(exact.estimate(mask.float().repeat_interleave(group, 1)))


def ranks(x: Tensor) -> Tensor:
    """int64 like x: the place of each entry in falling order of its last dimension; ties to the lower index."""
    order = x.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(x.shape[-1], device=x.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def _weights(some: Sampled, exact: Exact) -> Tensor:
    """fp32 [R, H, n]: exp of the log-weights of sampled keys, 0 for others."""
    columns, n = some.columns.long(), exact.share.shape[-1]
    used = torch.arange(columns.shape[-1], device=columns.device) < some.used[..., None]
    weight = exact.share.new_zeros((*exact.share.shape[:2], n + 1))
    weight.scatter_(-1, torch.where(used, columns, n), some.log_weight.exp())
    return weight[..., :n]


def _shares(count: Tensor, exact: Exact) -> Tensor:
    """fp64 [R, H] of counts, int [R] or [R, H]."""
    count = count[:, None] if count.dim() == 1 else count
    return (count.double() / exact.context.double()[:, None]).expand(exact.sink.shape)
