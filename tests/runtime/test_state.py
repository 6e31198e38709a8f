"""StateStore: state of the model itself, which every pass changes."""

from __future__ import annotations

import pytest
import torch

from longreach.cache.mix_state import MixState
from longreach.errors import Unsupported
from longreach.methods.quest import Quest
from longreach.runtime import StateStore


def test_state_of_the_model_follows_and_is_in_every_snapshot() -> None:
    store, model = StateStore(2), MixState(2, "cpu", means=True, block=None)
    assert not store.has_model("means")
    assert store.of_model("means", lambda: model) is model
    assert store.of_model("means", lambda: MixState(1, "cpu", means=True, block=None)) is model
    assert store.has_model("means") and store.states() == [] and store.places == frozenset()
    slots = torch.arange(2)
    for n in range(3):
        model.begin(slots, slots, torch.full((2,), n))
    restore = store.snapshot((Quest(),))
    assert store.nbytes == model.nbytes
    for n in range(3, 14):
        model.begin(slots, slots, torch.full((2,), n))
    with pytest.raises(Unsupported, match="cannot be cut from 14 to 5"):
        store.check_truncate(slots, torch.tensor([5, 5]))
    store.truncate(slots, torch.tensor([3, 3]))
    restore()
    assert model.count[:, 3].tolist() == [3, 3]
    store.reset(slots)
    assert model.count.max() == 0
    store.drop(Quest())
    assert store.has_model("means")
