"""Which layers stay in device memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.cache import CacheConfig, HostAttend, KVCache, MemoryUse
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


def test_attention_by_the_cpu_is_for_a_gpu() -> None:
    with pytest.raises(Unsupported, match="host_attend='cpu': expected a cache on a cuda device, got cpu"):
        KVCache(1, 1, CacheConfig(host=True, host_attend="cpu"))


def test_buffers_of_the_cpu_count_and_name_their_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(1, 1, CacheConfig(host=True))
    cache.calls.buffer("q", (3, 5), torch.float32)
    cache.calls.buffer("q", (3, 5), torch.float32)
    cache.calls.buffer("none", (0, 4), torch.int32)
    assert cache.memory_use.calls_bytes == cache.calls.nbytes == 4 * 15 + 4 * 4

    def full(*given: object, **options: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("longreach.cache.host.mmap.mmap", full)
    with pytest.raises(CapacityError, match=r"for attention on the CPU \(no memory\).*host_attend='link'"):
        cache.calls.buffer("k", (3, 5), torch.float32)


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
        "cpu_layers": [], "calls_bytes": 0,
    }  # fmt: skip
    chosen = replace(use, attend=HostAttend("cpu", 3.456, 1.2), cpu_layers=(1, 2), calls_bytes=3 << 20)
    told = "in host memory, where the CPU attends to them (a step took 3.46 ms over the link, 1.20 ms by the CPU); 1 "
    assert told in str(chosen)
    assert str(chosen).endswith("more of it; the CPU's buffers take 3.00 MiB more of host memory")
    some = "where the CPU attends to 1 of them and the GPU reads the others over the link (a step took"
    assert some in str(replace(chosen, cpu_layers=(2,)))
    none = "in host memory, read over the link (no decode step was computed by the CPU); 1 layer"
    assert none in str(replace(use, attend=HostAttend("cpu")))
    for nothing in (replace(use, attend=None), replace(chosen, host_layers=(), cpu_layers=())):
        assert "in host memory; 1 layer" in str(nothing)
    assert replace(use, attend=None).to_json()["attend"] is None
    unknown = replace(use, attend=HostAttend(why="not measured, as 3 tokens are few"))
    assert "read over the link (not measured, as 3 tokens are few); 1 layer" in str(unknown)
