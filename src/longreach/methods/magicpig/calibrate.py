"""Expected error and reads of MagicPIG's pairs of bits and tables, measured on a model.

Pure functions of captured tensors. The expected error is computed without drawing projections. The number of keys that
a GQA group samples is counted with the projections of one seed, since the overlap of its heads' samples is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from longreach.methods.magicpig.method import PRESETS
from longreach.methods.magicpig.plan import Options, Pair
from longreach.methods.magicpig.schedule import Schedule
from longreach.ops.simhash import codes, inclusion, projections

PAIRS: tuple[Pair, ...] = tuple(
    sorted({*PRESETS, (8, 25), (8, 40), (9, 40), (9, 75), (9, 200), (10, 40), (10, 100), (10, 300), (11, 75),
            (11, 150), (11, 220), (12, 150), (12, 300)})
)  # fmt: skip
STEPS = 1 << 16  # steps of the table of u by the probability that one sign agrees
COMPARED = 1 << 24  # codes compared at a time
TINY = 1e-30


def tokens_needed(schedule: Schedule, rows: int) -> int:
    """The fewest tokens of a prompt whose last `rows` rows all have keys in the tables, of two complete blocks."""
    return schedule.start + schedule.seal + rows


def centre_of(k: Tensor, schedule: Schedule) -> Tensor:
    """fp32 [G, D]: the mean that is subtracted from keys [n, G, D] before hashing, as in `ops.simhash.seal`."""
    if not schedule.centre:
        return k.new_zeros(k.shape[1:], dtype=torch.float32)
    first = k[schedule.sinks : schedule.sinks + schedule.centre]
    finite = first.isfinite().all(-1, keepdim=True)
    total = torch.where(finite, first, 0).sum(0, dtype=torch.float64)
    return (total / finite.sum(0).clamp(min=1)).float()


def agreement(q: Tensor, k: Tensor) -> Tensor:
    """fp32 [r, g, n]: the probability that one random sign of queries [r, g, D] and centred keys [n, D] agrees."""
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (q, k))
    return 1 - torch.acos((q @ k.T).clamp(-1, 1)) / math.pi


def expected_error(
    q: Tensor, k: Tensor, v: Tensor, share: Tensor, certain: Tensor, pairs: Sequence[Pair], options: Options
) -> Tensor:
    """fp64 [pairs]: the expected relative error of the output, mean over the rows and query heads of a KV head.

    q: [r, g, D]; k: [n, D], centred; v: [n, D]; share: fp32 [r, g, n], softmax of the rows. certain: bool [r, n], keys
    that are always attended to, or are not visible.
    If keys are sampled independently, the squared error is to first order the sum over keys of share^2 |v - out|^2
    times the variance of the key's weight. With options.share = "own" that variance is 1/u - 1. With "group" it is
    sum of u (1 - u) / (sum of u)^2, over the heads of the group and as if they sampled independently.
    Nearby keys are sampled together, so measured errors are larger: 1.2 to 1.6 times on longreach-mini. The factor
    grows with the number of sampled keys.
    """
    out = share @ v.float()
    spread = (v.float().square().sum(-1) - 2 * (out @ v.float().T) + out.square().sum(-1, keepdim=True)).clamp(min=0)
    weight = (share.square() * spread).masked_fill(certain[:, None], 0.0)
    norm = out.square().sum(-1).double().clamp(min=TINY)
    place = (agreement(q, k) * STEPS).round().int().clamp(max=STEPS)
    found = []
    for pair in pairs:
        u = _table(*pair, options.least, q.device)[place]
        if options.share == "group":
            total = u.sum(1, keepdim=True)
            varies = (1 - u.square().sum(1, keepdim=True) / total) / total
        else:
            varies = 1 / u - 1
        found.append(((weight * varies).sum(-1, dtype=torch.float64) / norm).sqrt().mean())
    return torch.stack(found)


@cache
def _table(bits: int, tables: int, least: int, device: torch.device) -> Tensor:
    """fp32 [STEPS + 1]: u at evenly spaced p. From one entry to the next u changes by less than 0.1% if p > 0.25."""
    p = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    return inclusion(p, bits, tables, least).clamp(min=TINY).float().to(device)


def counted(q: Tensor, k: Tensor, centre: Tensor, pairs: Sequence[Pair], options: Options) -> tuple[Tensor, ...]:
    """(union, each, looked_up), all fp64 [G, pairs]: means over the rows, as shares of the keys in the tables.

    union: keys that at least one query head of the KV head samples. each: keys that a query head samples, summed over
    its query heads. looked_up: ids that its query heads read from buckets, in total.
    q: [r, H, D]; k: [n, G, D]; centre: [G, D].
    """
    rows, heads, keys = q.shape[0], k.shape[1], k.shape[0]
    found = torch.zeros(3, heads, len(pairs), dtype=torch.float64)
    for bits in sorted({bits for bits, _ in pairs}):
        places = sorted((tables, n) for n, (b, tables) in enumerate(pairs) if b == bits)
        directions = projections(q.shape[2], bits, places[-1][0], options.seed).to(q.device)
        of_q = codes(q, directions).view(torch.int16).unflatten(1, (heads, -1))  # [r, G, g, tables]
        of_k = codes(k, directions, centre=centre).view(torch.int16)  # [n, G, tables]
        step = max(1, COMPARED // (of_q.shape[2] * keys * places[-1][0]))
        for g in range(heads):
            for some in of_q[:, g].split(step):
                met = torch.zeros(*some.shape[:2], keys, dtype=torch.int64, device=q.device)
                first = 0
                for tables, n in places:  # the tables of a smaller number are the first of a larger one
                    met += (some[:, :, None, first:tables] == of_k[:, g, first:tables]).sum(-1)
                    first, hit = tables, met >= options.least
                    sums = [hit.any(1).sum(), hit.sum(), met.sum()]
                    found[:, g, n] += torch.stack(sums).double().cpu()
    union, each, looked_up = found / (rows * keys)
    return union, each, looked_up
