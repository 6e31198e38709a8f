"""Converted models under tensor parallelism: two ranks, whose routers are summed, give one process's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longreach import attach, mka
from longreach import generate as longreach_generate
from longreach.testing.ranks import run_on_ranks
from tests.adapters.transformers.mka.models import SMALL, THREE, converted
from tests.adapters.transformers.reference import generate, padded_batch

pytestmark = pytest.mark.sweep  # two processes load transformers
STEPS = 6
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fastmka": ("llama", "fastmka", THREE),
    "fastmka, gathered": ("phi3", "fastmka", {}),  # its plan gives every rank all heads
    "mka": ("llama", "mka", {**SMALL, "mode": "gated"}),
    "block_mka": ("qwen3", "block_mka", {**SMALL, "recall": "index", "features": 8}),
}


def answers(rank: int, world: int, folders: dict[str, str]) -> dict[str, Any]:
    """Model -> tokens and logits of plain generate, and tokens of the decode loop."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    mka.register()
    found = {}
    for name, folder in folders.items():
        plan = {"distributed_config": DistributedConfig(tp_plan="auto")} if world > 1 else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **plan)
        plain = generate(model, *padded_batch((30, 17)), steps=STEPS)
        with attach(model) as session:
            loop = longreach_generate(session, *padded_batch((30, 17)), max_new_tokens=STEPS)
        found[name] = (plain.tokens, plain.logits, loop.tokens)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("models")
    for number, (family, variant, options) in enumerate(MODELS.values()):
        converted(family, variant, **options).save_pretrained(place / str(number))
    return {name: str(Path(place) / str(number)) for number, name in enumerate(MODELS)}


@pytest.fixture(scope="module")
def both(folders: dict[str, str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return answers(0, 1, folders), run_on_ranks("tests.adapters.transformers.mka.test_ranks:answers", folders)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_one_processes_tokens(name: str, both: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, ranks = both
    tokens, logits, _ = alone[name]
    for plain, got, loop in (alone[name], *(found[name] for found in ranks)):
        assert torch.equal(plain, tokens) and torch.equal(loop, tokens)
        torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-3)
