"""Real tokens of a pass: padding, packed documents, a past; and where their keys lie."""

from __future__ import annotations

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.mka.layout import Layout
from longreach.mka.tokens import Tokens


def test_an_unpadded_batch_is_its_rectangle() -> None:
    tokens = Tokens.of((2, 3), "cpu", mask=torch.ones(2, 3), position_ids=torch.arange(3)[None])
    assert tokens.rectangular and tokens.real is None and tokens.counts == (3, 3) and tokens.longest == 3
    assert tokens.seq.tolist() == [0, 0, 0, 1, 1, 1] and tokens.pos.tolist() == [0, 1, 2, 0, 1, 2]
    layout, x = Layout.of(tokens, 2), torch.randn(6, 4, 8)
    view = layout.view(x, x)
    assert layout.start is None and view.k.data_ptr() == x.data_ptr() and layout.first.tolist() == [[0], [0]]


def test_padding_on_both_sides() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    tokens = Tokens.of((3, 4), "cpu", mask=mask)
    assert tokens.seq.tolist() == [0, 0, 0, 1, 1] and tokens.pos.tolist() == [0, 1, 2, 0, 1]
    assert tokens.counts == (3, 2, 0) and tokens.longest == 3 and not tokens.rectangular
    x = torch.arange(12).view(3, 4)
    assert tokens.rows(x).tolist() == [1, 2, 3, 4, 5]
    assert tokens.rectangle(tokens.rows(x) + 1).tolist() == [[0, 2, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0]]
    layout = Layout.of(tokens, 2)
    assert layout.slot.tolist() == [0, 1, 2, 4, 5] and layout.start.tolist() == [0, 0, 0, 4, 4]
    assert layout.first[0, :3].tolist() == [0, 2, 0]


def test_positions_that_restart_begin_documents() -> None:
    position_ids = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    tokens = Tokens.of((2, 5), "cpu", position_ids=position_ids)
    assert (
        tokens.counts == (3, 2, 1, 4) and tokens.longest == 4 and tokens.pos.tolist() == position_ids.flatten().tolist()
    )
    assert tokens.seq.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]


def test_positions_may_begin_anywhere() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    tokens = Tokens.of((3, 4), "cpu", mask=mask, position_ids=torch.arange(4)[None])
    assert tokens.pos.tolist() == [0, 1, 0, 1, 2, 3] and tokens.rotary_pos.tolist() == [2, 3, 0, 1, 2, 3]
    assert tokens.counts == (2, 4, 0) and tokens.first_position is not None
    assert Layout.of(tokens, 2).first[0, :3].tolist() == [2, 0, 2]
    given = {"mask": torch.ones(3, 2), "past": torch.tensor([2, 4, 0])}
    then = Tokens.of((3, 2), "cpu", first_position=tokens.first_position, **given)
    assert then.rotary_pos.tolist() == [4, 5, 4, 5, 0, 1]
    positions = torch.tensor([[4, 5], [4, 5], [7, 8]])  # the last row begins now
    then = Tokens.of((3, 2), "cpu", position_ids=positions, first_position=tokens.first_position, **given)
    assert then.first_position is not None and then.first_position.tolist() == [2, 0, 7]
    with pytest.raises(InvalidInput, match="from its cached tokens on"):
        Tokens.of((3, 2), "cpu", position_ids=positions + 1, first_position=tokens.first_position, **given)
    whole = Tokens.of((2, 4), "cpu", position_ids=torch.tensor([[5, 6, 7, 8], [0, 1, 2, 3]]))
    assert whole.rectangular and Layout.of(whole, 2).first.tolist() == [[5, 7], [0, 2]]
    packed = Tokens.of((1, 5), "cpu", position_ids=torch.tensor([[3, 4, 0, 1, 2]]))
    assert packed.counts == (2, 3) and packed.first_position is not None and packed.first_position.tolist() == [3, 0]


def test_a_past_continues() -> None:
    mask = torch.tensor([[1, 1], [0, 1]])
    tokens = Tokens.of((2, 2), "cpu", mask=mask, past=torch.tensor([5, 7]))
    assert tokens.pos.tolist() == [5, 6, 7] and tokens.longest == 8 and not tokens.fresh and tokens.counts == (2, 1)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"attention_mask: expected \[B, T\]=\[2, 3\]"):
        Tokens.of((2, 3), "cpu", mask=torch.ones(2, 4))
    with pytest.raises(InvalidInput, match="restart at 0"):
        Tokens.of((1, 4), "cpu", position_ids=torch.tensor([[0, 1, 5, 6]]))
