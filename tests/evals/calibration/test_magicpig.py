"""MagicPIG's calibration: what a model's own attention is given, and what its plan then reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach import attach
from longreach.adapters.transformers import Answer, Reader, load, shape_of
from longreach.cache import CacheConfig
from longreach.evals.calibration.gather import gather
from longreach.evals.calibration.magicpig import MagicPIGGather, calibrated
from longreach.evals.calibration.prompts import Prompt, make
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.plan import ARRAYS, Options
from longreach.plans import Plan, PlannedModel
from longreach.tasks import registry
from longreach.testing.tiny import random_tokens, tiny_model
from tests.plans.factory import MADE

OPTIONS = Options(seed=0, least=2, share="group", sinks=4, local=8, seal=8, centre=8)
PAIRS = ((4, 9), (6, 20), (6, 5))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=3)


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p/{n}", tuple(random_tokens(1, length, seed=n)[0].tolist())) for n, length in enumerate(lengths)]


def what(model: Any, options: Options = OPTIONS) -> MagicPIGGather:
    return MagicPIGGather(shape_of(model), options, rows=5, keys=1000, pairs=PAIRS)


def test_chunks_do_not_matter(model: Any) -> None:
    """The last rows of a prompt may lie in several passes."""
    some = prompts(60, 51)
    found = [calibrated(g := what(model), gather(model, some, g, chunk=chunk), budget=0.9, memory=None, length=60)
             for chunk in (512, 17, 3)]  # fmt: skip
    for name in ARRAYS:
        first, *others = (getattr(plan, name) for plan in found)
        assert bool((first > 0).all())
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-4)


def test_what_an_earlier_run_kept_is_taken_over(model: Any) -> None:
    some, kept = prompts(40, 45, 51), dict[str, Any]()
    whole = gather(model, some, what(model), keep=kept.__setitem__)
    again = gather(model, some, what(model), done={"p/0": kept["p/0"], "p/2": kept["p/2"]})
    one, other = (calibrated(what(model), parts, budget=0.9, memory=None, length=51) for parts in (whole, again))
    assert one.chosen == other.chosen and all(torch.equal(getattr(one, x), getattr(other, x)) for x in ARRAYS)


def test_errors_of_own_samples_are_larger(model: Any) -> None:
    """A group's sample holds that of each of its heads."""
    some, found = prompts(60), []
    for share in ("own", "group"):
        g = what(model, replace(OPTIONS, share=share))  # type: ignore[arg-type]
        found.append(calibrated(g, gather(model, some, g), budget=0.95, memory=None, length=60))
    own, group = found
    assert bool((own.error > group.error).all()) and torch.equal(own.sampled, group.sampled)


@pytest.mark.parametrize("budget", [0.2, 0.5])
def test_budgets_are_met_on_other_prompts(budget: float, tmp_path: Any) -> None:
    """longreach-mini, calibrated on one prompt and decoding after another: bytes within 15% of the budget."""
    model, tokenizer = load("mini")
    options = Options(seed=0, least=2, share="group", sinks=4, local=64, seal=64, centre=256)
    g = MagicPIGGather(shape_of(model), options, rows=8, keys=512)
    one, other = (make(model, tokenizer, [], registry.choose(task), length=1600, count=1, seed=seed).prompts
                  for task, seed in (("vt", 1), ("niah_single_2", 2)))  # fmt: skip
    found = calibrated(g, gather(model, one, g), budget=0.3, memory=None, length=1600)
    path = tmp_path / "p.json"
    Plan("magicpig", PlannedModel.of("mini", shape_of(model)), found.values(), MADE, found.arrays()).save(path)
    tokens = list(other[0].tokens)
    method = MagicPIG(plan=str(path), budget=budget, seal=64, centre=256)
    with attach(model, decode=method, cache=CacheConfig(capacity=1700)) as session:
        reader = Reader(session, graph=False)
        reader.read(tokens[:-4])
        session.reset_report()
        list(reader.ask(tokens[-4:], 24, [], Answer()))
        layers = [layer for layer in session.report().layers if layer.phase == "decode"]
    read = sum(x.key_bytes + x.value_bytes + x.metadata_bytes for x in layers) / sum(x.dense_bytes for x in layers)
    assert 0.85 < read / budget < 1.15
