"""Anchors scored by an 8-bit copy of their keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import longreach
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.quantised_keys import QuantisedKeys
from longreach.methods.kascade.state import KascadeState
from longreach.ops import KVView, Lists
from longreach.testing.tiny import random_tokens
from longreach.testing.tolerance import assert_close
from tests.methods.drive import CACHES, DIM, KV_HEADS, Text, Turn, exact, new_cache, outputs, read_text, run, text
from tests.methods.kascade.planned import planned
from tests.methods.kascade.test_on_models import model_and_plan
from tests.methods.metered import metadata_of

caches = pytest.mark.parametrize("config", [*CACHES.values(), CacheConfig("paged", page=3, capacity=60)], ids=str)


def in_8_bits(length: int, seed: int = 0) -> Text:
    """A text whose keys an 8-bit copy holds as they are: whole numbers up to 127, times 2^-5."""
    whole = text(length, seed=seed)
    k = (whole.k / whole.k.abs().amax(-1, keepdim=True) * 127).round() / 32
    return Text(whole.q, k, whole.v)


@caches
def test_where_the_copy_is_exact_it_is_exact_scoring(config: CacheConfig, tmp_path: Path) -> None:
    """Ragged, interleaved, in memory that grows; layer 2 reuses what layer 1 chooses."""
    plan, texts = planned(tmp_path, (0, 1), {2: (1, 0)}), [in_8_bits(50, 1), in_8_bits(40, 2)]
    found = []
    for scoring in ("exact", "int8"):
        method, cache = Kascade(plan, k=0.2, min_keys=3, scoring=scoring), new_cache(config, slots=3)
        run(cache, method, [Turn(texts[0], 2, 30), Turn(texts[1], 0, 9)])
        run(cache, method, [Turn(texts[1], 0, 17)])
        turns = [[(0, 2)], [(1, 0), (0, 2)], [(0, 2), (1, 0)], [(1, 0)]] * 2
        steps = [run(cache, method, [Turn(texts[i], slot) for i, slot in turn]) for turn in turns]
        found.append(torch.cat([p.outs(row) for p in steps for row in range(len(p.calls[0].slots))], 1))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)


def test_what_is_chosen_is_attended_to_as_it_is(tmp_path: Path) -> None:
    """By other keys than exact scoring's where the copy errs, but over their true logits."""
    plan, whole = planned(tmp_path, (0, 1)), text(400, seed=3)
    exactly, roughly = (read_text(Kascade(plan, k=150, scoring=s), whole)[-1] for s in ("exact", "int8"))
    lists = [turn.calls[1].meter.values[0] for turn in (exactly, roughly)]
    sets = [[set(x.index[0, g].tolist()) for g in range(KV_HEADS)] for x in lists if isinstance(x, Lists)]
    for a, b in zip(*sets, strict=True):
        assert len(a & b) >= 145 and len(b) == 150
    assert sets[0] != sets[1], "a text where 8 bits choose alike tells nothing"
    for layer in (1, 2):
        call, outcome = roughly.calls[layer], roughly.outcomes[layer]
        assert_close(outcome.partial, exact(call, call.meter.values[0]))


def test_what_it_reads(tmp_path: Path) -> None:
    last = read_text(Kascade(planned(tmp_path, (0, 1)), k=5, scoring="int8"), text(40))[-1]
    call, meter = last.calls[1], last.calls[1].meter
    assert [s.keys_read(call.rows, call.kv)[0].tolist() for s in (*meter.keys, *meter.values)] == [[5, 5], [5, 5]]
    assert metadata_of(call) == ([40 * KV_HEADS * (DIM + 4)], 0)
    for layer in (0, 2):
        assert metadata_of(last.calls[layer]) == ([0], 0)


def test_only_anchors_that_score_keep_a_copy(tmp_path: Path) -> None:
    call = read_text(Kascade(planned(tmp_path), k=5), text(9))[-1].calls[0]
    for dense_layers, kept in (((), [1]), ((1,), [])):
        method = Kascade(planned(tmp_path, (0, 1)), dense_layers=dense_layers, scoring="int8")
        states = [method.new_state(replace(call, layer=layer), 1) for layer in range(3)]
        assert [n for n, state in enumerate(states) if state.copy is not None] == kept
    assert Kascade(scoring="int8").observes_prompt and not Kascade().observes_prompt


def test_the_copy_moves_with_the_cache(tmp_path: Path) -> None:
    """What was captured in a graph before then reads the old one, and is told so."""
    method, whole, cache = Kascade(planned(tmp_path), k=5, scoring="int8"), in_8_bits(300), new_cache()
    run(cache, method, [Turn(whole, 0, 200)])
    run(cache, method, [Turn(whole, 0, 1)])
    (state,) = cache.state.states((method,), 1)  # type: ignore[attr-defined]
    assert isinstance(state, KascadeState) and state.copy is not None and state.generation == 0
    before, old = cache.generation, state.copy["keys"]
    run(cache, method, [Turn(whole, 0, 99)])
    assert state.generation == 1 and cache.generation == before + 2 and state.copy["keys"] is not old
    keys = state.copy["keys"][0, :, :300].float() * state.copy["scale"][0, :, :300, None]
    torch.testing.assert_close(keys, whole.k[1].transpose(0, 1), rtol=0, atol=1e-6)


def test_a_cache_that_begins_anew_may_be_smaller() -> None:
    def view(size: int) -> KVView:
        k = torch.randn(1, KV_HEADS, size, DIM)
        return KVView(k, k.clone(), torch.tensor([3]))

    copy, small = QuantisedKeys(view(20)), view(4)
    copy.ensure_capacity(small)
    copy.note(small, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert copy["keys"].shape == small.k.shape and copy.generation == 1
    keys = copy["keys"][:, :, :3].float() * copy["scale"][:, :, :3, None]
    torch.testing.assert_close(keys, small.k[:, :, :3], rtol=0, atol=float(small.k.abs().max()) / 127)


def test_a_prompt_that_it_did_not_see_is_refused(tmp_path: Path) -> None:
    """The copy is made as tokens come; dense prefill is followed, and so is another Kascade's."""
    model, plan = model_and_plan("llama", tmp_path)
    tokens, method = random_tokens(2, 40), Kascade(plan, k=0.1, min_keys=3, scoring="int8")
    for prefill in (None, method, Kascade(plan, k=0.5)):
        with longreach.attach(model, prefill=prefill, decode=method) as session:
            want = longreach.generate(session, tokens, max_new_tokens=8).tokens
            assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False)[:, 40:], want)
    with longreach.attach(model) as session, torch.no_grad():
        cache = session.new_cache(2)
        model(tokens, past_key_values=cache)
        session.switch(method)
        with pytest.raises(InvalidInput, match=r"kascade decodes with state .* of which it observed the first 0"):
            model(tokens[:, :1], past_key_values=cache)


def test_without_the_state_it_does_not_decode(tmp_path: Path) -> None:
    method = Kascade(planned(tmp_path), k=5, scoring="int8")
    call = read_text(method, text(20))[-1].calls[1]
    with pytest.raises(InvalidInput, match="scoring='int8' decodes with a copy of all keys"):
        method.run(call, None)


def test_outputs_of_a_prompt_are_those_of_exact_scoring(tmp_path: Path) -> None:
    plan, whole = planned(tmp_path, (0, 1)), text(40)
    found = [outputs(read_text(Kascade(plan, k=5, scoring=s), whole)[:1]) for s in ("exact", "int8")]  # type: ignore[arg-type]
    assert torch.equal(*found)
