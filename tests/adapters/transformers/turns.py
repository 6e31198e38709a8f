"""A batch of prompts of several lengths, answered and gone on with turn by turn, with every decode method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import CacheConfig, Kascade, Quest, generate
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.methods.magicpig import MagicPIG
from longreach.methods.registry import names
from tests.adapters.transformers.reference import padded_batch, prompt
from tests.methods.cases import CASES
from tests.methods.planned import planned, write_plans
from tests.poison import nan_memory

SMALL = MagicPIG(bits=4, tables=9, local=8, seal=8, centre=8, dense_layers=(1,))  # tables begin at 20 tokens
METHODS = {**{name: CASES[name].default for name in names("decode")}, "magicpig": SMALL,
           "kascade int8": Kascade(scoring="int8", k=0.2, min_keys=4), "kascade": Kascade(k=0.2, min_keys=4),
           "quest": Quest(k=0.2, page=4, dense_layers=(0,))}  # fmt: skip
# pages that the blocks of block_mka's default divide
CONFIGS = {"contiguous": CacheConfig(), "paged": CacheConfig("paged", page=20), "host": CacheConfig(host=True)}
LENGTHS = (61, 40, 9)
TURN, NEW = 7, 10


@pytest.fixture(scope="module", autouse=True)
def plans_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the modules that import it: METHODS have plans."""
    with planned(write_plans(tmp_path_factory.mktemp("plans"))):
        yield


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    """For the modules that import it: memory that was never written is NaN."""
    with nan_memory():
        yield


def start(session: Any, rows: Sequence[int] = range(3)) -> tuple[LongreachCache, Tensor, Tensor]:
    """A cache with these rows' prompts and answers; all tokens, and the mask of those that the cache holds."""
    (tokens, mask), cache = padded_batch(LENGTHS), session.new_cache(len(rows))
    tokens, mask = tokens[list(rows)], mask[list(rows)]
    made = generate(session, tokens, mask, max_new_tokens=NEW, past_key_values=cache)
    return cache, made.sequences, torch.cat([mask, torch.ones(len(rows), NEW, dtype=mask.dtype)], 1)


def go_on(
    session: Any, cache: LongreachCache, ids: Tensor, mask: Tensor, seeds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """All tokens after a further turn of each row and its answer, and the mask."""
    mask = torch.cat([mask, torch.ones(len(ids), TURN + NEW, dtype=mask.dtype)], 1)
    ids = torch.cat([ids, torch.cat([prompt(TURN, seed=seed) for seed in seeds])], 1)
    made = generate(session, ids, mask[:, : ids.shape[1]], max_new_tokens=NEW, past_key_values=cache)
    return made.sequences, mask
