"""Directions for Loki, made of the keys of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.methods.loki.calibrate import Moments, moments_of, principal
from longreach.methods.loki.plan import KIND, LokiPlan
from longreach.methods.plan_maker import PlanMaker, PlanParts, PromptRead
from longreach.ops import KVView
from longreach.plans import Plan

NEEDED = 1024  # tokens of a prompt: several times the channels of a head
KEYS = 4096  # the most keys that the directions are made of: evenly spaced ones of a longer prompt


@dataclass(frozen=True)
class LokiMaker(PlanMaker):
    """The principal directions of a prompt's keys, as `calibrate loki` finds them."""

    kind = KIND
    needed = NEEDED

    def make(self, prompt: PromptRead) -> PlanParts:
        every = -(-prompt.length // KEYS)
        slots = torch.arange(0, prompt.length, every, device=prompt.views[0].k.device)
        shape = prompt.model.kv_heads, prompt.model.head_dim
        each = [moments_of(shape, _keys(view, prompt.slot, slots)) for view in prompt.views]
        together = Moments(len(slots), torch.stack([m.mean for m in each]), torch.stack([m.product for m in each]))
        basis, variance = principal(together)
        return PlanParts({}, LokiPlan(basis.float().cpu(), variance.float().cpu()).arrays(), {"every": every})

    def about(self, plan: Plan) -> str:
        basis = LokiPlan.of(plan).basis
        return f"{basis.shape[-1]} directions for each of {basis.shape[0]} layers"


def _keys(view: KVView, slot: int, slots: Tensor) -> Tensor:
    """[n, G, D]: the keys in some slots of a sequence."""
    page, offset = view.locate(torch.full_like(slots, slot), slots)
    return view.k[page, :, offset]
