"""The layouts of all layers: equal layers share one object, so dependent values are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from longreach.cache.layout import Layout
from longreach.cache.pages import Pages
from longreach.errors import Unsupported
from longreach.ops.types import require

T = TypeVar("T")


class Layouts:
    """of_layer: the layout of each layer, the same object for layers that hold the same slots (a group)."""

    def __init__(self, layers: int, pages: Pages):
        self.of_layer = [Layout.fresh(pages)] * layers

    def __getitem__(self, layer: int) -> Layout:
        return self.of_layer[layer]

    def __setitem__(self, layer: int, layout: Layout) -> None:
        """Give a layer another layout, or the one of a group that is the same."""
        self.of_layer[layer] = next((other for other in self.groups() if other == layout), layout)

    def groups(self) -> list[Layout]:
        """The distinct layouts, in the order of the first layer of each."""
        return list({id(layout): layout for layout in self.of_layer}.values())

    def spread(self, each: Sequence[T]) -> tuple[T, ...]:
        """From one thing for each group: one for each layer, or a single one if all layers have the same layout."""
        number = {id(layout): g for g, layout in enumerate(self.groups())}
        return tuple(each[number[id(layout)]] for layout in self.of_layer) if len(number) > 1 else tuple(each)

    def tables(self, slots: Sequence[int], width: int | None = None) -> Tensor:
        """int64 [groups, B, width] on the host: the pages of each sequence, padded with page 0.

        width: at least the most pages that one holds; None: as many, made even where there are several groups.
        """
        held = [[layout.pages.held[s] for s in slots] for layout in self.groups()]
        most = max(layout.width(slots) for layout in self.groups())
        require(width is None or width >= most, f"table: {most} pages do not fit into {width} columns")
        width = width or most + (most % 2 if len(held) > 1 else 0)
        rows = [[pages + [0] * (width - len(pages)) for pages in each] for each in held]
        return torch.tensor(rows, dtype=torch.int64).view(len(held), len(slots), width)

    def sizes_for(self, lengths: dict[int, int], exact: bool) -> list[tuple[Layout, int, int]]:
        """(layout, size, total) of each group, see Pages.sizes_for. Changes nothing; raises CapacityError."""
        return [(layout, *layout.sizes_for(lengths, exact)) for layout in self.groups()]

    def check_cut(self, slot: int, length: int) -> None:
        """Raise Unsupported where a sequence cannot be cut to `length` tokens in all layers."""
        for layout in self.groups():
            layout.check_cut(slot, length)

    def cut(self, slot: int, length: int) -> None:
        """The sequence ends after `length` tokens; its other pages go back."""
        for layout in self.groups():
            layout.cut(slot, length)

    def check_overwrite(self, slot: int, pos: int) -> None:
        """Raise Unsupported where keys were evicted from a sequence in some layer."""
        layers = [layer for layer, layout in enumerate(self.of_layer) if layout.evicted_at[slot]]
        if layers:
            raise Unsupported(
                f"place: position {pos} of slot {slot} cannot be overwritten: keys were evicted from it in layers "
                f"{layers}, where heads hold different positions; overwrite before evicting"
            )
