"""`longreach mka routing`: weights of the memory levels, against values that follow from the router's parameters."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.adapters.transformers import load, save
from longreach.adapters.transformers.mka import convert
from longreach.errors import InvalidInput
from longreach.evals.mka_routing import edges_of, levels_of, measure
from longreach.testing.tiny import tiny_model, tiny_tokenizer
from tests.cli.test_bad_input import refused

LAMBDA = (0.5, 0.3, 0.2)  # where all three levels have keys
GATES = ((0.0, 0.0, 0.0), (1.0, 1.0, 3.0))  # of layers 0 and 1
SMALL: dict[str, Any] = {"block": 8, "window": 16, "blocks": 2}


def routed(variant: str, **options: Any) -> Any:
    """A tiny model of two layers whose routers give LAMBDA for every query."""
    torch.manual_seed(0)
    model = convert(tiny_model("llama", eos_token_id=258), variant, **options)
    for layer, levels in levels_of(model).items():
        count = len(levels.config.tiers)
        levels.router.gate.bias.data = torch.tensor(GATES[layer][:count])
        if levels.config.routing != "fixed":
            torch.nn.init.zeros_(levels.router.down.weight)
            levels.router.down.bias.data = torch.tensor([math.log(x) for x in LAMBDA[:count]])
    return model


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 tokens."""
    path = tmp_path_factory.mktemp("texts") / "book.txt"
    path.write_text(("Nine hens laid eggs, and the fox slept. " * 5)[:200])
    return path


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "block"
    save(routed("block_mka", **SMALL), tiny_tokenizer(), folder)
    return folder


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-6)


