"""The long-run share of rows that the profit guard keeps from searching."""

from __future__ import annotations

import torch

from longreach.ops.match import Rule

HEADS, ROWS, SETTLED = 512, 3072, 1024  # simulated accounts, their rows, and the last rows, which count


def resting_share(rule: Rule, rate: float, group: int, context: int, gap: int) -> float:
    """Of the rows of KV heads with `group` query heads, each of which finds the row `gap` back with probability `rate`,
    all independently; contexts of `context` tokens. Accounts as in `Rule`. 0 without a guard."""
    if rule.patience == float("inf"):
        return 0.0
    draw = torch.Generator().manual_seed(0)
    looked = min(rule.window, context - 1 - rule.oldest)
    cost = looked * rule.price
    gain = (context - gap - rule.band - rule.sinks) / cost - 1
    most = max(rule.patience, rule.reuses * (context - rule.sinks) / cost)
    account = torch.full((HEADS,), most)
    rests = torch.zeros(())
    for row in range(ROWS):
        resting = account < 0
        rests += resting.sum() if row >= ROWS - SETTLED else 0
        reused = torch.rand(HEADS, generator=draw) < rate**group
        after = (account + torch.where(reused, gain, -1.0)).clamp(max=most)
        after = torch.where(after < 0, float(-rule.rest), after)
        account = torch.where(resting, account + 1, after)
    return float(rests) / (HEADS * SETTLED)
