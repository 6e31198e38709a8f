"""Pages are the tokenisation of their own text, and the loss covers answers alone."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from longreach.errors import LongreachError
from longreach.train.mini.config import BOS_ID, EOS_ID, PAD_ID
from longreach.train.mini.filler import Filler
from longreach.train.mini.forms import FORMS
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import ANSWER, PADDING, Exchange, Page, asked, hidden, lined, render, taken


@pytest.mark.parametrize("length", [512, 1024, 2500])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_at_every_length(materials: Materials, form: str, length: int) -> None:
    for seed in range(6):
        page = FORMS[form][0](Random(seed), length - 1, materials)
        tokens, kinds = render(materials, page, length)
        assert tokens.shape == (length + 1,) and kinds.shape == (length,)
        assert tokens[0] == BOS_ID and (tokens[1:][kinds == PADDING] == PAD_ID).all()
        assert page.exchanges and (kinds != PADDING).mean() > 0.4
        supervised = materials.tokenizer.decode(tokens[1:][kinds == ANSWER].tolist(), skip_special_tokens=False)
        answers = [materials.tokenizer.decode(answer) for _, answer in page.exchanges]
        assert supervised == "".join(f"{answer}</s>" for answer in answers)
        # what the evaluation would feed: the tokens of the text as a whole, up to where the answer goes on
        asked_first = [*page.context, *page.exchanges[0][0]]
        text = materials.tokenizer.decode(asked_first, skip_special_tokens=False)
        assert text.count("\n\n") and materials.tokens(text) == asked_first


def test_statements_are_hidden_whole_and_in_order(materials: Materials) -> None:
    statements = [f"Statement {i} stands here." for i in range(5)]
    for seed in range(40):
        context = hidden(Random(seed), materials, materials.prose, statements, 500, "An introduction.")
        text = materials.tokenizer.decode(context, skip_special_tokens=False)
        places = [text.find(s) for s in statements]
        assert len(context) <= 500 and text.startswith("An introduction.\n\n") and text.endswith("\n\n")
        assert places[0] > 0 and all(a < b for a, b in pairwise(places))


def test_special_tokens_that_filler_spells_are_those_tokens(materials: Materials) -> None:
    text = "\n\n".join(['The start token, "<s>" if not given. The end token defaults to "</s>"; see below.'] * 60)
    filler = Filler(np.asarray(materials.tokens(text), dtype=np.uint16), materials.tokenizer)
    context = hidden(Random(0), materials, filler, ["One fact."], 400)
    again = materials.tokens(materials.tokenizer.decode(context, skip_special_tokens=False))
    assert again == context and BOS_ID in context and EOS_ID in context


def test_lines_keep_the_order_of_the_fixed_ones(materials: Materials) -> None:
    fixed = [f"Line {i}." for i in range(4)]
    for room in (60, 200, 700):
        context = lined(Random(room), materials, "Head\n", fixed, lambda: "Others.", room)
        text = materials.tokenizer.decode(context)
        assert text.startswith("Head\n") and text.endswith("\n\n") and room - 12 < len(context) <= room
        assert [line for line in text.split("\n")[1:] if line.startswith("Line")] == fixed


def test_questions_that_do_not_fit_are_left_out(materials: Materials) -> None:
    exchanges = [Exchange(f"What is number {i}?", f" {i}") for i in range(9)]
    pairs = asked(materials, exchanges, 30)
    assert 0 < len(pairs) < 9 and taken(pairs) <= 30 < taken(asked(materials, exchanges[: len(pairs) + 1], 300))


def test_a_page_that_is_too_long_is_an_error(materials: Materials) -> None:
    with pytest.raises(LongreachError, match="12 tokens where 11 fit"):
        render(materials, Page([5] * 11, []), 10)
