"""`drive`: a pass over given calls counts whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.runtime import Ledger, Pass, Segment, drive
from tests.methods.drive import LAYERS, MODEL, call_of, new_cache, states_of, text


def test_nothing_of_a_pass_that_failed_is_counted() -> None:
    ledger, whole, cache = Ledger(), text(12), new_cache()

    def one_pass(layers: int) -> list[LayerCall]:
        step, p = cache.begin([0], [12]), Pass((Segment("prefill", Dense()),), MODEL, states_of(cache), ledger)

        def calls() -> Iterator[LayerCall]:
            for layer in range(layers):
                cache.append(layer, step, whole.k[layer], whole.v[layer])
                yield call_of(cache, p, layer, step, whole.q[layer], whole.k[layer])
            assert layers == LAYERS, "the engine fails"

        return [call for call, _ in drive(p, calls())]

    with pytest.raises(AssertionError, match="the engine fails"):
        one_pass(LAYERS - 1)
    assert ledger.report().layers == ()
    assert len(one_pass(LAYERS)) == LAYERS
    assert {(layer.steps, layer.rows) for layer in ledger.report().layers} == {(1, 12)}
