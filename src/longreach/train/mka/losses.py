"""Losses of a batch: divergence from a teacher, and of the next token, gradients computed piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.train.mini.page import ANSWER, CONTEXT, TEXT
from longreach.train.mka.logits import logits_of, pieces, vocabulary_of


@dataclass(frozen=True)
class Weighting:
    """How much a target token counts: mean of answers + text (weighted mean of the others), as in the recipe.

    context: of a token of a task's context or question, relative to one of plain text.
    """

    text: float = 0.5
    context: float = 0.07

    def of(self, kinds: Tensor) -> Tensor:
        """fp32 [N] of kinds [N]; they sum to 1 + text, or to 1 if there are tokens of one kind only."""
        answer = (kinds == ANSWER).float()
        other = (kinds == TEXT).float() + self.context * (kinds == CONTEXT).float()
        answers, others = answer.sum(), other.sum()
        scale = torch.where(answers > 0, self.text, 1.0)
        return answer / answers.clamp(min=1) + scale * other / others.clamp(min=1e-6)


class Losses(NamedTuple):
    """Sums over tokens of a batch, 0-dim each: weighted loss; divergence and -log p of the target, in nats."""

    loss: Tensor
    kl: Tensor
    nll: Tensor


def backward(
    student: Any,
    states: Tensor,
    teacher: Any,
    teacher_states: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    *,
    kl: float,
    nll: float,
    scale: float,
) -> Losses:
    """Add the gradients of the loss to the student's parameters.

    states: [N, width] with a graph; teacher_states: the teacher's for the same tokens, None without one. targets: int64
    [N]; weights: fp32 [N]. kl, nll: weights of KL(teacher || student) and of -log p(target). scale: of all gradients.

    The logits of a few tokens are computed, differentiated and dropped before those of the next.
    """
    total, gradients = states.new_zeros(3, dtype=torch.float32), list[Tensor]()
    for some in pieces(len(states), vocabulary_of(student)):
        leaf = states[some].detach().requires_grad_()
        theirs = None if teacher_states is None else teacher_states[some]
        divergence, missed = token_losses(student, leaf, teacher, theirs, targets[some])
        loss = (weights[some] * (kl * divergence + nll * missed)).sum()
        (scale * loss).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        total += torch.stack([loss.detach(), divergence.detach().sum(), missed.detach().sum()]).float()
    states.backward(torch.cat(gradients))
    return Losses(*total.unbind())


def token_losses(
    student: Any, states: Tensor, teacher: Any, teacher_states: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student), 0 without a teacher, and -log p(target) of each token, fp32 [N] each, in nats."""
    ours = logits_of(student, states).float().log_softmax(-1)
    missed = -ours.gather(-1, targets[:, None])[:, 0]
    if teacher_states is None:
        return torch.zeros_like(missed), missed
    with torch.no_grad():
        theirs = logits_of(teacher, teacher_states).float().log_softmax(-1)
        share = theirs.exp()
    return (share * (theirs - ours)).sum(-1), missed
