"""Options of healing, and the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from longreach.errors import InvalidInput, UnknownName
from longreach.ops.types import require
from longreach.train.mka.budgets import Budget

Trained = Literal["levels", "attention", "all"]
TRAINED: tuple[Trained, ...] = get_args(Trained)


@dataclass(frozen=True)
class HealOptions:
    """How a converted model is trained.

    steps, minutes: one of them, the budget. train: "levels" (router, gates, decays), "attention" (and all other
    parameters of converted layers' attention) or "all"; an index of blocks is trained by `index.distil` alone.
    kl: weight of the divergence from the teacher. nll: of the next-token loss.
    lengths: of sequences, in turn. batch_tokens: tokens of a batch. accumulate: batches of a step.
    learning_rate: of projections and router; gate_rate: of gates and decays, which have no weight decay.
    warmup: steps, at most a tenth of `steps`. final: the last learning rate, relative to the first.
    text_loss, context_weight: of tokens that are no answers, see `losses.Weighting`.
    checkpointing: recompute activations in the backward pass, which takes less memory.
    budgets: (window, blocks), one drawn for each step; (): the model's own. seed: of sequences and budgets.
    """

    steps: int | None = None
    minutes: float | None = None
    train: Trained = "attention"
    kl: float = 1.0
    nll: float = 0.0
    lengths: tuple[int, ...] = (512,)
    batch_tokens: int = 8192
    accumulate: int = 2
    learning_rate: float = 3e-4
    gate_rate: float = 1e-2
    weight_decay: float = 0.01
    warmup: int = 20
    final: float = 0.05
    clip: float = 1.0
    text_loss: float = 0.5
    context_weight: float = 0.07
    checkpointing: bool = False
    budgets: tuple[Budget, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train not in TRAINED:
            raise UnknownName("part of a model to train", self.train, TRAINED)
        if (self.steps is None) == (self.minutes is None):
            raise InvalidInput("steps, minutes: expected one of them")
        ok = isinstance(self.lengths, tuple) and self.lengths and all(is_whole(n, 2) for n in self.lengths)
        require(bool(ok), f"lengths: expected one or more ints of at least 2, got {self.lengths!r}")
        for name in ("steps", "batch_tokens", "accumulate"):
            value = getattr(self, name)
            ok = is_whole(value, 1) or (value is None and name == "steps")
            require(ok, f"{name}: expected an int of at least 1, got {value!r}")
        for name in ("warmup", "seed"):
            value = getattr(self, name)
            require(is_whole(value, 0), f"{name}: expected an int of at least 0, got {value!r}")
        for name in ("minutes", "learning_rate", "gate_rate", "clip"):
            value = getattr(self, name)
            ok = (is_number(value) and value > 0) or (value is None and name == "minutes")
            require(ok, f"{name}: expected a number above 0, got {value!r}")
        for name in ("kl", "nll", "weight_decay", "final", "text_loss", "context_weight"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, f"{name}: expected a number of at least 0, got {value!r}")
        if not self.kl and not self.nll:
            raise InvalidInput("kl, nll: expected a weight above 0 for one of them")

    def fraction(self, step: int, seconds: float) -> float:
        """The share of the budget that is spent before a step."""
        return step / self.steps if self.steps is not None else seconds / (60 * (self.minutes or math.inf))

    def rate(self, step: int, fraction: float) -> float:
        """The learning rate of a step, relative to the first one: a warm-up, then a cosine to `final`."""
        warmup = min(self.warmup, max(1, self.steps // 10)) if self.steps is not None else self.warmup
        warm = min(1.0, (step + 1) / max(1, warmup))
        return warm * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction))))

    def to_json(self) -> dict[str, Any]:
        """The options as JSON holds them."""
        return {**asdict(self), "lengths": list(self.lengths), "budgets": [list(one) for one in self.budgets]}


def is_whole(value: object, least: int) -> bool:
    """Whether `value` is an int (not True) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether `value` is a finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
