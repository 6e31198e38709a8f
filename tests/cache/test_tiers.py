"""Which layers stay in device memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.cache import CacheConfig, HostAttend, MemoryUse
from longreach.cache import tiers as tiers_module
from longreach.cache.tiers import Tiers
from longreach.errors import CapacityError, InvalidInput, Unsupported

CPU = torch.device("cpu")


def placed(limit: int | None, resident: tuple[int, ...] = (), layers: int = 6, host: bool = True) -> set[int]:
    tiers = Tiers(CacheConfig(host=host, device_bytes=limit), layers, resident, CPU)
    tiers.plan(100)
    return set(tiers.host)


@pytest.mark.parametrize(
    "limit, resident, in_host",
    [
        (None, (), {0, 1, 2, 3, 4, 5}),
        (None, (0, 3), {1, 2, 4, 5}),
        (None, (0, 1, 2, 3, 4, 5), set()),
        (600, (), set()),  # all fit, and nothing is staged
        (599, (), {3, 4, 5}),  # two layers' worth is for staging
        (599, (5,), {2, 3, 4}),
        (499, (4, 5), {0, 1, 2, 3}),
        (300, (4, 5), {0, 1, 2, 3, 5}),
        (200, (4, 5), {0, 1, 2, 3, 4, 5}),
    ],
)
def test_layers_read_whole_come_first(limit: int | None, resident: tuple[int, ...], in_host: set[int]) -> None:
    assert placed(limit, resident) == in_host


def test_a_cache_in_device_memory_places_nothing() -> None:
    assert placed(None, host=False) == set()


def test_a_limit_below_the_staging_of_a_layer_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"=199 .* does not hold the 2 staging buffers .* to at least 200"):
        placed(199)


def test_a_plan_that_the_host_has_no_memory_for_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, asked = Tiers(CacheConfig(host=True), 4, (0,), CPU), list[int]()
    monkeypatch.setattr(tiers_module, "check_available", asked.append)
    tiers.plan(100)
    before = tiers.host
    tiers.plan(200, held=300, moving=100)  # three layers grow, one at a time
    assert asked == [300, 400]

    def none(nbytes: int) -> None:
        raise CapacityError("full")

    tiers.resident = frozenset()
    monkeypatch.setattr(tiers_module, "check_available", none)
    with pytest.raises(CapacityError):
        tiers.plan(400)
    assert tiers.host == before


def test_other_devices_are_refused() -> None:
    with pytest.raises(Unsupported, match="expected a cache on a cuda device, got meta"):
        Tiers(CacheConfig(host=True), 2, (), torch.device("meta"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"host": 1}, "host: expected True or False, got 1"),
        ({"kind": "paged", "host": True}, "host: expected kind='contiguous'"),
        ({"device_bytes": 100}, "device_bytes: limits the GPU memory of a cache with host=True"),
        ({"host": True, "device_bytes": 0}, "device_bytes: expected a count >= 1, got 0"),
        ({"host": True, "device_bytes": 1e9}, "device_bytes: expected a count >= 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        CacheConfig(**options)  # type: ignore[arg-type]


def test_memory_in_words_and_as_json() -> None:
    use = MemoryUse((1, 2), (0,), 3 << 30, 1 << 20, 2 << 20)
    assert str(use) == (
        "keys and values: 2 layers (3.00 GiB) in host memory, read over the link; 1 layer (1.00 MiB) in device "
        "memory; prompts are staged through 2.00 MiB more of it"
    )
    assert use.to_json() == {
        "host_layers": [1, 2], "device_layers": [0], "host_bytes": 3 << 30, "device_bytes": 1 << 20,
        "staging_bytes": 2 << 20, "attend": {"by": "link", "link_ms": None, "cpu_ms": None, "why": None},
    }  # fmt: skip
    chosen = replace(use, attend=HostAttend("cpu", 3.456, 1.2))
    told = "in host memory, where the CPU attends to them (a step took 3.46 ms over the link, 1.20 ms by the CPU); 1 "
    assert told in str(chosen)
    unknown = replace(use, attend=HostAttend(why="not measured, as 3 tokens are few"))
    assert "read over the link (not measured, as 3 tokens are few); 1 layer" in str(unknown)
