"""A cache is filled layer by layer, in either memory; keys are sampled as the benchmark of MagicPIG's step has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach import attach
from longreach.adapters.transformers import shape_of
from longreach.adapters.transformers.synthetic import random_llama
from longreach.bench.filled import note_layer
from longreach.bench.host.fill import fill_host, sampled_kv
from longreach.cache import CacheConfig
from longreach.errors import CapacityError
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.state import LayerTables
from longreach.methods.quest import Quest
from longreach.ops.simhash import codes, projections
from longreach.runtime import Report

TOKENS, BATCH, LAYERS = 200, 2, 4
MODEL = {"hidden": 64, "feed_forward": 96, "vocabulary": 264, "heads": 4, "kv_heads": 2, "dtype": torch.float32,
         "device": torch.device("cpu"), "seed": 0}  # fmt: skip
SMALL = MagicPIG(bits=4, tables=9, local=16, seal=16, centre=32, dense_layers=(1,))


def model_of(dim: int = 16, layers: int = LAYERS) -> torch.nn.Module:
    return random_llama(layers=layers, dim=dim, **MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [SMALL, Quest(page=4, dense_layers=(0,))], ids=("magicpig", "quest"))
def test_both_memories_hold_the_same_keys_and_decode_alike(method: MagicPIG | Quest) -> None:
    model = model_of()
    reports, held, logits = list[Report](), list[list[torch.Tensor]](), list[torch.Tensor]()
    for host in (False, True):
        with attach(model, decode=method, impl="reference") as session:
            cache = session.new_cache(BATCH, CacheConfig(capacity=TOKENS + 4, host=host))
            seconds = fill_host(cache, model, method, TOKENS, 0, "reference", iter(range(99)).__next__)
            assert seconds == {"fill": LAYERS, "state": LAYERS}  # each call of the clock is one later
            assert bool(cache.kv.in_host) == host and cache.kv.lengths == [TOKENS] * BATCH
            held.append([x[:, :, :TOKENS].clone() for pair in cache.kv.memory for x in pair or ()])
            with torch.no_grad():
                logits.append(model(torch.zeros(BATCH, 1, dtype=torch.int64), past_key_values=cache).logits)
            reports.append(replace(session.report(), memory=None))
    assert reports[0] == reports[1]
    assert len(held[0]) == 2 * LAYERS and torch.equal(*logits)
    for x, y in zip(*held, strict=True):
        assert torch.equal(x, y)


def test_tables_are_those_of_a_prompt_of_these_keys() -> None:
    """At the end of a fill they hold what a decode step would else put into them."""
    model = model_of()
    with attach(model, decode=SMALL, impl="reference") as session:
        cache = session.new_cache(BATCH, CacheConfig(host=True))
        fill_host(cache, model, SMALL, TOKENS, 0, "reference", lambda: 0.0)
        stops = [
            state.tables.stop.tolist() for state in cache.states.states((SMALL,)) if isinstance(state, LayerTables)
        ]
    want = [int(SMALL.schedule.stop(torch.tensor([TOKENS]), layer)) for layer in (0, 2, 3)]
    assert stops == [[stop] * BATCH for stop in want] and min(want) > SMALL.sinks + 100


def test_a_method_without_state_of_keys_is_left_alone() -> None:
    model = model_of()
    with attach(model) as session:
        cache = session.new_cache(1)
        step = cache.kv.begin([0], [1])
        note_layer(cache, session.decode, shape_of(model), 0, step)  # its layer holds nothing yet
        assert not cache.states.places


def test_memory_that_cannot_be_had_is_named_and_nothing_is_written() -> None:
    model = model_of()
    with attach(model) as session:
        cache = session.new_cache(1, CacheConfig(host=True, device_bytes=1000))
        with pytest.raises(CapacityError, match="does not hold the 2 staging buffers"):
            fill_host(cache, model, session.decode, TOKENS, 0, "reference", lambda: 0.0)
        assert not any(cache.kv.memory)


def test_the_models_own_queries_sample_as_many_keys_as_those_drawn_for_magicpigs_step() -> None:
    """About 0.4% of the keys for each head, and four times as many together: the paper's Table 8 has 0.5%."""
    model, context = model_of(dim=128, layers=1), 4096
    ((k, _),) = sampled_kv(model, 1, context, 0)
    draw, shares = torch.Generator().manual_seed(0), list[torch.Tensor]()
    directions = projections(128, 10, 75, 0)
    for head in range(2):
        keys = k[0, :, head].float()
        theirs = codes(keys, directions, centre=keys.mean(0)).int()
        queries = codes(torch.randn(4, 128, generator=draw), directions).int()
        shares.append(torch.stack([(theirs == one).sum(-1) >= 2 for one in queries]))
    hits = torch.stack(shares).double()
    assert 0.003 < float(hits.mean()) < 0.006
    assert 0.012 < float(hits.amax(1).mean()) < 0.024


def test_a_layer_is_drawn_again_as_it_was() -> None:
    model = model_of()
    one, other = (list(sampled_kv(model, BATCH, 50, 3)) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(one[0][0], one[1][0]) and not torch.equal(one[0][0][0], one[0][0][1])
