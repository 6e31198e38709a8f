"""Batches: the same for the same seed, plain text supervised as text."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np

from longreach.train.mini.batches import NAMES, BatchFactory, batch, plain
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import TEXT


def test_plain_text_is_all_supervised_as_text(materials: Materials) -> None:
    tokens, kinds = plain(Random(0), 256, materials)
    assert (kinds == TEXT).all() and tokens.shape == (257,)


def test_the_same_seed_gives_the_same_batch(materials: Materials) -> None:
    first, again, other = (batch(materials, seed, 512, 3, 0.2) for seed in ("0/1", "0/1", "0/2"))
    assert (first.tokens == again.tokens).all() and (first.forms == again.forms).all()
    assert (first.tokens != other.tokens).any()


def test_shares_are_as_asked_for(materials: Materials) -> None:
    assert (batch(materials, "0/1", 512, 20, 1.0).forms == 0).all() and NAMES[0] == "text"
    assert len(set(batch(materials, "0/1", 512, 40, 0.0).forms.tolist()) - {0}) > 4


def test_workers_deliver_in_order(data: Path, materials: Materials) -> None:
    factory = BatchFactory(data, 0.1, 2, "7")
    try:
        for length in (512, 600, 700):
            factory.ask(length, 2)
        made = [factory.take() for _ in range(3)]
    finally:
        factory.close()
    assert [b.length for b in made] == [512, 600, 700] and factory.pending == 0
    assert np.array_equal(made[2].tokens, batch(materials, "7/2", 700, 2, 0.1).tokens)
