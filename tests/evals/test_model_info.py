"""A model's entry in records."""

from __future__ import annotations

from pathlib import Path

from longreach.adapters.transformers import load
from longreach.evals.model_info import model_info
from longreach.testing.tiny import save_tiny


def test_records_name_the_default_plans_of_their_model(tmp_path: Path) -> None:
    model, _ = load("mini")
    assert set(model_info(model, "mini")["plans"]) == {"kascade", "loki", "magicpig"}
    save_tiny(tmp_path / "tiny", "llama")
    model, _ = load(tmp_path / "tiny")
    assert "plans" not in model_info(model, str(tmp_path / "tiny"))
