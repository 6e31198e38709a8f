"""How many prompts at a time: the same on the same kind of machine, whatever else holds its memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longreach.evals.batching import MOST, fitting_batch
from longreach.testing.tiny import tiny_model

GIB = 1 << 30


class OnGpu:
    """A model that says it is on a GPU."""

    def __init__(self, model: Any):
        self._model, self.device = model, torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """total: bytes of the GPU; free: what others leave of it."""
    sizes = {"total": 8 * GIB, "free": 8 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (sizes["free"], sizes["total"]))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=sizes["total"])
    )
    return sizes


def test_a_cpu_is_busy_with_one() -> None:
    assert fitting_batch(tiny_model("llama"), 4096, 512) == 1


def test_what_others_hold_does_not_count(memory: dict[str, int]) -> None:
    model = OnGpu(tiny_model("llama"))
    expected = fitting_batch(model, 1_000_000, 512)
    memory["free"] //= 16
    assert fitting_batch(model, 1_000_000, 512) == expected


def test_longer_prompts_and_smaller_devices_take_fewer(memory: dict[str, int]) -> None:
    model = OnGpu(tiny_model("llama"))
    found = [fitting_batch(model, length, 512) for length in (1000, 1_000_000, 4_000_000, 1_000_000_000)]
    assert found[0] == MOST > found[1] > found[2] >= found[3] == 1
    assert all(n & (n - 1) == 0 for n in found)
    memory["total"] //= 4
    assert fitting_batch(model, 1_000_000, 512) == found[1] // 4


def test_weights_take_their_place(memory: dict[str, int]) -> None:
    model = OnGpu(tiny_model("llama"))
    memory["total"] = sum(p.numel() * p.element_size() for p in model.parameters()) + 1000
    assert fitting_batch(model, 4096, 512) == 1
