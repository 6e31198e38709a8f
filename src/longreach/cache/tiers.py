"""The memory that each layer's keys and values lie in: the device's, or host memory that the device reads in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from longreach.cache.config import CacheConfig
from longreach.cache.host import Purpose, allocate, check_available, gib
from longreach.cache.host_pool import HostPool
from longreach.errors import CapacityError, Unsupported

CPU_ATTENDS = Purpose("attention on the CPU", "Lower the batch, or use CacheConfig(host_attend='link') (--host-attend)")
STAGING = 2  # buffers, of one layer each: one is read while the other is filled


@dataclass(frozen=True)
class HostAttend:
    """Who computes a decode step's attention to layers in host memory, and how that was chosen.

    by: "link", the GPU, or "cpu". link_ms, cpu_ms: of a captured step each way, if both were measured. why: the reason
    why they were not, else None.
    """

    by: Literal["link", "cpu"] = "link"
    link_ms: float | None = None
    cpu_ms: float | None = None
    why: str | None = None

    def __str__(self) -> str:
        """How it was chosen; empty if that was by the user."""
        if self.link_ms is None or self.cpu_ms is None:
            return self.why or ""
        return f"a step took {self.link_ms:.2f} ms over the link, {self.cpu_ms:.2f} ms by the CPU"


@dataclass(frozen=True)
class MemoryUse:
    """Where keys and values lie. Bytes are those allocated.

    host_layers: in host memory; device_layers: in the device's memory. attend: who is to compute a decode step's
    attention to layers in host memory; None on a CPU. cpu_layers: of host_layers, those that the CPU attended to for a
    GPU. staging_bytes: of the device's memory that a pass over a prompt takes in addition, to read the layers in host
    memory. calls_bytes: of pinned host memory that attention on the CPU takes in addition.
    """

    host_layers: tuple[int, ...]
    device_layers: tuple[int, ...]
    host_bytes: int
    device_bytes: int
    staging_bytes: int
    attend: HostAttend | None = HostAttend()
    cpu_layers: tuple[int, ...] = ()
    calls_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        found = {name: list(x) if isinstance(x, tuple) else x for name, x in self.__dict__.items()}
        return {**found, "attend": None if self.attend is None else asdict(self.attend)}

    def __str__(self) -> str:
        buffers = f"; the CPU's buffers take {gib(self.calls_bytes)} more of host memory" if self.calls_bytes else ""
        return (
            f"keys and values: {_layers(self.host_layers)} ({gib(self.host_bytes)}) in host memory{self._way()}; "
            f"{_layers(self.device_layers)} ({gib(self.device_bytes)}) in device memory; prompts are staged "
            f"through {gib(self.staging_bytes)} more of it{buffers}"
        )

    def _way(self) -> str:
        """Who attended to the layers in host memory."""
        if self.attend is None or not self.host_layers:
            return ""
        why = str(self.attend)
        if not self.cpu_layers:
            who = "read over the link"
            if self.attend.by == "cpu" and not why:
                why = "no decode step was computed by the CPU"
        elif len(self.cpu_layers) == len(self.host_layers):
            who = "where the CPU attends to them"
        else:
            who = f"where the CPU attends to {len(self.cpu_layers)} of them and the GPU reads the others over the link"
        return f", {who} ({why})" if why else f", {who}"


def check_attend(config: CacheConfig, device: torch.device) -> None:
    """Raise Unsupported for attention by the CPU on a device that is not a GPU."""
    if config.host_attend == "cpu" and device.type != "cuda":
        raise Unsupported(
            f"host_attend='cpu': expected a cache on a cuda device, got {device}; leave CacheConfig(host_attend=) out"
        )


def _layers(layers: Collection[int]) -> str:
    return f"{len(layers)} layer{'' if len(layers) == 1 else 's'}"


class Tiers:
    """Divides layers between device and host memory by the bytes of a layer, and allocates them there.

    resident: layers that go to device memory first. host: layers placed in host memory by the last `plan`. pool: gives
    host memory that earlier caches used; None: the system gives fresh memory.
    """

    def __init__(self, config: CacheConfig, layers: int, resident: Collection[int], device: torch.device):
        if config.host and device.type not in ("cpu", "cuda"):
            raise Unsupported(f"host: expected a cache on a cuda device, got {device}; leave CacheConfig(host=) out")
        self.config, self.layers, self.device = config, layers, device
        self.resident = frozenset(resident)
        self.host = frozenset[int]()
        self.pool: HostPool | None = None

    def plan(self, layer_bytes: int, held: int = 0, moving: int = 0) -> None:
        """Place layers of `layer_bytes` each, keys and values together. All layers are taken to be of one size.

        held: bytes of host memory that the cache has; moving: of it, what exists twice while one layer grows.
        Raises CapacityError, with nothing changed: if `device_bytes` does not hold the staging of one layer, or if the
        host has too little memory.
        """
        if not self.config.host:
            return
        host = self._placed(layer_bytes)
        if self.pool is None:
            check_available(len(host) * layer_bytes - held + moving)
        else:
            self.pool.reserve(2 * len(host), layer_bytes // 2)  # keys, and values
        self.host = host

    def _placed(self, layer_bytes: int) -> frozenset[int]:
        limit, staging = self.config.device_bytes, STAGING * layer_bytes
        order = sorted(range(self.layers), key=lambda layer: (layer not in self.resident, layer))
        if limit is None:
            room = len(self.resident)
        elif limit >= self.layers * layer_bytes:
            room = self.layers  # with nothing in host memory nothing is staged
        elif limit < staging:
            raise CapacityError(
                f"device_bytes={limit} ({gib(limit)}) does not hold the {STAGING} staging buffers of "
                f"{gib(layer_bytes)} through which a prompt reads layers in host memory; nothing was written. Raise "
                f"CacheConfig(device_bytes=...) (--device-memory) to at least {staging} ({gib(staging)})"
                f"{self._with_resident(layer_bytes)}, or lower the batch, CacheConfig(capacity=...), the prompt or "
                f"max_new_tokens"
            )
        else:
            room = (limit - staging) // layer_bytes
        return frozenset(order[room:])

    def _with_resident(self, layer_bytes: int) -> str:
        """The limit that also holds the layers that go to device memory first, in words; empty without such layers."""
        if not self.resident:
            return ""
        limit, goes = (len(self.resident) + STAGING) * layer_bytes, "goes" if len(self.resident) == 1 else "go"
        return f", or to {limit} ({gib(limit)}) to keep the {_layers(self.resident)} that {goes} there first"

    def empty(self, layer: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory [shape] for keys or values of a layer, of the dtype and on the device of `like`."""
        if layer in self.host:
            take = allocate if self.pool is None else self.pool.take
            return take(shape, like.dtype, self.device)
        return like.new_empty(shape)
