"""Caches copied for branches, widened, and cut to some rows: each goes on as if it had read everything itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longreach import CacheConfig, attach, generate
from longreach.cache import StatelessOnTruncate
from longreach.errors import CapacityError, InvalidInput, Unsupported
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.mka.models import SMALL, THREE, converted
from tests.adapters.transformers.reference import model_of, prompt
from tests.adapters.transformers.turns import CONFIGS, LENGTHS, METHODS, NEW, go_on, start
from tests.adapters.transformers.turns import plans_of_tests as plans_of_tests
from tests.adapters.transformers.turns import unwritten_is_nan as unwritten_is_nan
from tests.methods.planned import tiny


@pytest.mark.filterwarnings("ignore:.* layers? whole at each step")
@pytest.mark.covering
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", METHODS)
def test_branches_go_on_as_separate_caches(name: str, config: str) -> None:
    turns = (((1, 2, 3), (4, 5, 6)), ((7, 8, 9), (4, 5, 6)))
    with attach(tiny(), decode=METHODS[name], cache=CONFIGS[config]) as session:
        want = []
        for one, two in turns:
            cache, ids, mask = start(session)
            ids, mask = go_on(session, cache, ids, mask, one)
            want.append(go_on(session, cache, ids, mask, two)[0])
        cache, ids, mask = start(session)
        branch = copy.deepcopy(cache)
        (a, a_mask), (b, b_mask) = (go_on(session, c, ids, mask, t[0]) for c, t in zip((cache, branch), turns))
        got = go_on(session, cache, a, a_mask, turns[0][1])[0], go_on(session, branch, b, b_mask, turns[1][1])[0]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.filterwarnings("ignore:.* layers? whole at each step")
@pytest.mark.covering
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", METHODS)
def test_rows_are_repeated_and_selected(name: str, config: str) -> None:
    """A cache that is widened to two of each row, goes on, and is cut to some rows: as one that read these only."""
    rows, seeds = [5, 0, 3, 3], (70, 71, 72, 73)
    with attach(tiny(), decode=METHODS[name], cache=CONFIGS[config]) as session:
        cache, ids, mask = start(session)
        cache.batch_repeat_interleave(2)
        assert cache.batch == 6 and cache.kv.lengths == [n + NEW - 1 for n in LENGTHS for _ in range(2)]
        wide, wide_mask = go_on(session, cache, *(x.repeat_interleave(2, 0) for x in (ids, mask)), range(6))
        cache.batch_select_indices(torch.tensor(rows))
        got, _ = go_on(session, cache, wide[rows], wide_mask[rows], seeds)
        plain, ids, mask = start(session, [row // 2 for row in rows])
        ids, mask = go_on(session, plain, ids, mask, rows)
        want, _ = go_on(session, plain, ids, mask, seeds)
    assert torch.equal(got, want)


def test_one_prompt_for_several_answers_of_transformers_generate() -> None:
    """As transformers documents it: read once, widen, answer several prompts that begin alike."""
    model = model_of("llama")
    prompts = torch.cat([prompt(20).expand(3, -1), torch.cat([prompt(4, seed=s) for s in range(3)])], 1)
    want = model.generate(prompts, max_new_tokens=8, do_sample=False)
    with attach(model, cache=CacheConfig("paged", page=16)) as session, torch.no_grad():
        cache = session.new_cache()
        model(prompt(20), past_key_values=cache)
        kept = cache.copy()
        cache.batch_repeat_interleave(3)
        got = model.generate(prompts, past_key_values=cache, max_new_tokens=8, do_sample=False)
        alone = model.generate(prompts[1:2], past_key_values=kept, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, want) and torch.equal(alone, want[1:2])


@pytest.mark.parametrize("when", ["before", "after"])
def test_eviction_follows(when: str) -> None:
    """Copied before keys are evicted, each branch evicts by its own last rows; afterwards both have evicted."""
    ids, turn = prompt(60), prompt(20, seed=9)
    whole = torch.cat([ids, turn], 1)
    with attach(model_of("llama"), evict="snapkv capacity=24 window=8") as session, torch.no_grad():
        want = generate(session, whole, max_new_tokens=NEW, prefill_chunk_size=60).sequences
        cache = session.new_cache()
        if when == "before":
            session.model(ids, past_key_values=cache)
            cache.select([0, 0])
            branch = cache.copy()
            both = whole.expand(2, -1)
            for each in (cache, branch):
                got = generate(session, both, max_new_tokens=NEW, past_key_values=each)
                assert torch.equal(got.sequences, want.expand(2, -1))
        else:
            generate(session, whole, max_new_tokens=2, past_key_values=cache, prefill_chunk_size=60)
            assert cache.kv.evicted(0)
            branch = cache.copy()
            branch.batch_repeat_interleave(2)
            more = torch.cat([want[:, :82], prompt(9, seed=3)], 1)
            alone = generate(session, more, max_new_tokens=NEW, past_key_values=cache)
            got = generate(session, more.expand(2, -1), max_new_tokens=NEW, past_key_values=branch)
            assert torch.equal(got.sequences, alone.sequences.expand(2, -1))


def test_a_copy_shares_no_memory_and_survives_the_first_ones_end() -> None:
    with attach(model_of("llama"), decode="quest k=0.2 page=4") as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(), past_key_values=cache)
        branch = copy.copy(cache)
        before = [x[:, :, :40].clone() for pair in branch.kv.memory for x in pair]  # type: ignore[union-attr]
        cache.reset()
        session.model(prompt(seed=4), past_key_values=cache)
        assert branch.columns == 40 and branch.kv.lengths == [40]
        now = [x[:, :, :40] for pair in branch.kv.memory for x in pair]  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        empty = session.new_cache(2).copy()
        session.model(prompt().expand(2, -1), past_key_values=empty)
        assert empty.kv.lengths == [40, 40]


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    class Kept(StatelessOnTruncate):
        nbytes = 8

    with attach(model_of("llama"), decode="quest") as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(), past_key_values=cache)
        cache.states._states[session.decode, 0] = Kept()
        for call in (cache.copy, lambda: cache.batch_repeat_interleave(2)):
            with pytest.raises(Unsupported, match="quest: Kept cannot be copied"):
                call()
        assert cache.batch == 1 and cache.kv.lengths == [40]


def test_bad_rows_and_full_pools_change_nothing() -> None:
    with attach(model_of("llama"), cache=CacheConfig("paged", page=16, pages=4)) as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(), past_key_values=cache)
        for rows in ([1], [-1], [], [True], "0", torch.tensor([[0]]), torch.tensor([0.0]), None):
            with pytest.raises(InvalidInput, match="expected row numbers"):
                cache.batch_select_indices(rows)  # type: ignore[arg-type]
        for repeats in (0, -1, 1.5, True):
            with pytest.raises(InvalidInput, match="expected a count >= 1"):
                cache.batch_repeat_interleave(repeats)  # type: ignore[arg-type]
        with pytest.raises(CapacityError, match="the 2 sequences need 6"):
            cache.batch_repeat_interleave(2)
        step = cache.kv.begin([0], [1])
        with pytest.raises(InvalidInput, match="a pass is under way"):
            cache.copy()
        cache.kv.abort(step)
        assert cache.batch == 1 and cache.kv.lengths == [40] and cache.copy().columns == 40


@pytest.mark.parametrize(
    ("variant", "options"), [("fastmka", {}), ("mka", THREE), ("block_mka", {"tiers": (1, 2, 3), **SMALL})]
)
def test_the_state_of_a_converted_model_follows(variant: str, options: dict[str, Any]) -> None:
    with attach(converted("llama", variant, **options)) as session:
        cache, ids, mask = start(session)
        branch = cache.copy()
        branch.select([2, 0, 0, 1])
        rows = torch.tensor([2, 0, 0, 1])
        want, _ = go_on(session, cache, ids, mask, (1, 2, 3))
        got, _ = go_on(session, branch, ids[rows], mask[rows], (3, 1, 9, 2))
    assert torch.equal(got[[1, 3, 0]], want)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_sliding_windows_and_sinks(family: str) -> None:
    with attach(tiny_model(family), decode="quest k=0.2 page=4") as session:
        cache, ids, mask = start(session)
        branch = cache.copy()
        want, _ = go_on(session, cache, ids, mask, (1, 2, 3))
        got, _ = go_on(session, branch, ids, mask, (1, 2, 3))
    assert torch.equal(got, want)


def test_a_plan_that_is_made_in_one_branch_serves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.methods.loki.automatic.LokiMaker.needed", 16)
    with attach(model_of("llama"), decode="loki k=8") as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(60), past_key_values=cache)
        branch = cache.copy()
        ids = torch.cat([prompt(60), prompt(2, seed=3)], 1)
        one, two = (generate(session, ids, max_new_tokens=NEW, past_key_values=c).sequences for c in (cache, branch))
        assert torch.equal(one, two) and session.report().fraction("decode") < 1
