"""Means over rows, kept on the device until they are read."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """Sums of measures by kind of row and layer, in fp64. kinds: how many kinds of rows there are."""

    def __init__(self, kinds: int, layers: int, device: torch.device):
        self._kinds, self._layers, self._device = kinds, layers, device
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}

    def add(self, name: str, layer: int, kind: Tensor, values: Tensor) -> None:
        """values [r, ...] of rows whose kind is `kind` [r]; a measure's shape behind the rows is always the same."""
        if name not in self._sums:
            shape = (self._kinds, self._layers, *values.shape[1:])
            self._sums[name] = torch.zeros(shape, dtype=torch.float64, device=self._device)
            self._rows[name] = torch.zeros(shape[:2], dtype=torch.int64, device=self._device)
        self._sums[name][:, layer].index_add_(0, kind, values.double())
        self._rows[name][:, layer].index_add_(0, kind, torch.ones_like(kind))

    def mean(self, name: str, kind: int) -> list[Tensor | None]:
        """For each layer the mean over rows of a kind, on the host; None where no row was measured."""
        if name not in self._sums:
            return [None] * self._layers
        sums, rows = self._sums[name][kind].cpu(), self._rows[name][kind].tolist()
        return [total / count if count else None for total, count in zip(sums, rows, strict=True)]
