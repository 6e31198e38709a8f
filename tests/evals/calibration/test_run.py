"""`longreach.calibrate`: plans from Python, the same as those of the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import longreach as lr
from longreach.errors import InvalidInput, UnknownName
from longreach.evals.calibration.run import KINDS, calibration
from longreach.plans import KINDS as PLANS
from longreach.plans import load as load_plan
from longreach.testing.tiny import save_tiny, tiny_model, tiny_tokenizer

TEXT = "".join(f"Hen {n} laid {n * n % 97} eggs in barn {n % 7}. " for n in range(60))
OPTIONS: dict[str, dict[str, Any]] = {
    "kascade": {"k": 16, "tile": 32, "budget": 2, "length": 301},
    "loki": {"length": 201},
    "mac": {"window": 64, "widest": 32, "rows": 20, "epsilon": 0.6, "length": 201},
    "magicpig": {"rows": 4, "budget": 0.6, "local": 8, "seal": 8, "centre": 16, "length": 201},
}


def taken(kind: str, plan: Path) -> Any:
    """The method that takes a plan of these options."""
    if kind == "mac":
        return lr.MAC(window=None, band=None, tau=None, scale="calibrated", plan=str(plan), min_context=16)
    return f"{kind} plan={plan}" + (" local=8 seal=8 centre=16" if kind == "magicpig" else "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_plan_is_that_of_the_command(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longreach.cli.main import main

    monkeypatch.setenv("LONGREACH_COMMIT", "f00d")
    (tmp_path / "book.txt").write_text(TEXT)
    mine, command = tmp_path / "mine.json", tmp_path / "command.json"
    given = OPTIONS[kind]
    model, tokenizer = lr.load(folder)
    plan = lr.calibrate(model, tokenizer, kind, texts=tmp_path / "book.txt", prompts=3, output=mine, **given)
    words = [str(x) for name, value in given.items() for x in (f"--{name}", value)]
    main(["calibrate", kind, "--model", str(folder), "--text", str(tmp_path / "book.txt"), "--prompts", "3",
          "--output", str(command), *words])  # fmt: skip
    assert mine.read_text() == command.read_text()
    assert plan.kind == kind and plan.made.tokens == 3 * given["length"]
    assert not list(tmp_path.glob("*.journal"))
    with lr.attach(model, decode=taken(kind, mine)):
        model.generate(**tokenizer(TEXT[:80], return_tensors="pt"), max_new_tokens=2)


def test_a3_deep_takes_tasks(tmp_path: Path) -> None:
    model, tokenizer = lr.load("mini")
    output = tmp_path / "deep.json"
    plan = lr.calibrate(model, tokenizer, "a3_deep", tasks="vt", length=1024, prompts=1, layers=(3, 6), output=output)
    assert load_plan(output, "a3_deep").values == plan.values and plan.made.settings["layers"] == "3,6"
    with pytest.raises(InvalidInput, match="texts: a3_deep is calibrated on prompts of tasks only"):
        lr.calibrate(model, tokenizer, "a3_deep", texts=TEXT)


def test_texts_in_memory_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    plan = lr.calibrate(model, tokenizer, "loki", texts=[TEXT, TEXT[::-1]], length=201, prompts=4)
    assert plan.made.data == "4 windows of text 0, text 1; 201 tokens each" and not list(tmp_path.iterdir())
    assert plan.model.name == "LlamaForCausalLM" and "sha256" not in json.dumps(plan.made.settings)


def test_models_whose_heads_differ_by_layer(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("gemma4"), tiny_tokenizer()
    for kind, given in OPTIONS.items():
        output = tmp_path / f"{kind}.json"
        more = {"budget": 1} if kind == "kascade" else {}
        lr.calibrate(model, tokenizer, kind, texts=TEXT, prompts=2, output=output, **{**given, **more})
        with lr.attach(model, decode=taken(kind, output)):
            model.generate(**tokenizer(TEXT[:80], return_tensors="pt"), max_new_tokens=2)


def test_models_with_latents(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("deepseek_v3"), tiny_tokenizer()
    for kind, given in OPTIONS.items():
        output = tmp_path / f"{kind}.json"
        if kind == "magicpig":
            with pytest.raises(InvalidInput, match="magicpig: expected keys and values apart"):
                lr.calibrate(model, tokenizer, kind, texts=TEXT, output=output)
            continue
        lr.calibrate(model, tokenizer, kind, texts=TEXT, prompts=2, output=output, **given)
        with lr.attach(model, decode=taken(kind, output)):
            model.generate(**tokenizer(TEXT[:80], return_tensors="pt"), max_new_tokens=2)


def test_few_tiles_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="too few to go by"):
        lr.calibrate(
            tiny_model("llama"), tiny_tokenizer(), "kascade", texts=TEXT, length=101, prompts=1, k=16, tile=64, budget=1
        )


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("quest", {}, UnknownName, "unknown method with a calibration 'quest'; known: kascade, loki"),
    ("loki", {"budget": 2}, UnknownName, "unknown option of calibrate loki 'budget'; known: none"),
    ("kascade", {"bugdet": 2}, UnknownName, "known: budget, served, weighted, ranks, k, tile"),
    ("kascade", {"budget": 0}, InvalidInput, "budget: expected at least 1 anchor, got 0"),
    ("kascade", {"k": 0}, InvalidInput, "k: expected a count of at least 1, got 0"),
    ("kascade", {"budget": 2, "served": 0.5}, InvalidInput, "give one of them"),
    ("mac", {"alpha": 2}, InvalidInput, r"alpha: expected a share in \(0, 1\), got 2"),
    ("mac", {"sinks": -1}, InvalidInput, "sinks: expected a count of at least 0, got -1"),
    ("magicpig", {"budget": 0}, InvalidInput, r"budget: expected a share in \(0, 1\], got 0"),
    ("magicpig", {"memory": 0}, InvalidInput, "memory: expected a share > 0"),
    ("magicpig", {"least": 0}, InvalidInput, "least"),
    ("a3_deep", {"ratio": 1}, InvalidInput, "ratio: expected a number above 0 and below 1"),
]


@pytest.mark.parametrize(("kind", "options", "error", "words"), BAD)
def test_bad_options(kind: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        calibration(kind, **options)


def test_bad_prompts(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    for given, words in (
        ({}, "nothing to calibrate on"),
        ({"texts": "  "}, "text 0 is empty"),
        ({"texts": TEXT, "length": 1}, "1 tokens are too short"),
        ({"texts": tmp_path / "none.txt"}, "cannot read"),
        ({"texts": TEXT, "output": "/proc/none/p.json"}, "cannot write"),
    ):
        with pytest.raises(InvalidInput, match=words):
            lr.calibrate(model, tokenizer, "loki", **given)


def test_every_kind_of_plan_has_a_calibration() -> None:
    assert set(KINDS) == set(PLANS)
