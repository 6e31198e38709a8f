"""Memory beside the cache's: it grows with it, keeps what it holds, and what was captured before is told."""

from __future__ import annotations

import copy

import pytest
import torch

from longreach.cache import CacheConfig, KVCache, PerSlot, StaticSteps
from longreach.errors import InvalidInput
from tests.cache.drive import fill

CPU = torch.device("cpu")


def made(per: int = 4) -> PerSlot:
    return PerSlot(3, 2, per, device=CPU, codes=(5, torch.int16), bounds=(8, torch.float32))


def test_it_has_room_for_what_it_is_fitted_to() -> None:
    state = made()
    assert state.units == state.nbytes == 0
    for tokens, units in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 4), (40, 10), (2, 10)):
        state.fit(tokens)
        assert state.units == units, "twice as much as before, where it grows"
        assert state["codes"].shape == (3, 2, units, 5) and state["codes"].dtype == torch.int16
        assert state["bounds"].shape == (3, 2, units, 8)
        assert state.nbytes == 3 * 2 * units * (5 * 2 + 8 * 4)


def test_it_keeps_what_it_holds() -> None:
    state = made(1)
    state.fit(3)
    state["bounds"][:] = torch.arange(3)[:, None, None, None]
    state["codes"][1, 0, 2] = 7
    state.fit(50)
    assert torch.equal(state["bounds"][:, 1, 2, 0], torch.tensor([0.0, 1.0, 2.0]))
    assert state["codes"][1, 0, 2].tolist() == [7] * 5
    assert state["bounds"][:, :, 3:].isnan().all(), "what nobody wrote may be anything"


def test_it_can_be_filled_with_zeros() -> None:
    state = made()
    state.fit(9)
    state.zero()
    assert not state["codes"].any() and not state["bounds"].any()


def test_memory_made_in_inference_mode_serves_outside() -> None:
    state = made()
    with torch.inference_mode():
        state.fit(4)
    state["bounds"][0] = 1.0
    assert not state["bounds"].is_inference()


def test_what_was_captured_before_it_moved_is_not_used_again() -> None:
    cache = KVCache(1, 2, CacheConfig(capacity=32))
    fill(cache, [0, 1], [3, 4])
    state = cache.state["some layer"] = PerSlot(2, 1, device=CPU, codes=(1, torch.int32))
    steps = StaticSteps(cache, [0, 1], 1)
    state.fit(5)
    assert steps.valid and cache.resized == state.moved == 0, "there was nothing to be captured"
    state.fit(4)
    assert steps.valid
    state.fit(6)
    assert not steps.valid and cache.resized == state.moved == 1
    again = copy.deepcopy(cache)
    assert again.resized == 1 and again.state["some layer"] is not state


def test_sequences_are_cut_and_forgotten_without_ado() -> None:
    cache = KVCache(1, 2)
    fill(cache, [0, 1], [3, 4])
    state = cache.state["some layer"] = made(1)
    state.fit(4)
    state["codes"][:] = 3
    cache.truncate([1], [2])
    cache.reset([0])
    assert bool((state["codes"] == 3).all())


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, -4)])
def test_sizes_that_are_none_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInput, match="expected slots, heads and tokens a unit >= 1"):
        PerSlot(*sizes, device=CPU, codes=(1, torch.int32))
