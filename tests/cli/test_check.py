"""`longreach check`: whether a model works, from its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused


def test_a_model_that_works(longreach: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "gemma2")
    result = longreach("check", tmp_path / "model")
    assert result.code == 0
    words = " ".join(result.out.split())
    assert "longreach works with Gemma2ForCausalLM" in words and "1 layers of full attention" in words
    assert "sliding window of" in words and "kascade yes, with a plan made of the first prompt" in words
    assert all(f"{n}K" in words for n in (8, 32, 128)) and "beyond the model's context" in words


def test_a_hybrid_model(longreach: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_next")
    result = longreach("check", tmp_path / "model")
    words = " ".join(result.out.split())
    assert result.code == 0 and "longreach works with Qwen3NextForCausalLM" in words
    assert "2 layers of full attention; 2 layers with a recurrent state, which transformers computes" in words


def test_the_shipped_model(longreach: Any) -> None:
    result = longreach("check", "mini")
    words = " ".join(result.out.split())
    assert result.code == 0 and "yes, with the plan kascade-longreach-mini" in words and "96.0 MiB" in words
    found = json.loads(longreach("check", "mini", "--json").out)
    assert found["kv_bytes"]["8192"] == 8192 * 12 * 2 * 4 * 64 * 2 and found["shape"]["layers"] == 12


def test_a_model_that_does_not(longreach: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    result = longreach("check", tmp_path)
    assert result.code == 1 and "longreach does not work with" in result.out and "'t5'" in result.out
    assert json.loads(longreach("check", tmp_path, "--json").out)["refused"]


def test_no_model(longreach: Any, tmp_path: Path) -> None:
    refused(longreach("check", tmp_path), "is no model directory: it has no config.json")
