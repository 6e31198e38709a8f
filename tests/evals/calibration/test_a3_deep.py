"""a3_deep's calibration: divergence along the answer, and hits, against fused and exact reads of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from longreach import attach
from longreach.adapters.transformers import FusedPrompt, Precompute, load, read_fused
from longreach.errors import InvalidInput
from longreach.evals.calibration.a3_deep import measure
from longreach.evals.calibration.prompts import Prompt, make
from longreach.evals.fusion import FusedPrompts, Oracle
from longreach.methods.fusion import PIE, A3Deep
from longreach.methods.fusion.plan import A3DeepPlan
from longreach.tasks.registry import choose
from longreach.testing.tiny import BOS_ID, random_tokens, tiny_model, tiny_tokenizer

CHUNKS = ((7, 30), (30, 41), (41, 80))
LAYERS = (0, 1, 3)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=4)


def prompt(answer: int, seed: int = 4) -> Prompt:
    tokens = (BOS_ID, *random_tokens(1, 89 + answer, seed=seed)[0].tolist())
    return Prompt(f"p {seed} {answer}", tokens, answer, CHUNKS)


@pytest.mark.parametrize("answer", [1, 5])
def test_divergence_is_that_of_the_answers_tokens(model: Any, answer: int) -> None:
    one = prompt(answer)
    (part,) = measure(model, tiny_tokenizer(), [one], LAYERS, 0.2, chunk=16)
    with torch.no_grad():
        exact = model(torch.tensor([one.tokens])).logits[0, -answer - 1 : -1].double().log_softmax(-1)
    ids = one.tokens[:-answer]
    for at, layer in enumerate(LAYERS):
        with attach(model, fuse=A3Deep(ratio=0.2, layer=layer)) as session:
            work, cache = Precompute(session, ids[:7]), session.new_cache()
            fused = FusedPrompt.of([ids[:7], *(work.compute(ids[a:b]) for a, b in CHUNKS), ids[80:]])
            rows = [read_fused(session, cache, fused)[0]]
            with torch.no_grad():
                for token in one.tokens[-answer:-1]:
                    rows.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1])
        mine = torch.stack(rows).double().log_softmax(-1)
        want = F.kl_div(mine, exact, log_target=True, reduction="sum") / answer
        assert part["kl"][at] == pytest.approx(float(want), rel=1e-3) and part["kl"][at] > 1e-5
    assert len({*part["kl"]}) == 3


def test_hits_are_the_share_of_the_oracles_tokens(model: Any) -> None:
    one, ratio = prompt(3), 0.2
    (part,) = measure(model, tiny_tokenizer(), [one], LAYERS, ratio)
    with attach(model, fuse=PIE()) as session:
        fused = FusedPrompts(session, tiny_tokenizer(), "system", 512)
        made, sets = fused.of(one.tokens[:-3], CHUNKS), list[set[int]]()
        for method in (Oracle(ratio), *(A3Deep(ratio=ratio, layer=layer) for layer in LAYERS)):
            noted = list[torch.Tensor]()
            fused.read(made, method, noted=noted)
            sets.append(set(noted[-1].tolist()))
    oracle, *mine = sets
    assert len(oracle) == round(ratio * (len(one.tokens) - 3))
    assert part["hits"] == pytest.approx([len(oracle & some) / len(oracle) for some in mine])


def test_where_all_tokens_are_chosen_layers_are_equal_and_the_lowest_is_taken(model: Any) -> None:
    parts = measure(model, tiny_tokenizer(), [prompt(4), prompt(2, seed=5)], LAYERS, 0.99)
    for part in parts:
        assert part["hits"] == [1.0] * 3 and max(part["kl"]) < 1e-6
    assert A3DeepPlan.of_parts([{**part, "kl": [0.0] * 3} for part in parts], LAYERS, 0.99).layer == 0


def test_what_an_earlier_run_kept_is_taken_over(model: Any) -> None:
    some, kept, told = [prompt(2), prompt(2, seed=5)], dict[str, Any](), {"kl": [9.0], "hits": [0.5]}
    found = measure(model, tiny_tokenizer(), some, (1,), 0.2, done={some[0].name: told}, keep=kept.__setitem__)
    assert found[0] == told and set(kept) == {some[1].name} and kept[some[1].name] == found[1]


def test_a_ratio_of_no_token(model: Any) -> None:
    with pytest.raises(InvalidInput, match=r"p 4 1: ratio 0\.001 of 90 tokens is none; raise --ratio or --length"):
        measure(model, tiny_tokenizer(), [prompt(1)], (1,), 0.001)


@pytest.mark.sweep
def test_layers_of_mini_differ() -> None:
    """The chain of a variable is better found in a middle layer than in the first."""
    model, tokenizer = load("mini")
    found = make(model, tokenizer, [], choose("vt"), length=1024, count=2, chunk_tokens=128)
    parts = measure(model, tokenizer, found.prompts, (0, 8), 0.15)
    plan = A3DeepPlan.of_parts(parts, (0, 8), 0.15)
    assert plan.layer == 8 and plan.kl[1] < plan.kl[0] / 2
