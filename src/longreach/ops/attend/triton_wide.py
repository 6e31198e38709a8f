"""How attend's kernel for wide heads and large groups is launched: its pieces of heads and channels, and its tuning.

Decode is bound by memory: of N keys of D channels a KV head's K and V are read from memory once (once in all where V
is K), whatever the group; items of one KV head read them again from L2. For heads of 512 channels and 8 KV heads, 32K
keys are 537 MB, 130 us at 4.2 TB/s. For DeepSeek-V3 (576 channels, 128 query heads) they are 38 MB, 9 us. Its 9.7 GFLOP
take longer: 30 us at the 325 TFLOP/s of items of 32 heads, which read the keys through L2 four times, in 27 us at
5.5 TB/s. Smaller groups are bound by memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from longreach.ops.attend import triton_tuning as narrow
from longreach.ops.attend.tiles import Tiles
from longreach.ops.attend.triton_tuning import INTERPRETED, Tuning, next_power_of_2
from longreach.ops.tile_lists import RowTiles
from longreach.ops.types import PLAIN_GROUP as MANY
from longreach.ops.types import PLAIN_WIDEST as WIDE

PROMPT = 256  # rows from which a call is a prompt's: an item has a program of its own


def is_wide(dim: int, group: int) -> bool:
    """Whether a launch is of attend_wide."""
    return dim > WIDE or group > MANY


def channels(dim: int) -> tuple[int, int]:
    """Powers of two that hold `dim` channels together; the second is 0 where the first is enough."""
    if dim <= WIDE:
        return max(16, next_power_of_2(dim)), 0
    first = 1 << (dim.bit_length() - 1)
    return first, max(16, next_power_of_2(dim - first)) if dim > first else 0


def most_rows(dim: int, dtype: torch.dtype, rows: int) -> int:
    """Rows x heads of an item, in a call of `rows` rows.

    Wide heads of a prompt take 64, which fill wgmma. In decode steps 32 do without spills, as the loop over what a
    program was dealt leaves fewer registers.
    """
    if dtype == torch.float32:
        return 16 if dim > WIDE // 2 else 32
    return 32 if dim > WIDE and rows < PROMPT else 64


def tuning(
    dtype: torch.dtype, dim: int, m: int, *, lists: bool, page: int, dense: bool, items: int, shared: bool
) -> Tuning:
    """The launch for m rows x heads of an item. shared: values are the keys. Measured on an H200 for decode steps
    of 128 heads (docs/performance.md), elsewhere by registers and shared memory of compute capability 9.0."""
    if INTERPRETED:
        return Tuning(32, 1, 1, 1)
    if dtype == torch.float32 and dim > WIDE // 2:
        return Tuning(16, 4, 2, 1)
    if WIDE // 2 < dim <= WIDE and m > 32:
        return Tuning(64, 8, 2, 1)
    if dim <= WIDE:
        wide = max(16, next_power_of_2(dim))
        return narrow.tuning(dtype, wide, m, lists=lists, page=page, dense=dense, items=items)
    unit = 32 if dense else 16
    if m <= 16 or (shared and m <= 32):
        return Tuning(32, 4, 3 if shared else 2, 2, unit=unit)
    return Tuning(32, 8, 2, 1, unit=unit)


def keeping(t: Tuning) -> Tuning:
    """The launch of a dense pass that writes its logits: blocks lie at their multiples, so a unit is a block."""
    return replace(t, unit=t.block)


def tiles_of(tiles: RowTiles, most: int) -> Tiles:
    """A prompt's tiles, cut into pieces of at most `most` rows."""
    table = tiles.rows
    size = min(table.shape[1], most)
    spare = -table.shape[1] % size
    if spare:
        table = torch.nn.functional.pad(table, (0, spare), value=-1)
    table = table.reshape(-1, size).contiguous()
    return Tiles(table.shape[0], size, table=table)
