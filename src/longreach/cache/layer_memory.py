"""The memory of each layer's keys and values: made when the layer first needs it, grown, and moved between tiers.

Memory is allocated outside inference mode, so that a cache filled under it can be used without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from longreach.cache.compact import Pair
from longreach.cache.config import CacheConfig
from longreach.cache.host_pool import HostPool
from longreach.cache.layout import Layout
from longreach.cache.tiers import STAGING, HostAttend, MemoryUse, Tiers


class LayerMemory:
    """K and V of each layer, [P, G, page, D] each, or None. The same tensor twice is one memory for both.

    in_host: layers whose memory is the host's. resident: layers that stay in device memory first.
    """

    def __init__(self, config: CacheConfig, layers: int, resident: Collection[int], device: torch.device):
        self._held: list[Pair | None] = [None] * layers
        self.in_host = set[int]()
        self._tiers = Tiers(config, layers, resident, device)

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, layer: int) -> Pair | None:
        return self._held[layer]

    def __iter__(self) -> Iterator[Pair | None]:
        return iter(self._held)

    @property
    def resident(self) -> frozenset[int]:
        return self._tiers.resident

    def use_pool(self, pool: HostPool) -> None:
        """Take host memory from a pool."""
        self._tiers.pool = pool

    def make(self, layer: int, shape: Sequence[int], k: Tensor, v: Tensor) -> Pair:
        """First memory of a layer, K and V [shape] like k and v; one if v is k.

        The first of all places all layers: raises CapacityError as `Tiers.plan`.
        """
        if not any(self):
            self._tiers.plan(_bytes(shape, k))
        with torch.inference_mode(False):
            pair = self._empty(layer, shape, k, v)
        self._store(layer, pair)
        return pair

    def replace(self, layer: int, pair: Pair) -> None:
        """Other memory for a layer in device memory."""
        self._held[layer] = pair

    def clear(self) -> None:
        """Release all memory."""
        self._held = [None] * len(self._held)
        self.in_host.clear()

    def plan(self, sizes: Sequence[tuple[Layout, int, int]]) -> None:
        """Place layers again if they are to grow. Raises CapacityError with nothing changed.

        sizes: of each layout, the slots of a page and the number of pages to come.
        """
        if not self._tiers.config.host or not any(self):
            return
        ((_, size, total),) = sizes  # of all layers, as none of them was evicted from
        held = [x for pair in self if pair for x in pair]
        if any(x.shape[0] < total or x.shape[2] < size for x in held):
            each, x = self.layer_bytes(), held[0]
            inside = [each[layer] for layer in self.in_host]
            shape = (total, x.shape[1], size, x.shape[3])
            self._tiers.plan(_bytes(shape, x), sum(inside), max(inside, default=0))

    def grow(self, layers: Collection[int], size: int, total: int) -> None:
        """Move layers to `total` pages of `size` slots, one by one: each old memory goes before the next is made.

        Those that leave device memory go first: the others grow into their room, within `device_bytes`. An allocation
        that fails leaves the layers before it with more memory than the others.
        """

        def moved(layer: int, held: Pair) -> Pair:
            new = self._empty(layer, (total, held[0].shape[1], size, held[0].shape[3]), *held)
            for x, y in zip(held, new, strict=True):
                y[: x.shape[0], :, : x.shape[2]] = x
            return new

        leaving = self._tiers.host - self.in_host
        for layer in sorted(layers, key=lambda layer: (layer not in leaving, layer)):
            held = self._held[layer]
            if held and (held[0].shape[0] < total or held[0].shape[2] < size):
                with torch.inference_mode(False), torch.no_grad():
                    self._store(layer, moved(layer, held))

    def layer_bytes(self) -> list[int]:
        """Bytes of each layer."""
        each = [{id(x): x for x in held or ()}.values() for held in self]
        return [sum(x.numel() * x.element_size() for x in tensors) for tensors in each]

    def use(self, attend: HostAttend | None, calls_bytes: int) -> MemoryUse:
        """Where keys and values lie, and the bytes of each."""
        each = self.layer_bytes()
        host = tuple(sorted(self.in_host))
        device = tuple(layer for layer, held in enumerate(self) if held and layer not in self.in_host)
        largest = max((each[layer] for layer in host), default=0)
        sizes = (sum(each[n] for n in host), sum(each[n] for n in device), STAGING * largest)
        return MemoryUse(host, device, *sizes, attend, calls_bytes=calls_bytes)

    def _empty(self, layer: int, shape: Sequence[int], k: Tensor, v: Tensor) -> Pair:
        """Memory for a layer, K and V [shape] like k and v, in the tier that it was placed in last; one if v is k."""
        keys = self._tiers.empty(layer, shape, k)
        return keys, keys if v is k else self._tiers.empty(layer, shape, v)

    def _store(self, layer: int, pair: Pair) -> None:
        """This memory of `_empty` is the layer's from now on."""
        self._held[layer] = pair
        (self.in_host.add if layer in self._tiers.host else self.in_host.discard)(layer)


def _bytes(shape: Sequence[int], x: Tensor) -> int:
    """Bytes of keys and values of one layer, [shape] each, of the dtype of x."""
    return 2 * prod(shape) * x.element_size()
