"""The memory that a method takes in addition to vLLM's cache. Without vLLM, and without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from longreach.adapters.vllm.memory import Needs, Reservation
from longreach.methods.call import ModelShape
from longreach.methods.registry import choose

SHAPE = ModelShape(32, 32, 8, 128)  # Llama-3.1-8B's


def needs(decode: str, ranks: int = 1, captured: int = 4) -> Needs:
    return Needs.of(
        choose("decode", decode), SHAPE, ranks=ranks, requests=8, captured=captured, page=16, capacity=1 << 17,
        dtype=torch.bfloat16,
    )  # fmt: skip


def test_state_of_tokens_grows_with_pages() -> None:
    found = needs("quest")
    assert found.keys == 2 * 32 * 8 * 128 * 2 * 16
    assert found.page == 30 * 8 * 2 * 128 * 2 and found.sequences == 0  # two bounds of a block in 30 layers
    assert needs("quest", ranks=2).page * 2 == found.page


def test_state_of_sequences_does_not() -> None:
    found = needs("mac")
    assert found.page == 0 and found.sequences > 8 * 700 * 2**20


@pytest.mark.parametrize("decode", ["dense", "streaming_llm"])
def test_methods_without_state(decode: str) -> None:
    found = needs(decode)
    assert (found.page, found.sequences, found.workspace, found.captured) == (0, 0, 0, 0)
    assert found.held(1 << 30) == 0


def test_what_is_held_leaves_room_for_pages_and_their_state() -> None:
    found = needs("quest", captured=0)
    available = 10 << 30
    pages = (available - found.held(available)) // found.keys
    assert 0 <= available - pages * (found.keys + found.page) < found.keys + found.page + 2
    assert needs("omnikv").held(0) == needs("omnikv").captured == needs("omnikv").workspace // 2


def test_nothing_is_held_on_a_cpu_or_for_a_cache_of_fixed_size() -> None:
    cache = SimpleNamespace(kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.9)
    one = Reservation(needs("quest"), SimpleNamespace(cache_config=cache))
    one.take(torch.device("cpu"))
    one.take(torch.device("cuda"))
    assert one._held is None
    one.release()


def test_memory_is_held_until_the_cache_is_made_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, taken = needs("quest"), list[int]()

    def empty(size: int, **options: object) -> object:
        taken.append(size)
        return object()

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch, "empty", empty)
    cache = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    one = Reservation(found, SimpleNamespace(cache_config=cache))
    for _layer in range(2):
        one.take(torch.device("cuda"))
    assert taken == [found.held((72 - 10) << 30), found.workspace] and one._held is not None
    one.release()
    one.take(torch.device("cuda"))  # vLLM captures piecewise graphs by passes without metadata
    assert len(taken) == 2 and one._held is None
