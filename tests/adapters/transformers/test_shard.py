"""Tensor parallelism by transformers' plan: two ranks, each with half of the heads, give one process's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longreach import OracleTopK, StreamingLLM, attach
from longreach.methods.base import AttentionMethod
from longreach.testing.ranks import run_on_ranks
from longreach.testing.tiny import save_tiny
from tests.adapters.transformers.reference import generate, padded_batch
from tests.methods import two_ranks as two_ranks_of_methods
from tests.methods.cases import CASES
from tests.methods.drive import LAYERS
from tests.methods.planned import planned, write_plans
from tests.tiers import swept

METHODS: dict[str, AttentionMethod | str] = {
    "dense": "dense",
    "streaming_llm": StreamingLLM(sinks=1, window=6),
    "oracle, each KV head its own keys": OracleTopK(k=5, heads="kv"),
    "oracle, all heads the same keys": OracleTopK(k=5, heads="all"),
}
FAMILIES = ("llama", "qwen3_moe", "phi3")
GATHERED = ("phi3",)  # its plan gives every rank all heads
STEPS = 5
EVERY = "every method"


def answers(rank: int, world: int, folders: dict[str, str], plans: str) -> dict[str, Any]:
    """tokens by family and method, and the shards that layers saw; on one rank, without a plan.

    Under EVERY: what every method's default configuration makes of the first family.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    found: dict[str, Any] = {}
    for family, folder in folders.items():
        plan = {"distributed_config": DistributedConfig(tp_plan="auto")} if world > 1 else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **plan)
        for name, method in METHODS.items():
            shards = set()

            def observe(phase: str, call: Any, outcome: Any, shards: set[Any] = shards) -> None:
                heads = (call.rows.q.shape[1], call.kv.heads)
                summed = call.sum_over_ranks(torch.ones(2, 1))
                shards.add((call.shard.first, call.shard.count, call.shard.total, heads, float(summed.sum())))

            with attach(model, decode=method) as session:
                session.on_layer = observe
                out = generate(model, *padded_batch(), steps=STEPS)
                found[f"{family} {name}"] = (out.tokens, out.logits, shards)
        if family == FAMILIES[0]:
            with planned(Path(plans)):
                found[EVERY] = two_ranks_of_methods.answers(model, [case.default for case in CASES.values()])
    return found


@pytest.fixture(scope="module", params=swept([(("llama", "phi3"),), (FAMILIES,)], 1), ids=len)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("models")
    shape = {FAMILIES[0]: {"num_hidden_layers": LAYERS}}  # of the model that there are plans for
    return {
        family: str(save_tiny(place / family, family, eos_token_id=None, **shape.get(family, {})))
        for family in request.param
    }


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_plans(tmp_path_factory.mktemp("plans")))


@pytest.fixture(scope="module")
def one_process(folders: dict[str, str], plans: str) -> dict[str, Any]:
    return answers(0, 1, folders, plans)


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, str], plans: str) -> list[dict[str, Any]]:
    return run_on_ranks("tests.adapters.transformers.test_shard:answers", folders, plans)


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_give_one_processes_tokens(
    name: str, folders: dict[str, str], one_process: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for family in folders:
        tokens, logits, shards = one_process[f"{family} {name}"]
        assert shards == {(0, 2, 2, (4, 2), 2.0)}, family
        for rank, found in enumerate(two_ranks):
            got, got_logits, got_shards = found[f"{family} {name}"]
            assert torch.equal(got, tokens), family
            assert torch.allclose(got_logits, logits, rtol=0, atol=1e-4), family
            assert got_shards == (shards if family in GATHERED else {(rank, 1, 2, (2, 1), 4.0)}), family


@pytest.mark.parametrize("method", CASES)
def test_every_method_gives_one_processes_tokens(
    method: str, one_process: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    tokens, logits = one_process[EVERY][repr(CASES[method].default)]
    for found in two_ranks:
        got, got_logits = found[EVERY][repr(CASES[method].default)]
        assert torch.equal(got, tokens)
        torch.testing.assert_close(got_logits, logits, rtol=1e-4, atol=1e-3)


def test_methods_differ_enough_to_see_a_wrong_choice(folders: dict[str, str], one_process: dict[str, Any]) -> None:
    for family in folders:
        answers = [one_process[f"{family} {name}"][1] for name in METHODS]
        assert all(not torch.equal(a, b) for n, a in enumerate(answers) for b in answers[:n])
