"""Load a model directory, or say in one sentence what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longreach import load
from longreach.adapters.transformers import device_of, model_path, shape_at, shape_of
from longreach.errors import InvalidInput, ModelFileError, OutOfMemory
from longreach.testing.tiny import FAMILIES, save_tiny, tiny_model
from tests.adapters.transformers.reference import prompt


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, saved: Path) -> Path:
    """The same model in several files with an index."""
    path = tmp_path_factory.mktemp("model") / "sharded"
    shutil.copytree(saved, path)
    (path / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


@pytest.mark.parametrize("kind", ["saved", "sharded"])
def test_model_and_tokenizer_come_back(kind: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = load(request.getfixturevalue(kind))
    assert model.dtype == torch.float32 and not model.training and model.device.type == "cpu"
    assert torch.allclose(model(prompt()).logits, tiny_model("llama")(prompt()).logits, rtol=0, atol=1e-4)
    text = "Ünïcode, 1234\n and more"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_the_dtype_is_fp32_on_the_cpu_unless_asked(folder: Path) -> None:
    weights = {name: w.bfloat16() for name, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert load(folder)[0].dtype == torch.float32
    assert load(folder, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_what_is_no_model_directory(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no model directory at .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=r"no model directory at .*config\.json"):
        load(folder / "config.json")
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no config\.json"):
        load(folder)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _without_a_tensor(path: Path) -> None:
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (lambda p: _truncate(p / "model.safetensors"), r"model\.safetensors is truncated"),
    "empty weights": (lambda p: (p / "model.safetensors").write_bytes(b""), "truncated or no safetensors file"),
    "weights that are text": (lambda p: (p / "model.safetensors").write_text("a pointer to a file"), "no safetensors"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"has no model\.safetensors"),
    "a tensor too few": (lambda p: _without_a_tensor(p / "model.safetensors"), "1 tensors .* are missing.*up_proj"),
    "another width": (lambda p: _edit(p / "config.json", lambda c: c.update(intermediate_size=48)), "another shape"),
    "another depth": (lambda p: _edit(p / "config.json", lambda c: c.update(num_hidden_layers=3)), "are missing"),
    "an unknown family": (lambda p: _edit(p / "config.json", lambda c: c.update(model_type="nobody")), "could not be"),
    "a config that is no JSON": (lambda p: (p / "config.json").write_text("{"), "config and weights could not be"),
    "a config that is a list": (lambda p: (p / "config.json").write_text("[]"), "config and weights could not be"),
    "broken stop tokens": (lambda p: (p / "generation_config.json").write_text("{"), "generation_config.json.*JSON"),
    "no tokenizer": (
        lambda p: [(p / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        "its tokenizer could not be loaded",
    ),
    "a broken tokenizer": (lambda p: (p / "tokenizer.json").write_text("{}"), "its tokenizer could not be loaded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_directories(folder: Path, name: str) -> None:
    harm, message = BROKEN[name]
    harm(folder)
    with pytest.raises(ModelFileError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: next(p.glob("model-00002*")).unlink(), r"has no model-00002-of-.*\.safetensors"),
        (lambda p: _truncate(next(p.glob("model-00002*"))), "model-00002-of-.* is truncated"),
        (lambda p: (p / "model.safetensors.index.json").write_text("{"), "no valid safetensors index"),
        (lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["b"]}}'), "no valid"),
        (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "no valid safetensors index"),
    ],
    ids=["missing shard", "truncated shard", "no JSON", "lists", "a list"],
)
def test_broken_shards(sharded: Path, tmp_path: Path, harm: Callable[[Path], Any], message: str) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "copy"))
    harm(path)
    with pytest.raises(ModelFileError, match=message):
        load(path)


def test_tensors_that_nobody_uses_are_told(folder: Path) -> None:
    weights = {**load_file(folder / "model.safetensors"), "model.layers.0.extra": torch.zeros(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="does not use 1 tensors of the checkpoint, such as model.layers.0.extra"):
        load(folder)


def test_devices(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(InvalidInput, match="CUDA was requested, but torch finds no GPU"):
        load(saved, device="cuda")
    with pytest.raises(InvalidInput, match="'toaster' is no device; use 'cpu', 'cuda' or 'auto'"):
        load(saved, device="toaster")
    with pytest.raises(InvalidInput, match="not on 'meta'"):
        load(saved, device="meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of("auto").type == "cuda" and device_of("cuda:0").index == 0
    with pytest.raises(InvalidInput, match="'cuda:1' does not exist; torch finds 1 GPUs"):
        device_of("cuda:1")


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(OutOfMemory, match="does not fit into the memory of cpu; try --dtype bfloat16"):
        load(saved)


def test_the_shipped_model_has_a_name() -> None:
    assert model_path("mini").name == "longreach-mini"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_of_a_folder_is_that_of_its_model(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / family, family)
    assert shape_at(path) == shape_of(load(path)[0]) == shape_of(tiny_model(family))


def test_the_shape_of_what_is_no_model(tmp_path: Path, folder: Path) -> None:
    assert shape_at("mini") == shape_of(load("mini")[0])
    for content in ("{", "[]", '{"model_type": "no_such"}', "{}"):
        (folder / "config.json").write_text(content)
        with pytest.raises(ModelFileError, match=r"config.json could not be read"):
            shape_at(folder)
    with pytest.raises(ModelFileError, match="no model directory"):
        shape_at(tmp_path / "none")
