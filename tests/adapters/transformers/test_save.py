"""Model directories that `load` reads: dtypes, ties, files that are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longreach.adapters.transformers import load, save
from longreach.adapters.transformers.mka import convert
from longreach.testing.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_saved_model_is_loaded_in_the_dtype_asked_for(tmp_path: Path, dtype: Any) -> None:
    model = tiny_model("llama")
    (tmp_path / "other.json").write_text("{}")
    before = model.config.dtype
    for _ in range(2):  # the second time files are replaced
        save(model, tiny_tokenizer(), tmp_path, dtype=dtype)
    assert (tmp_path / "other.json").read_text() == "{}" and not [*tmp_path.glob("*part*")]
    assert model.dtype == torch.float32 and model.config.dtype == before
    written = load_file(tmp_path / "model.safetensors")
    assert {x.dtype for x in written.values()} == {dtype or torch.float32}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype or torch.float32).split(".")[1]
    again, tokenizer = load(tmp_path)
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], x if dtype is None else x.to(dtype).float())
    assert tokenizer("a").input_ids == tiny_tokenizer()("a").input_ids


def test_tied_weights_are_written_once_and_planes_as_they_are(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    convert(model, "fastmka", tiers=(1, 3), recall="hash", bits=16, block=4, window=8)
    save(model, tiny_tokenizer(), tmp_path, dtype=torch.float16)
    written = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in written and written["model.embed_tokens.weight"].dtype == torch.float16
    planes = {name: x for name, x in written.items() if name.endswith(".planes")}
    held = model.state_dict()
    assert len(planes) == 2 and all(
        torch.equal(x, held[name]) and x.dtype == held[name].dtype for name, x in planes.items()
    )
