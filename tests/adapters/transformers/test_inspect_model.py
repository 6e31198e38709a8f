"""What is said of a model from its configuration alone, against attaching to the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from longreach.adapters.transformers import attach, inspect_model
from longreach.adapters.transformers.inspect_model import without_weights
from longreach.cache import CacheConfig
from longreach.errors import LongreachError, ModelFileError
from longreach.methods.registry import METHODS
from longreach.testing.tiny import FAMILIES, random_tokens, save_tiny, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_attach_does(family: str, tmp_path: Path) -> None:
    found = inspect_model(save_tiny(tmp_path, family))
    model = tiny_model(family)
    assert found.refused is None and found.name == type(model).__name__
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert [*found.methods] == [*METHODS]
    for method, reason in found.methods.items():
        try:
            attach(model, decode=method).close()
        except LongreachError as error:
            assert reason == str(error)
        else:
            assert reason is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_memory_is_that_of_a_cache(family: str, tmp_path: Path) -> None:
    """Layers with sliding windows keep all tokens too."""
    found = inspect_model(save_tiny(tmp_path, family))
    model = tiny_model(family)
    with attach(model, cache=CacheConfig(capacity=100)):
        held = model(random_tokens(2, 30)).past_key_values.kv.nbytes
    assert found.kv_bytes(100, batch=2, element=4) == held


def test_no_memory_is_taken(tmp_path: Path) -> None:
    made = without_weights(save_tiny(tmp_path))
    assert all(p.device == torch.device("meta") for p in made.parameters())
    (tmp_path / "model.safetensors").unlink()
    assert inspect_model(tmp_path / "config.json") == inspect_model(tmp_path)


def test_the_shipped_model_and_its_plans() -> None:
    found = inspect_model("mini")
    assert found.plans == {name: f"{name}-longreach-mini" for name in ("kascade", "loki", "magicpig")}
    assert found.limit == 16384 and not any(found.methods.values())


def written(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    config = AutoConfig.for_model("jetmoe", num_hidden_layers=1, hidden_size=32, vocab_size=32)
    config.num_kv_shared_layers = 1
    config.save_pretrained(tmp_path)
    found = inspect_model(tmp_path)
    assert "shares keys and values" in str(found.refused) and found.shape is None and found.methods == {}
    found = inspect_model(written(tmp_path, model_type="t5"))
    assert "cannot make a causal language model of type 't5'" in str(found.refused)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no_such"}'])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"its config\.json could not be read"):
        inspect_model(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no model directory at"):
        inspect_model(tmp_path / "none")
    with pytest.raises(ModelFileError, match=r"it has no config\.json"):
        inspect_model(tmp_path)
