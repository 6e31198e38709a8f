"""OmniKV: a few layers choose the keys of the layers after them (Hao et al., ICLR 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.methods.base import check_budget
from longreach.methods.call import LayerCall
from longreach.methods.choosing import CrossLayerTopK, gather_over_ranks, keys_for_budget
from longreach.ops import Lists, Partial
from longreach.ops.types import Logits

PAPER = (2, 8, 18), 32  # the paper's for Llama-3-8B


@dataclass(frozen=True)
class OmniKV(CrossLayerTopK):
    """Filter layers attend densely and choose one set of keys for all heads; later layers attend to it.

    A key's score is the largest probability that any query head of the filter layer gives it in the current row (the
    paper's choice by the last token). Layers before the first filter attend densely.

    k: a count of keys, or a fraction of the row's context.
    layers: the filters; None: the paper's (2, 8, 18) of Llama-3-8B's 32 layers, at the same relative depth, rounded
        down. Good filters differ from model to model: with fewer than 16 layers the first of these is layer 0,
        whose attention may be flat.

    Differences from the paper: it chooses among the prompt's tokens and attends to all new tokens in addition; here
    all tokens compete for k, and the newest is always chosen. It lets the layer after each filter attend densely
    while it fetches keys from the host; here nothing is fetched, and that layer uses the choice. Heads of all ranks
    choose together. Ties go to the older key.
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
        return keys_for_budget(call, gather_over_ranks(call, largest).amax(1, keepdim=True), self.k, last=1)
