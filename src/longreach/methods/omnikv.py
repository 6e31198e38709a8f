"""OmniKV: a few layers choose the context of the layers after them (Hao et al., ICLR 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.methods.base import check_budget
from longreach.methods.call import LayerCall
from longreach.methods.choosing import CrossLayerTopK, best_keys, gather_over_ranks
from longreach.ops import Lists, Partial
from longreach.ops.types import Logits

PAPER = (2, 8, 18), 32  # the paper's for Llama-3-8B


@dataclass(frozen=True)
class OmniKV(CrossLayerTopK):
    """Filter layers attend densely and pick keys, one set for all heads, that the layers after them attend to.

    A key's score is the largest probability that any query head of the filter layer gives it in the row at hand (the
    paper's choice by the last token). Layers before the first filter attend densely.

    k: a count of keys, or a fraction of the row's context. layers: the filters; None: (2, 8, 18) of 32 layers, the
    paper's for Llama-3-8B, as deep in this model, rounded down. Which layers choose well is a model's own affair: with
    fewer than 16 layers the first of these is layer 0, which has no dense layer before it and may look at everything.
    The paper leaves open or has otherwise: it chooses among the prompt's tokens and attends to all new ones besides;
    here all tokens compete for k, but the newest is always among them. It lets the layer after each filter attend
    densely, while it fetches keys from the host; here nothing is fetched, and that layer uses the choice. Heads of all
    ranks choose together. Ties go to the older key.
    """

    k: int | float = 0.1

    name = "omnikv"
    phases = ("decode",)
    paper = PAPER

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("k", self.k)

    def select_keys(self, call: LayerCall, whole: Partial, logits: Logits) -> Lists:
        largest = call.op("largest_log_prob", whole.lse, logits)  # [R, N]
        return best_keys(call, gather_over_ranks(call, largest).amax(1, keepdim=True), self.k, last=1)
