"""The distance of a model from its original on given sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import Advance
from longreach.evals.perplexity import perplexity
from longreach.train.mini.page import ANSWER, PADDING
from longreach.train.mka.data import Batch
from longreach.train.mka.logits import hidden_states, logits_of, pieces, vocabulary_of


@dataclass(frozen=True)
class Distance:
    """Means over tokens: KL(original || model) and -log p of the next token, in nats; shares of tokens for which both
    models prefer the same next token, of all tokens and of answers. None without an original, or without answers.

    identical: whether the last hidden states of both are the same bits.
    """

    tokens: int
    sequences: int
    nll: float
    kl: float | None = None
    agreement: float | None = None
    answer_agreement: float | None = None
    original_nll: float | None = None
    identical: bool = False

    def to_json(self) -> dict[str, Any]:
        both = {"perplexity": self.nll, "original_perplexity": self.original_nll}
        return {**asdict(self), **{name: None if x is None else perplexity(x) for name, x in both.items()}}


@dataclass(frozen=True)
class States:
    """A model's last hidden states [N, width] of the real tokens of each batch."""

    model: Any
    batches: Sequence[Batch]
    states: tuple[Tensor, ...]


@torch.no_grad()
def states_of(
    model: Any, batches: Sequence[Batch], advance: Advance = lambda done: None,
    autocast: AbstractContextManager[Any] | None = None,
) -> States:  # fmt: skip
    """The last hidden states of a model, one sequence at a time. advance: called with tokens. autocast: entered."""
    found = []
    with autocast or nullcontext():
        for batch in batches:
            rows = []
            for tokens, kinds in zip(batch.tokens, batch.kinds, strict=True):
                real = int((kinds != PADDING).sum())
                ids = torch.from_numpy(tokens[:real])[None].to(model.device)
                rows.append(hidden_states(model, ids)[0])
                advance(len(kinds))
            found.append(torch.cat(rows))
    return States(model, batches, tuple(found))


@torch.no_grad()
def compare(ours: States, original: States | None = None) -> Distance:
    """The distance of one model's results from the other's, which may be of the same model before it was changed."""
    sums, answers, tokens = torch.zeros(5, dtype=torch.float64), 0, 0
    for number, batch in enumerate(ours.batches):
        kinds = torch.from_numpy(batch.kinds).flatten()
        keep = kinds != PADDING
        targets = torch.from_numpy(batch.tokens[:, 1:]).flatten()[keep].to(ours.model.device)
        is_answer = (kinds[keep] == ANSWER).to(ours.model.device)
        answers, tokens = answers + int(is_answer.sum()), tokens + len(targets)
        for some in pieces(len(targets), vocabulary_of(ours.model)):
            theirs = None if original is None else (original.model, original.states[number][some])
            sums += _sums(ours.model, ours.states[number][some], theirs, targets[some], is_answer[some]).cpu()
    sequences = sum(len(batch.tokens) for batch in ours.batches)
    nll, original_nll, kl, same, same_answers = (x / max(1, tokens) for x in sums.tolist())
    if original is None:
        return Distance(tokens, sequences, nll)
    identical = all(torch.equal(a, b) for a, b in zip(ours.states, original.states, strict=True))
    share = same_answers * tokens / answers if answers else None
    return Distance(tokens, sequences, nll, max(0.0, kl) if math.isfinite(kl) else kl, same, share, original_nll,
                    identical)  # fmt: skip


def distance(model: Any, original: Any, batches: Sequence[Batch]) -> Distance:
    """The distance of a model from another one of the same vocabulary."""
    return compare(states_of(model, batches), states_of(original, batches))


def _sums(model: Any, states: Tensor, original: tuple[Any, Tensor] | None, targets: Tensor, answers: Tensor) -> Tensor:
    """fp64 [5], sums over tokens: both -log p, KL, equal first choices, the same of answers."""
    ours = logits_of(model, states).float().log_softmax(-1)
    nll = -ours.gather(-1, targets[:, None])[:, 0]
    if original is None:
        return torch.stack([nll.double().sum(), *torch.zeros(4, dtype=torch.float64, device=nll.device)])
    theirs = logits_of(original[0], original[1]).float().log_softmax(-1)
    same = ours.argmax(-1) == theirs.argmax(-1)
    parts = (
        nll,
        -theirs.gather(-1, targets[:, None])[:, 0],
        (theirs.exp() * (theirs - ours)).sum(-1),
        same,
        same & answers,
    )
    return torch.stack([part.double().sum() for part in parts])
