"""Equal budgets: what the dry run says is what a model's decode steps read, and the search finds what comes near."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longreach import attach
from longreach.adapters.transformers import BatchReader, cache_windows, shape_of
from longreach.errors import InvalidInput
from longreach.evals.budgets import BUDGETS, COUNTED, NEAR, WHOLE, DryRun, equal_bytes, equalled
from longreach.evals.evaluate import Evaluation, Settings
from longreach.evals.methods import specs
from longreach.evals.scores import tasks_entry
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape
from longreach.methods.registry import METHODS, choose, method_class
from longreach.testing.tiny import random_tokens, tiny_model, tiny_tokenizer
from tests.evals.test_evaluate import Letters
from tests.methods.drive import MODEL
from tests.methods.planned import planned, write_plans
from tests.tiers import swept

SHAPE = ModelShape(6, 8, 2, 16, "a model's")
SOME = ["quest page=4 dense_layers=[0]", "omnikv k=0.3 layers=[0,1]", "less_is_more k=9 layers=[1]",
        "streaming_llm window=11", "block_mka block=4 window=8 blocks=3 share=[0,2]",
        "block_mka block=5 window=5 blocks=2 dense_layers=[1] recall=hash bits=32",
        "oracle_top_k k=0.2 dense_layers=[0]", "dense"]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=4)


def measured(model: Any, method: AttentionMethod, prompts: list[int], steps: int) -> float:
    """The share of bytes that a session reports of decode steps, greedy and without an end."""
    with attach(model) as session:
        session.prepare(method)
        reader = BatchReader(session)
        logits = reader.read([random_tokens(1, n, seed=n)[0].tolist() for n in prompts])
        session.switch(method)
        reader.answer(logits, steps + 1, ())
        share = session.report().fraction("decode")
        assert share is not None
        return share


@pytest.mark.covering
@pytest.mark.parametrize("text", SOME)
@pytest.mark.parametrize("asked", [([60], 1), ([60], 5), ([41, 77, 13], 2)], ids=str)
def test_a_dry_run_reads_what_a_model_does(model: Any, text: str, asked: tuple[list[int], int]) -> None:
    prompts, steps = asked
    method = choose("decode", text)
    contexts = [n + step for step in range(1, steps + 1) for n in prompts]
    dry = DryRun(shape_of(model), contexts, dtype=torch.float32, batch=len(prompts))
    assert dry.share(method) == pytest.approx(measured(model, method, prompts, steps), rel=1e-9)


def test_layers_with_windows_count_as_they_are() -> None:
    model = tiny_model("gemma2", num_hidden_layers=4)
    windows = cache_windows(model)
    assert windows and len(windows) < 4
    method = choose("decode", "streaming_llm window=9")
    dry = DryRun(shape_of(model), [81], dtype=torch.float32, windows=windows)
    assert dry.share(method) == pytest.approx(measured(model, method, [80], 1), rel=1e-9)
    assert dry.attended(method) == pytest.approx(13 / 81)


def test_how_much_is_attended_to() -> None:
    dry = DryRun(SHAPE, [100, 50], dtype=torch.float32)
    assert dry.attended(choose("decode", "omnikv k=10 layers=[2]")) == pytest.approx((0.1 + 0.2) / 2)
    assert dry.attended(choose("decode", "oracle_top_k k=0.1 dense_layers=[0]")) == pytest.approx(0.1)
    with pytest.raises(InvalidInput, match="omnikv attends densely in every layer"):
        dry.attended(choose("decode", "omnikv layers=[0,1,2,3,4,5]"))


def test_budgets_are_found_that_read_as_much() -> None:
    to = "omnikv k=0.2 layers=[0]"
    dry = DryRun(SHAPE, [900, 1000], dtype=torch.bfloat16)
    asked = ["streaming_llm", "quest page=4 dense_layers=[]", "less_is_more layers=[1]", "oracle_top_k",
             "block_mka block=4 window=8"]  # fmt: skip
    found = equalled(specs([to, *asked]), to, dry)
    assert found.share == dry.share(choose("decode", to)) and not found.unreachable and not found.kept
    assert [spec.label for spec in found.specs[:2]] == ["dense", to]
    for spec, before in zip(found.specs[2:], asked, strict=True):
        assert spec.label.startswith(f"{before} ") and choose("decode", spec.label) == spec.decode
        budget = found.found[spec.label]
        assert budget.share == dry.share(spec.decode) and getattr(spec.decode, budget.option) == budget.value
        if spec.decode.name in BUDGETS | WHOLE:
            assert abs(budget.share / found.share - 1) < NEAR
        else:
            assert spec.decode.name in COUNTED and budget.share > 1
            assert dry.attended(spec.decode) == pytest.approx(found.attended, abs=1 / 900) == pytest.approx(0.2)


def test_methods_that_cannot_reach_it_are_told_by_name() -> None:
    to = "omnikv k=0.02 layers=[0]"
    dry = DryRun(SHAPE, [400], dtype=torch.float32)
    asked = ["quest", "less_is_more layers=[3]", "quest dense_layers=[] page=100", "streaming_llm sinks=399"]
    found = equalled(specs([to, *asked]), to, dry)
    assert [spec.label for spec in found.specs] == ["dense", to] and set(found.unreachable) == set(asked)
    for label, why in found.unreachable.items():
        assert why.startswith(f"{label.split()[0]} reads ") and ("and the target is" in why or "the nearest to" in why)
    assert "fewer layers that attend densely, by its option dense_layers" in found.unreachable["quest"]
    assert "fewer layers that attend densely, by its option layers" in found.unreachable["less_is_more layers=[3]"]
    assert "fewer sinks" in found.unreachable["streaming_llm sinks=399"]
    whole = equalled(specs(["oracle_top_k k=1.0", "streaming_llm"]), "oracle_top_k k=1.0", dry)
    assert "reads 100.0% of dense attention's bytes at most" in whole.unreachable["streaming_llm"]


def test_the_least_budget_is_none_even_where_it_is_near() -> None:
    """Bytes that dense layers make equal: what is left to choose is a key."""
    to = "less_is_more layers=[0] k=0.2"
    dry = DryRun(SHAPE, [1000], dtype=torch.float32)
    near = dry.share(choose("decode", to))
    least = dry.share(choose("decode", "omnikv layers=[1] k=1"))
    assert abs(least / near - 1) < NEAR
    found = equalled(specs([to, "omnikv layers=[1]", "omnikv layers=[0]"]), to, dry)
    assert [spec.label.split(" k=")[0] for spec in found.specs] == [
        "dense",
        "less_is_more layers=[0]",
        "omnikv layers=[0]",
    ]
    why = found.unreachable["omnikv layers=[1]"]
    assert (
        why.startswith("omnikv reads 33.4% of dense attention's bytes with its least budget")
        and "by its option layers" in why
    )


def test_methods_for_which_no_budget_is_looked_for_stay_as_they_are(tmp_path: Path) -> None:
    with planned(write_plans(tmp_path)):
        dry = DryRun(MODEL, [400], dtype=torch.float32)
        found = equalled(specs(["kascade", "kascade heads=all"]), "kascade", dry)
    assert found.kept == {"kascade heads=all": "kascade keeps its options"}
    assert [spec.label for spec in found.specs] == ["dense", "kascade", "kascade heads=all"]


def test_what_has_a_budget_keeps_it() -> None:
    to = "omnikv k=0.3 layers=[0]"
    asked = ["quest k=0.1 dense_layers=[0]", "streaming_llm window=3", "oracle_top_k k=0.1"]
    found = equalled(specs([to, *asked]), to, DryRun(SHAPE, [200], dtype=torch.float32))
    assert [spec.label for spec in found.specs] == ["dense", to, *asked] and not found.found
    assert found.kept == {asked[0]: "its k was given", asked[1]: "its window was given", asked[2]: "its k was given"}


@pytest.mark.parametrize("to", ["dense", "omnikv", ""])
def test_there_must_be_somebody_to_be_equal_to(to: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{to}' is not one of the sparse methods .*known: streaming_llm, quest"):
        equalled(specs(["streaming_llm", "quest"]), to, DryRun(SHAPE, [200], dtype=torch.float32))


@pytest.mark.parametrize("to", ["magicpig bits=8", "mac", "oracle_sampling"])
def test_bytes_that_depend_on_keys_are_not_found_from_lengths(to: str) -> None:
    with pytest.raises(InvalidInput, match=f"what '{to}' reads depends on keys and queries"):
        equalled(specs(["streaming_llm", to]), to, DryRun(SHAPE, [200], dtype=torch.float32))


def test_every_budget_is_an_option() -> None:
    for name, option in {**BUDGETS, **COUNTED}.items():
        assert name in METHODS and isinstance(method_class(name).options()[option], float)
    for name, option in WHOLE.items():
        assert isinstance(method_class(name).options()[option], int)


@pytest.mark.parametrize("batch", swept([2, 1], 1))
def test_an_evaluations_record_is_as_equal_as_was_found(model: Any, batch: int) -> None:
    """At a small length too, with prompts of different lengths and answers that stop early or not."""
    to = "omnikv k=0.25 layers=[1]"
    asked = [to, "streaming_llm", "quest page=2 dense_layers=[0]", "less_is_more layers=[0]", "oracle_top_k"]
    tasks = [Letters(spare=60, max_new_tokens=5), Letters("more", max_new_tokens=12)]
    evaluation = Evaluation(model, tiny_tokenizer(), tasks, specs(asked), Settings((400,), samples=2, batch=batch))
    evaluation.build()
    found = equal_bytes(evaluation, to)
    assert not found.unreachable
    evaluation.specs = list(found.specs)
    entry = tasks_entry(evaluation, evaluation.run({}, lambda key, part: None))

    def reads(label: str) -> float:
        return sum(task["results"][label]["decode_reads"]["total"] for task in entry.values()) / len(entry)

    assert reads(to) == pytest.approx(found.share, rel=NEAR)
    for label, budget in found.found.items():
        assert reads(label) == pytest.approx(budget.share, rel=NEAR)
        if "oracle" not in label:
            assert reads(label) == pytest.approx(reads(to), rel=NEAR)


def test_budgets_of_methods_that_redo_rows() -> None:
    """How many rows attend densely depends on keys: such a method keeps its options, and none is set equal to it."""
    dry = DryRun(SHAPE, [200], dtype=torch.float32)
    redo = "loki choose=sample redo=0.2"
    found = equalled(specs(["streaming_llm", redo]), "streaming_llm", dry)
    assert found.kept == {redo: "loki keeps its options"} and not found.found
    with pytest.raises(InvalidInput, match="depends on keys and queries"):
        equalled(specs(["streaming_llm", redo]), redo, dry)
