"""A tiny corpus of real text and what the recipe makes of it, shared by these tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longreach.tasks import haystack
from longreach.testing.recipe import SHAPE
from longreach.train.mini.keys import KeySource
from longreach.train.mini.materials import Materials, load_materials
from longreach.train.mini.prepare import task_text, write_tokens
from longreach.train.mini.tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `prepare` writes it, from a little of the shipped text."""
    folder = tmp_path_factory.mktemp("data")
    paragraphs = haystack.paragraphs()
    texts = ["\n\n".join(paragraphs[i : i + 10]) for i in range(0, 600, 10)]
    words = KeySource().nouns[:50]
    tokenizer = train_tokenizer([*texts, *task_text(words, 20)], SHAPE.vocab_size, number_repeats=40)
    save_tokenizer(tokenizer, folder, SHAPE.max_position_embeddings)
    for kind in ("prose", "code"):
        write_tokens(folder / f"{kind}.bin.xz", texts, tokenizer)
    manifest = {"overlap_window": 64, "overlap_hits": 3, "haystack_sha256": haystack.sha256()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "words.json").write_text(json.dumps(words))
    return folder


@pytest.fixture(scope="session")
def materials(data: Path) -> Materials:
    return load_materials(data)