def test_block_mka_by_hand(longreach: Any, block: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "routing.json"
    result = longreach("mka", "routing", block, "--text", book, "--length", 64, "--limit", 2, "--output", out)
    assert result.code == 0, result.err
    record = json.loads(out.read_text())
    assert (record["kind"], record["format"], record["model"]["name"]) == ("mka routing", 1, "block")
    assert record["config"] == {"length": 64, "windows": 2, "limit": 2} and record["files"][0]["tokens"] == 200
    assert {"commit", "dirty", "versions", "device", "python"} <= set(record)
    assert record["options"]["variant"] == "block_mka"
    results = record["results"]
    assert results["levels"] == [1, 2, 3] and results["tokens"] == 128
    assert results["positions"] == [{"start": n, "stop": n + 8} for n in range(0, 64, 8)]
    assert list(results["layers"]) == ["0", "1"]
    alone = [[1.0, 0.0, 0.0]] * 3  # blocks of 8, two before a row's own: the window is all up to position 23
    closed, opened = results["layers"]["0"], results["layers"]["1"]
    for layer in (closed, opened):
        assert layer["by_position"]["lambda"] == [near(x) for x in (*alone, *[list(LAMBDA)] * 5)]
        assert layer["lambda"] == near([(3 + 5 * 0.5) / 8, 5 * 0.3 / 8, 5 * 0.2 / 8])
    assert (closed["gate"], opened["gate"]) == ([0.0] * 3, [1.0, 1.0, 3.0])
    assert closed["by_position"]["weight"] == [near(x) for x in (*alone, *[[1.0, 0.0, 1.0]] * 5)]
    weights = [0.5, 0.3, 1 + 3 * (0.2 - 1)]
    assert opened["by_position"]["weight"] == [near(x) for x in (*alone, *[weights] * 5)]
    assert opened["weight"] == near([(3 + 5 * 0.5) / 8, 5 * 0.3 / 8, 5 * weights[2] / 8])
    lines = result.out.splitlines()
    assert lines[0].split() == ["layer", "lambda", "1", "2", "3", "weight", "1", "2", "3", "gate", "1", "2", "3"]
    assert lines[2].split() == ["1", "0.688", "0.188", "0.125", "0.688", "0.188", "-0.875", "1.000", "1.000", "3.000"]
    assert lines[3].split()[0] == "mean" and "2 windows of 64 tokens. Levels: 1 local, 2 session," in result.out
    assert lines[-4].split() == ["56-63", "0.500", "0.300", "0.200", "0.750", "0.150", "-0.200"]
    drawn = longreach("report", out, "--output", tmp_path / "report")
    assert drawn.code == 0 and str(tmp_path / "report" / "mka-routing-levels.png") in drawn.out.split()


@pytest.mark.parametrize(
    ("variant", "options", "expected"),
    [
        ("fastmka", {}, (0.625, 0.375)),
        ("fastmka", {"routing": "fixed"}, (0.5, 0.5)),
        ("fastmka", {"routing": "top1"}, (1.0, 0.0)),
        ("mka", {**SMALL, "mode": "softmaxes"}, LAMBDA),
        ("mka", {**SMALL, "mode": "gated", "routing": "fixed"}, (1 / 3, 1 / 3, 1 / 3)),
        ("mka", {**SMALL, "tiers": (1, 3)}, (0.625, 0.375)),
    ],
)
def test_lambda_of_all_variants(variant: str, options: dict[str, Any], expected: tuple[float, ...]) -> None:
    model = routed(variant, **options)
    results = measure(model, [list(range(60)), list(range(60, 120))])
    assert results["levels"] == list(next(iter(levels_of(model).values())).config.tiers)
    for layer in results["layers"].values():
        assert layer["by_position"]["lambda"][-1] == near(list(expected))
    start = [1.0, *[0.0] * (len(expected) - 1)]
    assert results["layers"]["0"]["weight"] == near(start)
    gates = GATES[1][: len(expected)]
    last = results["layers"]["1"]["by_position"]["weight"][-1]
    assert last == near([s + gate * (x - s) for s, gate, x in zip(start, gates, expected, strict=True)])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_trained_router_has_the_means_of_its_rows() -> None:
    """Routers that look at queries: means of parts and windows are those of the weights of single rows."""
    torch.manual_seed(0)
    model = convert(tiny_model("llama", eos_token_id=258), "fastmka", gate=0.5, layers=(1,))
    torch.nn.init.normal_(levels_of(model)[1].router.down.weight)
    windows, rows = [list(range(20)), list(range(40, 60))], []
    hook = levels_of(model)[1].router.register_forward_hook(lambda _, __, weights: rows.append(weights.detach()))
    found = measure(model, windows)
    hook.remove()
    assert list(found["layers"]) == ["1"]
    both = torch.stack(rows).double().mean(0)
    assert found["layers"]["1"]["weight"] == near(both.mean(0).tolist())
    assert found["layers"]["1"]["lambda"] == near(
        [1 + 2 * (both[:, 0].mean().item() - 1), 2 * both[:, 1].mean().item()]
    )
    edges = edges_of(20)
    assert edges == [0, 2, 5, 7, 10, 12, 15, 17, 20] and edges_of(3) == [0, 1, 2, 3]
    parts = [both[a:b].mean(0).tolist() for a, b in pairwise(edges)]
    assert found["layers"]["1"]["by_position"]["weight"] == [near(part) for part in parts]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--length", 0], ["--length", "at least 1"]),
        (["--length", 300], ["the longest text has 200 tokens, a window takes 299", "lower --length"]),
        (["--text", "missing.txt"], ["cannot read missing.txt"]),
        (["--output", "/tmp"], ["cannot write /tmp", "choose another --output"]),
    ],
)
def test_what_is_refused(longreach: Any, block: Path, book: Path, change: list[Any], words: list[str]) -> None:
    text = [] if "--text" in change else ["--text", book]
    refused(longreach("mka", "routing", block, *text, *change), *words)


def test_windows_beyond_the_context_are_refused() -> None:
    with pytest.raises(InvalidInput, match="windows of 5000 tokens exceed the model's context of 4096 tokens"):
        measure(routed("fastmka"), [[1] * 5000])
    with pytest.raises(InvalidInput, match="expected a model with MKA's layers"):
        measure(tiny_model("llama"), [[1] * 10])


def test_models_without_routers_are_refused(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    command = ["--text", book, "--length", 64]
    refused(
        longreach("mka", "routing", tiny, *command), "is no converted model; convert it first: longreach mka convert"
    )
    for variant in ("mqa", "mla"):
        folder = tmp_path / variant
        save(convert(load(tiny)[0], variant), tiny_tokenizer(), folder)
        if variant == "mqa":  # stays a model of its family; conversion.json names the variant
            (folder / "conversion.json").write_text('{"variant": "mqa"}')
        words = (f"has {variant} attention, a baseline without routers", "longreach mka convert")
        refused(longreach("mka", "routing", folder, *command), *words)
