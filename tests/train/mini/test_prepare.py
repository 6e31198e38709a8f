"""`prepare` writes what training reads, the same each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiers import swept
from tokenizers import Tokenizer

import longreach
from longreach.errors import InvalidInput
from longreach.tasks import haystack
from longreach.tasks.words import evaluation_words
from longreach.testing.tiny import tiny_tokenizer
from longreach.train.mini import corpus
from longreach.train.mini.batches import batch
from longreach.train.mini.materials import load_materials
from longreach.train.mini.prepare import prepare

MODEL = Path(longreach.__file__).parent / "models" / "longreach-mini"


@pytest.mark.parametrize("names", swept([(["one"],), (["one", "two"],)], 1), ids=len)
def test_prepared_data_trains(names: list[str], tmp_path: Path) -> None:
    options = {"limit_files": 6, "packages": ("cpython", "numpy"), "vocab_size": 1500}
    said: list[str] = []
    manifests = [
        prepare(tmp_path / name, haystack=tmp_path / f"{name}-haystack", say=said.append, **options)  # type: ignore[arg-type]
        for name in names
    ]
    assert manifests[0] == manifests[-1] == json.loads((tmp_path / "one" / "manifest.json").read_text())
    for name in ("tokenizer.json", "prose.bin.xz", "words.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / names[-1] / name).read_bytes()
    assert "training the tokenizer" in said and (tmp_path / "one-haystack" / "haystack.txt").read_text().strip()
    assert Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json")).get_vocab_size() == 1500
    assert manifests[0]["haystack_sha256"] == haystack.sha256()
    materials = load_materials(tmp_path / "one")
    assert not set(materials.words) & evaluation_words()
    assert manifests[0]["tokens"] == {"prose": len(materials.prose.tokens), "code": len(materials.code.tokens)}
    assert batch(materials, "0", 600, 4, 0.2).tokens.shape == (4, 601)


def test_the_shipped_haystack_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(haystack.__file__).parent
    monkeypatch.setattr(corpus, "write_haystack", lambda _, where: pytest.fail(f"{where} is written"))
    before = haystack.sha256()
    options = {"limit_files": 6, "packages": ("cpython", "numpy")}
    said: list[str] = []
    prepare(tmp_path, tokenizer=MODEL, say=said.append, **options)  # type: ignore[arg-type]
    assert json.loads((folder / "haystack.json").read_text())["sha256"] == before
    # the text in the tokens of an existing model
    assert "training the tokenizer" not in said
    made, given = (Tokenizer.from_file(str(where / "tokenizer.json")) for where in (tmp_path, MODEL))
    assert made.get_vocab() == given.get_vocab()
    tokens = load_materials(tmp_path).code.tokens[:5000].tolist()
    assert "import " in given.decode(tokens) and max(tokens) > 5000


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: expected a tokenizer, and it cannot be read"):
        prepare(tmp_path / "data", tokenizer=tmp_path, say=lambda _: None)
    tiny_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidInput, match="expected a tokenizer of longreach-mini"):
        prepare(tmp_path / "data", tokenizer=tmp_path, say=lambda _: None)
    assert not (tmp_path / "data").exists()
