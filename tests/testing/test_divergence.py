"""Divergence is excused where the model is undecided, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from longreach.testing.divergence import assert_tied, first_difference
from longreach.testing.tiny import tiny_model


def test_first_difference() -> None:
    a = torch.tensor([1, 2, 3])
    assert first_difference(a, torch.tensor([1, 2, 3, 9])) is None
    assert first_difference(a, torch.tensor([1, 7, 3])) == 1


def test_ties_are_excused_and_other_choices_are_not() -> None:
    model = tiny_model("llama").bfloat16()
    context = torch.arange(3, 40)[None]
    with torch.no_grad():
        order = model.double()(context).logits[0, -1].argsort(descending=True)
        model = tiny_model("llama").bfloat16()

    def chose(token: int) -> torch.Tensor:
        return torch.cat([context, torch.tensor([[token]])], 1)

    assert_tied(model, chose(int(order[0])), chose(int(order[0])))
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_tied(model, chose(int(order[0])), chose(int(order[-1])))
    twins = tiny_model("llama").bfloat16()
    head = twins.get_output_embeddings().weight
    with torch.no_grad():
        head[int(order[-1])] = head[int(order[0])]  # now two tokens have one logit
    assert_tied(twins, chose(int(order[0])), chose(int(order[-1])))
