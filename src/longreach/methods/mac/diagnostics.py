"""MAC's diagnostics: columns for each row and head, and their summary in the report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach.ops.match import DEPTHS, NOTES

COLUMNS = (*NOTES, "band_mass", "weighed", "error", "probed")  # the last two only if rows are probed
AT = {name: number for number, name in enumerate(COLUMNS)}


def columns(notes: Tensor, whole: Tensor, before: Tensor, *apart: Tensor) -> Tensor:
    """COLUMNS [L, R, H, C], less the last two, from notes of the match [L, R, H, N], the lse of all keys [L, R, H],
    that of the keys before the band, and those of what lies neither before the band nor in it."""
    mass = 1.0 - torch.exp(before - whole)
    for x in apart:
        mass = mass - torch.exp(x - whole)
    # an entry's mass is an estimate; NaN for a NaN query
    weighed = (notes[..., AT["reused"]] == 0) & (mass == mass)
    more = (torch.where(weighed, mass, 0.0), weighed)
    return torch.cat([notes, *(x.to(notes.dtype)[..., None] for x in more)], -1)


def probed(error: Tensor, *given: Tensor) -> Tensor:
    """COLUMNS [L, R, H, C], all. error: [L, R, H], NaN where it was not probed; given: as `columns`."""
    more = (error.nan_to_num(0.0), ~error.isnan())
    return torch.cat([columns(*given), *(x.to(given[0].dtype)[..., None] for x in more)], -1)


def summary(sums: Tensor, rows: int, *, ring_bytes: int, band: int) -> dict[str, Any]:
    """The report's values for one layer. sums: fp64 [H, C] of COLUMNS over `rows` rows; lists are by query head.

    searched: share of rows with a search. resting: share of rows without a search because of the profit guard.
    acceptance: share of searches that found a row near enough. reuse: share of rows that reused an entry, which takes
    all heads of a KV head. skipped: E[(p - r)+ / m], the share of keys not read, over all rows; skipped_alone: the
    share that each head alone would not read. gap: mean m - p of accepted rows. gap_spread: mean standard deviation of
    gaps within a KV head, of reused rows. head_keys, stream_keys: mean keys that a head attends to and that its KV head
    reads. depths: share of entries by number of reuses they descend from, by `depth_bins`. band_mass: mean weight on
    the last `band` keys, of rows that attended exactly. error: mean of |o - dense| / |dense| of probed rows.
    None: no such row.
    """

    def of(name: str) -> Tensor:
        return sums[:, AT[name]] if AT[name] < sums.shape[1] else torch.zeros(len(sums), dtype=sums.dtype)

    def share(name: str, over: Tensor | float) -> list[float | None]:
        total = torch.as_tensor(over, dtype=torch.float64).expand(len(sums))
        return [float(a / b) if b > 0 else None for a, b in zip(of(name), total, strict=True)]

    count = float(rows)
    depths = [share(f"depth_{n}", count) for n in DEPTHS]
    reuse, skipped = (float(of(name).mean()) / max(rows, 1) for name in ("reused", "skipped_share"))
    rest = float(of("resting").mean()) / max(rows, 1)
    note = f"reused {reuse:.1%}, skipped {skipped:.1%}"
    return {
        "note": f"{note}, rested {rest:.1%}" if rest else note,
        "searched": share("matched", count),
        "acceptance": share("accepted", of("matched")),
        "reuse": share("reused", count),
        "skipped": share("skipped_share", count),
        "skipped_alone": share("accepted_share", count),
        "gap": share("gap", of("accepted")),
        "gap_spread": share("gap_spread", of("reused")),
        "head_keys": share("head_keys", count),
        "stream_keys": share("stream_keys", count),
        "resting": share("resting", count),
        "depth_bins": list(DEPTHS),
        "depths": [list(head) for head in zip(*depths, strict=True)],
        "band": band,
        "band_mass": share("band_mass", of("weighed")),
        "error": share("error", of("probed")),
        "ring_bytes_per_sequence": ring_bytes,
    }
