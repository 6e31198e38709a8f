"""Checks of a KV cache's arguments, made before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops.types import FLOATS, INTS, describe, require


def is_int(x: Any, least: int | None = None) -> bool:
    """Whether x is an int (a bool is none) of at least `least`."""
    return isinstance(x, Integral) and not isinstance(x, bool) and (least is None or int(x) >= least)


def check_slots(what: str, slots: Any, total: int, noun: str = "", each: Any = ()) -> None:
    """Raise InvalidInput unless slots are distinct ints in [0, total), and `each` has as many entries if it has a noun.

    what: the call; noun: what an entry is, for the message.
    """
    named = all(is_int(s) for s in slots) if _length(slots) is not None else False
    require(named, lambda: f"{what}: expected a sequence of ints as slots, got {_short(slots)}")
    asked = f"{what}: expected distinct slots" + (f" and {noun} for each" if noun else "")
    count = _length(each)
    require(not noun or count is not None, lambda: f"{asked}, got {_short(each)}")
    got = f"slots {list(slots)}" + (f" and {count} of the other" if noun else "")
    require(len(set(slots)) == len(slots) and (not noun or count == len(slots)), f"{asked}, got {got}")
    require(all(0 <= s < total for s in slots), f"{what}: expected slots in [0, {total}), got {list(slots)}")


def check_counts(what: str, slots: Any, total: int, counts: Any) -> None:
    """Raise InvalidInput unless slots are as in `check_slots`, and counts an int >= 0 for each."""
    check_slots(what, slots, total, "a number", counts)
    ok = all(is_int(n, 0) for n in counts)
    require(ok, lambda: f"{what}: expected ints >= 0 as numbers, got {_short(counts)}")


def _length(x: Any) -> int | None:
    """Its number of entries; None if it has no length."""
    try:
        return len(x)
    except TypeError:
        return None


def _short(x: Any) -> str:
    return describe(x) if isinstance(x, Tensor) else f"{x!r:.60}"


def checked_positions(slot: int, held: int, positions: Sequence[int] | Tensor, overwrite: bool) -> Tensor:
    """int64 [n] on the host: positions of rows to place in a sequence of `held` tokens. Raises InvalidInput."""
    try:
        p = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidInput(
            f"place: slot {slot}: expected a list or int tensor [n] of positions, got {_short(positions)}"
        ) from error
    ok = p.dim() == 1 and (p.dtype in INTS or not p.numel()) and p.device.type == "cpu"
    require(ok, f"place: expected a list or int tensor [n] of positions on the host, got {describe(p)}")
    p = p.long()
    if not p.numel():
        return p
    low, back = int(p[0]), (p.diff() <= 0).nonzero()
    require(low >= 0, f"place: slot {slot}: expected positions >= 0, got {low}")
    if back.numel():
        one, two = p[int(back[0]) :][:2].tolist()
        raise InvalidInput(f"place: slot {slot}: position {two} after {one} goes back; give each once, in order")
    in_use = f"place: slot {slot} holds {held} tokens, so position {low} is in use; pass overwrite=True to replace it"
    require(overwrite or low >= held, in_use)
    skipped = (p[p >= held] != torch.arange(held, held + int((p >= held).sum()))).nonzero()
    if skipped.numel():
        expected = held + int(skipped[0])
        found = int(p[p >= held][int(skipped[0])])
        raise InvalidInput(f"place: slot {slot}: position {found} skips some; expected {expected}, the next one")
    return p


def check_rows(rows: Tensor, count: int) -> None:
    """Raise InvalidInput unless rows [r] are some of a pass of `count` rows. Values are checked on a CPU only."""
    require(len(rows) <= count, f"rows: expected at most the {count} of the pass, each once, got {len(rows)}")
    if rows.device.type != "cpu" or not len(rows):
        return
    low, high = int(rows.min()), int(rows.max())
    require(low >= 0 and high < count, f"rows: expected in [0, R={count}), got {low} to {high}")
    twice = rows.sort().values.diff() == 0
    require(not bool(twice.any()), "rows: expected each row of the pass at most once, got one twice")


def checked_kept(
    index: dict[int, Tensor], used: Sequence[int], heads: int, device: torch.device, values: bool = True
) -> dict[int, Tensor]:
    """The slots to keep of each sequence, without the sequences that keep all. Raises InvalidInput.

    index: slot -> int64 [heads, n]; used: slots in use of every sequence. values: whether values are checked as well,
    with one device sync.
    """
    for slot, i in index.items():
        ok = isinstance(i, Tensor) and i.dim() == 2 and i.shape[0] == heads
        ok = ok and i.dtype == torch.int64 and i.device == device
        require(ok, f"keep: slot {slot}: expected int64 [G={heads}, n] on {device}, got {describe(i)}")
        require(i.shape[1] > 0, f"keep: slot {slot}: expected at least one slot to keep; to empty it call reset")
    if values:
        _check_kept(index, used)
    return {slot: i for slot, i in index.items() if i.shape[1] < used[slot]}


def _check_kept(index: dict[int, Tensor], used: Sequence[int]) -> None:
    found = [torch.stack([i.amin(), i.amax(), (i.diff() == 0).any(), (i.diff() < 0).any()]) for i in index.values()]
    facts = torch.stack(found).tolist() if found else []
    for slot, (low, high, twice, back) in zip(index, facts, strict=True):
        filled = low >= 0 and high < used[slot]
        require(
            filled, f"keep: slot {slot}: expected slots in [0, {used[slot]}), which are filled, got {low} to {high}"
        )
        require(not twice, f"keep: slot {slot}: expected each slot at most once in a head, got one twice")
        require(not back, f"keep: slot {slot}: expected slots in ascending order in each head")


def check_appended(
    layer: int, k: Tensor, v: Tensor, count: int, device: torch.device, held: tuple[Tensor, Tensor] | None
) -> None:
    """Raise InvalidInput where k and v [count, G, D] do not fit a cache's device, or what a layer holds (None: nothing
    yet)."""
    ok = isinstance(k, Tensor) and k.dim() == 3 and k.shape[0] == count and k.dtype in FLOATS
    require(ok, lambda: f"k: expected float [R={count}, G, D], got {describe(k)}")
    same = isinstance(v, Tensor) and v.shape == k.shape and v.dtype == k.dtype
    require(same, lambda: f"v: expected {describe(k)} like k, got {describe(v)}")
    on = k.device == device and v.device == device
    require(on, lambda: f"k, v: expected on {device} like the cache, got {describe(k)} and {describe(v)}")
    if held is None:
        return
    keys, one = held[0], held[1] is held[0]
    told = "the keys themselves" if one else "a tensor of their own"
    require(one == (v is k), lambda: f"v: layer {layer} holds its values as {told}; append them in the same way")
    same = keys.shape[1::2] == k.shape[1:] and keys.dtype == k.dtype
    require(same, lambda: f"k: layer {layer} holds {describe(keys)} [P, G, page, D], got {describe(k)}")
