"""The distance from the original, against plain arithmetic over whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longreach.testing.tiny import random_tokens, tiny_model
from longreach.train.mini.page import ANSWER, CONTEXT, PADDING
from longreach.train.mka import logits
from longreach.train.mka.data import Batch, padded
from longreach.train.mka.distance import compare, distance, states_of
from longreach.train.mka.logits import hidden_states
from longreach.train.mka.losses import Weighting, backward


def batches() -> list[Batch]:
    rows = [random_tokens(1, n, seed=n)[0].tolist() for n in (20, 13)]
    return [padded([(row, [CONTEXT] * (len(row) - 4) + [ANSWER] * 3) for row in rows], 24, 0)]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "AT_ONCE", 5 * 264)  # logits of 5 tokens at a time


def test_means_over_tokens_that_are_no_padding(student: Any, teacher: Any, few: None) -> None:
    (batch,) = given = batches()
    found = distance(student, teacher, given)
    keep = torch.from_numpy(batch.kinds != PADDING)
    ids = torch.from_numpy(batch.tokens)
    with torch.no_grad():
        ours, theirs = (m(ids[:, :-1]).logits[keep].double().log_softmax(-1) for m in (student, teacher))
    targets = ids[:, 1:][keep]
    same = ours.argmax(-1) == theirs.argmax(-1)
    answers = torch.from_numpy(batch.kinds == ANSWER)[keep]
    assert found.tokens == len(targets) == 31 and found.sequences == 2 and not found.identical
    assert found.kl == pytest.approx(float((theirs.exp() * (theirs - ours)).sum(-1).mean()), rel=1e-4)
    assert found.nll == pytest.approx(float(F.nll_loss(ours, targets)), rel=1e-5)
    assert found.original_nll == pytest.approx(float(F.nll_loss(theirs, targets)), rel=1e-5)
    assert found.agreement == float(same.double().mean())
    assert found.answer_agreement == pytest.approx(float(same[answers].double().mean()))
    assert found.to_json()["perplexity"] == pytest.approx(torch.tensor(found.nll).exp().item())


def test_a_model_equals_itself_and_has_no_distance_without_an_original(teacher: Any) -> None:
    given = batches()
    found = distance(teacher, tiny_model("llama"), given)
    assert found.identical and found.kl == 0.0 and found.agreement == found.answer_agreement == 1.0
    alone = compare(states_of(teacher, given))
    assert alone.kl is None and alone.agreement is None and alone.nll == found.nll


@pytest.mark.parametrize(("kl", "nll"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.2)])
def test_gradients_computed_piece_by_piece_are_those_of_the_whole(
    student: Any, teacher: Any, few: None, kl: float, nll: float
) -> None:
    (batch,) = batches()
    keep, ids = torch.from_numpy(batch.kinds != PADDING), torch.from_numpy(batch.tokens)
    weights, targets = Weighting().of(torch.from_numpy(batch.kinds)[keep]), ids[:, 1:][keep]
    with torch.no_grad():
        theirs = hidden_states(teacher, ids[:, :-1])[keep]
    losses = backward(student, hidden_states(student, ids[:, :-1])[keep], teacher, theirs, targets, weights, kl=kl,
                      nll=nll, scale=0.5)  # fmt: skip
    pieces = {name: p.grad for name, p in student.named_parameters()}
    student.zero_grad()
    ours = student(ids[:, :-1]).logits[keep].log_softmax(-1)
    told = teacher(ids[:, :-1]).logits[keep].log_softmax(-1).detach()
    each = kl * (told.exp() * (told - ours)).sum(-1) + nll * F.nll_loss(ours, targets, reduction="none")
    loss = (weights * each).sum()
    (0.5 * loss).backward()
    torch.testing.assert_close(losses.loss, loss.detach(), rtol=1e-4, atol=1e-6)
    for name, p in student.named_parameters():
        torch.testing.assert_close(pieces[name], p.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_answers_and_the_rest_weigh_as_in_the_recipe() -> None:
    kinds = torch.tensor([CONTEXT, ANSWER, ANSWER, PADDING, 2, 2], dtype=torch.uint8)
    weights = Weighting(text=0.5, context=0.1).of(kinds)
    torch.testing.assert_close(weights, torch.tensor([0.05, 1.05, 1.05, 0.0, 0.5, 0.5]) / torch.tensor([2.1]))
    torch.testing.assert_close(Weighting().of(kinds[4:]), torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(Weighting().of(kinds[1:3]), torch.tensor([0.5, 0.5]))
