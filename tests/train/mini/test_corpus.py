"""The corpus: what is read of packages, and that nothing of the haystack is left in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from longreach.errors import LongreachError
from longreach.train.mini import corpus
from longreach.train.mini.overlap import OverlapIndex


def test_tags_become_paragraphs_and_items() -> None:
    text = (
        "<p>Starts a   <code>job</code>.</p> <p>Options &amp; limits:</p><ul> <li> <p>one</p> </li><li>two</li> </ul>"
    )
    assert corpus.without_tags(text) == "Starts a job.\n\nOptions & limits:\n\n- one\n\n- two"


def test_descriptions_of_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = "A service that keeps things for whoever asks. " * 5, "A name."
    model = {"documentation": f"<p>{long}</p>", "shapes": {"Name": {"documentation": short, "type": "string"}}}
    folder = tmp_path / "data" / "keeper" / "2020-01-01"
    folder.mkdir(parents=True)
    (folder / "service-2.json.gz").write_bytes(gzip.compress(json.dumps(model).encode()))
    monkeypatch.setattr(corpus, "package_root", lambda name: tmp_path)
    (path, texts), (_, shorts) = corpus.descriptions("keeper")
    assert path == "data/keeper/2020-01-01/service-2.json.gz" and texts == long.strip() and shorts == short


def test_nothing_of_the_haystack_is_left() -> None:
    said: list[str] = []
    made = corpus.build(30, ("cpython", "numpy"), said.append)
    assert made.haystack and made.prose and made.code and said[:2] == ["reading cpython", "reading numpy"]
    index = OverlapIndex(made.haystack)
    assert not any(index.hits(text) for text in [*made.prose, *made.code])
    assert made.manifest["overlap_hits"] == 0 and [s["package"] for s in made.manifest["sources"]] == [
        "cpython",
        "numpy",
    ]
    assert made.manifest["characters"]["prose"] == sum(map(len, made.prose))
    assert sum(made.manifest["prose_collected"].values()) >= 0.5 * made.manifest["characters"]["prose"]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corpus.PACKAGES, "no-such-package", "MIT")
    monkeypatch.setitem(corpus.PACKAGES, "nor_this", "MIT")
    with pytest.raises(LongreachError, match=r"needs the package no-such-package; install it .*longreach\[corpus\]"):
        corpus.package_root("no-such-package")
    said: list[str] = []
    with pytest.raises(LongreachError, match=r"no-such-package, nor_this; install them .*longreach\[corpus\]"):
        corpus.build(1, ("cpython", "no-such-package", "nor_this"), said.append)
    assert not said  # before anything is read


def test_what_is_held_out_besides_leaves_the_training_text() -> None:
    free = corpus.build(25, ("cpython",), lambda _: None)
    paragraph = next(text for text in free.prose if len(text) > 300)
    kept = corpus.build(25, ("cpython",), lambda _: None, [paragraph])
    index = OverlapIndex([paragraph])
    assert any(index.hits(text) for text in free.prose) and not any(index.hits(text) for text in kept.prose)
