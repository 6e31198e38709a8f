"""sample in plain PyTorch, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.sample.api import Sampled

NEAR = 1e-9  # a sum of probabilities this near to the whole number that it should be is that number


def sample(
    x: Tensor, count: Tensor, length: Tensor, offset: Tensor, *, capacity: int, uniform: float, power: float,
    first: int, last: int,
) -> Sampled:  # fmt: skip
    columns = x.shape[2]
    column = torch.arange(columns, device=x.device)
    end = length.long()[:, None, None]
    used = torch.minimum(count.long().clamp(min=0), length.long()[:, None])
    pi = probabilities(x, used, end, uniform, power, first, last)
    certain = pi >= 1
    rest = torch.where(certain, 0.0, pi)
    wanted = (used - certain.sum(-1))[..., None].double()
    total = rest.cumsum(-1)
    total = torch.where(total > wanted - NEAR, wanted, total)  # rounding adds no column and loses none
    steps = (total + offset.double()[..., None]).floor()
    drawn = steps > torch.nn.functional.pad(steps, (1, -1))
    place = torch.where(certain | drawn, column, columns).sort(-1).values
    index = torch.nn.functional.pad(place, (0, max(0, capacity - columns)), value=0)[..., :capacity]
    pi = pi.gather(-1, index.clamp(max=max(0, columns - 1))) if columns else index.double()
    return Sampled(index.to(torch.int32).contiguous(), used.to(torch.int32), -pi.log().float(), (1 - pi).float())


def draw(x: Tensor, count: Tensor, length: Tensor, numbers: Tensor) -> Sampled:
    columns, draws = x.shape[2], numbers.shape[2]
    column = torch.arange(columns, device=x.device)
    inside = column < length.long()[:, None, None]
    score = torch.where(inside, x.double().nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(min=0), 0.0)
    score = torch.where(score.sum(-1, keepdim=True) > 0, score, inside.double())
    score = torch.nn.functional.pad(score, (0, 1))  # a column for what is not drawn
    total = score.cumsum(-1)
    whole = total[..., -1:]
    # the first column whose sum exceeds a share below the whole one, which has a score
    hit = torch.searchsorted(total, numbers.double() * whole, right=True)
    wanted = torch.where(whole > 0, count.long().clamp(min=0, max=draws)[..., None], 0)
    place = torch.where(torch.arange(draws, device=x.device) < wanted, hit.clamp(max=columns), columns)
    times = torch.zeros(score.shape, dtype=torch.int64, device=x.device).scatter_add(2, place, torch.ones_like(place))
    found = torch.where(times[..., :columns] > 0, column, columns).sort(-1).values
    index = torch.nn.functional.pad(found, (0, max(0, draws - columns)), value=columns)[..., :draws]
    hits = times.gather(-1, index).double()
    weight = hits.log() - (score.gather(-1, index) / whole).log() - wanted.double().log()
    used = (times[..., :columns] > 0).sum(-1, dtype=torch.int32)
    return Sampled(index.to(torch.int32).contiguous(), used, weight.float(), (1 / hits).float())


def probabilities(x: Tensor, used: Tensor, end: Tensor, uniform: float, power: float, first: int, last: int) -> Tensor:
    """fp64 [L, heads, N]: of each column, 0 past the length. They sum to `used` [L, heads]."""
    columns = x.shape[2]
    column = torch.arange(columns, device=x.device).expand(x.shape)
    inside = column < end
    # the last ones from the end, then the first ones from the start, as far as the count goes
    from_end = end - 1 - column
    recent = inside & (from_end < torch.minimum(used[..., None], torch.full_like(used, last)[..., None]))
    left = (used - recent.sum(-1))[..., None]
    start = inside & ~recent & (column < torch.minimum(left, torch.full_like(left, first)))
    sure = recent | start
    open_ = inside & ~sure
    wanted = (used - sure.sum(-1)).double()
    score = torch.where(open_, x.double().nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(min=0) ** power, 0.0)
    number = open_.sum(-1, keepdim=True).double().clamp(min=1)
    whole = score.sum(-1, keepdim=True)
    even = open_ / number
    p = torch.where(whole > 0, (1 - uniform) * score / whole.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    p = torch.where(whole > 0, p + uniform * even, even)
    # the largest j columns are certain: the others share what is left of the count, and none of them exceeds 1
    down = p.sort(-1, descending=True).values
    tail = down.flip(-1).cumsum(-1).flip(-1)
    place = torch.arange(columns, device=x.device).double()
    fits = down * (wanted[..., None] - place) <= tail * (1 + 1e-12)
    j = (~fits).long().cumprod(-1).sum(-1, keepdim=True).clamp(max=max(0, columns - 1))
    share = (wanted[..., None] - j).clamp(min=0) / tail.gather(-1, j).clamp(min=torch.finfo(torch.float64).tiny)
    pi = torch.where(open_, (p * share).clamp(max=1.0), 0.0)
    everything = wanted[..., None] >= open_.sum(-1, keepdim=True)
    pi = torch.where(everything & open_, 1.0, pi)
    pi = torch.where(pi > 1 - 1e-12, 1.0, pi)
    return torch.where(sure, 1.0, pi)
