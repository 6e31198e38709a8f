"""Tiny models, a tokenizer of bytes, and sources of sequences."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.train.mini.conftest import data  # noqa: F401 - a fixture

from longreach.adapters.transformers.mka import convert
from longreach.evals.perplexity import Text
from longreach.testing.tiny import tiny_model, tiny_tokenizer
from longreach.train.mka.data import TextSource


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


def text(tokens: int, name: str = "text", seed: int = 0) -> Text:
    """A text of random bytes."""
    random = Random(seed)
    return Text(name, f"{seed:064d}", tokens, tuple(random.randrange(32, 127) for _ in range(tokens)))


@pytest.fixture
def source(tokenizer: Any) -> TextSource:
    return TextSource([text(3000)], tokenizer, (48, 24))


@pytest.fixture
def teacher() -> Any:
    return tiny_model("llama")


@pytest.fixture
def student() -> Any:
    """The teacher with FastMKA, away from gate 0."""
    return convert(tiny_model("llama"), "fastmka", gate=0.5)
