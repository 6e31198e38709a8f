"""Training sequences say what they should: the answer stands in the text, and the loss covers it alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from longreach.tasks.needle import training_episode
from longreach.train.mini.batches import ANSWER, PADDING, TEXT, Filler, Renderer, load_renderer
from longreach.train.mini.config import BOS_ID, EOS_ID, PAD_ID


@pytest.fixture(scope="module")
def renderer(data: Path) -> Renderer:
    return load_renderer(data, 0.2)


@pytest.mark.parametrize("seed", range(8))
def test_answers_stand_in_the_context_and_end_with_eos(renderer: Renderer, seed: int) -> None:
    random = Random(seed)
    episode = training_episode(random, renderer.train_keys, 3)
    tokens, kinds = renderer.episode(random, 512, episode, renderer.mixture.prose)
    assert tokens.shape == (513,) and kinds.shape == (512,)
    assert tokens[0] == BOS_ID and (tokens[1:][kinds == PADDING] == PAD_ID).all()
    supervised = tokens[1:][kinds == ANSWER]
    answers = renderer.tokenizer.decode(supervised.tolist(), skip_special_tokens=False).split("</s>")[:-1]
    asked = [episode.needles[i] for i in episode.asked]
    assert answers == [n.answer for n in asked]
    first_question = int(np.flatnonzero(kinds == ANSWER)[0])
    context = renderer.tokenizer.decode(tokens[: first_question + 1].tolist())
    for needle in asked:
        assert context.count(needle.statement) == 1
    assert (supervised == EOS_ID).sum() == len(asked)


def retokenised(renderer: Renderer, random: Random, filler: Filler) -> tuple[list[int], list[int]]:
    """A rendered sequence up to its first answer (EOS parts what follows), and the tokens of its text."""
    tokens, kinds = renderer.episode(random, 512, training_episode(random, renderer.train_keys, 3), filler)
    rendered = tokens[1 : int(np.flatnonzero(kinds == ANSWER)[0]) + 1].tolist()
    text = renderer.tokenizer.decode(rendered, skip_special_tokens=False)
    return rendered, renderer.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("seed", range(40))
def test_a_sequence_is_the_tokenisation_of_its_text(renderer: Renderer, seed: int) -> None:
    rendered, again = retokenised(renderer, Random(seed), renderer.mixture.prose)
    assert again == rendered


def test_special_tokens_that_filler_spells_are_those_tokens(renderer: Renderer) -> None:
    text = "\n\n".join(['The start token, "<s>" if not given. The end token defaults to "</s>"; see below.'] * 60)
    filler = Filler(np.asarray(renderer.encode([text])[0], dtype=np.uint16), renderer.tokenizer)
    rendered, again = retokenised(renderer, Random(0), filler)
    assert again == rendered and BOS_ID in rendered and EOS_ID in rendered


def test_plain_text_is_all_supervised_as_text(renderer: Renderer) -> None:
    tokens, kinds = renderer.text(Random(0), 256)
    assert (kinds == TEXT).all() and tokens.shape == (257,)


def test_the_same_seed_gives_the_same_batch(renderer: Renderer) -> None:
    first, again, other = (renderer.batch(s, 256, 2)[0] for s in ("0/1", "0/1", "0/2"))
    assert (first == again).all() and (first != other).any()
    assert (renderer.batch("0/1", 256, 2, dev=True)[0] != first).any()
