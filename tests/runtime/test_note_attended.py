"""Rows that an engine's own kernels attended for: observed and counted as those of `attend_layer`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from longreach import Quest, StreamingLLM
from longreach.cache import KVCache
from longreach.errors import InvalidInput
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.runtime import Ledger, Pass, Report, Segment, StateStore, attend_layer, note_attended
from tests.methods.drive import LAYERS, MODEL, call_of, new_cache, states_of, text

QUEST = Quest(k=8, page=4, dense_layers=())


def calls(cache: KVCache, p: Pass, length: int = 12) -> Iterator[LayerCall]:
    """The calls of a pass over the first tokens of a text."""
    whole, step = text(length), cache.begin([0], [length])
    for layer in range(LAYERS):
        cache.append(layer, step, whole.k[layer], whole.v[layer])
        yield call_of(cache, p, layer, step, whole.q[layer], whole.k[layer])
    cache.commit(step)


@pytest.mark.parametrize("window", [None, 5])
def test_it_is_counted_and_observed_as_attended(window: int | None) -> None:
    found = list[tuple[Report, list[torch.Tensor]]]()
    for own in (False, True):
        ledger, cache = Ledger(), new_cache()
        p = Pass((Segment("prefill", Dense(), (QUEST,)),), MODEL, states_of(cache), ledger)
        for call in calls(cache, p):
            if own:
                note_attended(p, call, "engine", window=window)
            else:
                attend_layer(p, call, window=window)
        ledger.commit()
        states = [state["low"].nan_to_num() for state in states_of(cache).states((QUEST,))]  # type: ignore[index]
        found.append((ledger.report(QUEST), states))
    (attended, bounds), (noted, same) = found
    assert len(bounds) == len(same) == (LAYERS if window is None else 0)
    assert all(torch.equal(a, b) for a, b in zip(bounds, same, strict=True))
    for a, b in zip(attended.layers, noted.layers, strict=True):
        assert (a.rows, a.key_bytes, a.value_bytes, a.metadata_bytes, a.dense_bytes, a.dense_reasons) == (
            b.rows, b.key_bytes, b.value_bytes, b.metadata_bytes, b.dense_bytes, b.dense_reasons)  # fmt: skip
        assert "engine" in b.impl


def test_a_layer_attends_once_and_densely() -> None:
    cache = new_cache()
    p = Pass((Segment("prefill", Dense()),), MODEL, states_of(cache))
    call = next(calls(cache, p))
    note_attended(p, call, "engine")
    with pytest.raises(InvalidInput, match="layer 0 has attended in this pass already"):
        note_attended(p, call, "engine")
    other = Pass((Segment("prefill", StreamingLLM()),), MODEL, states_of(cache))
    with pytest.raises(InvalidInput, match="method: expected dense, got streaming_llm"):
        note_attended(other, call, "engine")


def test_an_engine_may_answer_for_what_was_observed() -> None:
    """A store with `all_observed` gives state for tokens that nobody has marked."""
    for all_observed in (False, True):
        store, cache = StateStore(1, all_observed=all_observed), new_cache()
        p = Pass((Segment("decode", QUEST),), MODEL, store)
        call = next(calls(cache, p))
        if all_observed:
            assert store.get(QUEST, call) is not None
        else:
            late = call.take(torch.tensor([5]))
            with pytest.raises(InvalidInput, match="of which it observed the first 0 only"):
                store.get(QUEST, late)
