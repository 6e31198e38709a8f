"""The shipped model answers, and the evaluation's record says what was asked and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longreach.adapters.transformers import model_path
from longreach.cli.main import main
from longreach.errors import ModelFileError
from longreach.records import wilson
from longreach.tasks import haystack
from longreach.train.mini.evaluate import evaluate, training_overlap


def test_the_shipped_model_finds_needles_and_only_needles() -> None:
    record = evaluate("mini", samples=4, length=1024, seed=7)
    assert record["right"] == 4 and record["control_right"] == 0
    assert record["interval_95"] == wilson(4, 4)
    assert record["haystack_sha256"] == haystack.sha256()
    assert record["config"]["length"] == 1024 and len(record["samples"]) == 4
    for sample in record["samples"]:
        assert 850 <= sample["tokens"] <= 1024 and sample["expected"] in sample["answer"]
    depths = [s["depth"] for s in record["samples"]]
    assert all(i / 4 <= d < (i + 1) / 4 for i, d in enumerate(depths))


def test_a_record_says_what_training_and_haystack_share(tmp_path: Path) -> None:
    """As counted when the training text was made; unknown where that was not for this haystack."""
    shipped = training_overlap(model_path("mini"))
    assert shipped == {"characters": 64, "stretches": 0}
    assert evaluate("mini", samples=1, length=300)["training_overlap"] == shipped
    corpus = {"overlap_window": 64, "overlap_hits": 5, "haystack_sha256": haystack.sha256()}
    assert training_overlap(tmp_path) is None
    (tmp_path / "corpus.json").write_text(json.dumps(corpus))
    assert training_overlap(tmp_path) == {"characters": 64, "stretches": 5}
    (tmp_path / "corpus.json").write_text(json.dumps({**corpus, "haystack_sha256": "other"}))
    assert training_overlap(tmp_path) is None
    for wrong in ("[]", "{", json.dumps({"haystack_sha256": haystack.sha256()})):
        (tmp_path / "corpus.json").write_text(wrong)
        with pytest.raises(ModelFileError, match=r"corpus\.json is not as training writes it"):
            training_overlap(tmp_path)


def test_the_shipped_model_is_small_enough() -> None:
    assert sum(p.stat().st_size for p in model_path("mini").iterdir()) <= 36_000_000


def test_nothing_to_do_is_an_error(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["train", "mini", "--device", "cpu"]) == 2
    assert "nothing to do" in capsys.readouterr().err


def test_an_unwritable_record(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "record.json")
    arguments = ["train", "mini", "--evaluate", "--samples", "1", "--length", "300", "--device", "cpu"]
    assert main([*arguments, "--output", place]) == 2
    assert "cannot write" in capsys.readouterr().err
