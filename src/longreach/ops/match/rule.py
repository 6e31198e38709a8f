"""The rule of a match, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.ops.types import require

DEPTHS = (0, 1, 2, 4, 8, 16, 32)  # starts of the depth histogram's bins
NOTES = (
    "matched",  # whether the row was looked for at all
    "accepted",  # whether the head's nearest row was near enough
    "reused",  # and so were those of all heads of its KV head
    "accepted_share",  # share of the context between sinks and the matched row's band; 0 without a match
    "skipped_share",  # the same, if it was reused: the share that the head does not read
    "gap",  # positions back to the row that was accepted
    "gap_spread",  # standard deviation of the gaps of a KV head's query heads, if all matched
    "head_keys",  # keys that the head takes part in
    "stream_keys",  # keys that its KV head reads
    "resting",  # whether the profit guard kept the row from being looked for
    *(f"depth_{n}" for n in DEPTHS),  # of the entry that the row leaves
)


def tie(dtype: torch.dtype) -> float:
    """Squared distances up to this times |q|^2 count as equal: rounding makes equal queries differ by that much.

    Let u be the unit roundoff. A rotated query is rounded three times: both products of a channel pair and their sum.
    Recovering the query before rotation rounds once, `weight` rounds once more. The relative error is at most
    (sqrt 2 + 1 + 1 + 1) u < 4.5 u. Its root mean square is sqrt(4/3) u, as one rounding has at most u / sqrt 3. For
    the difference of two queries it is sqrt(8/3) u = 1.6 u. The bound is 4 u. It is 8 u where the projection's sums are
    kept in the dtype: another batch size adds them in another order (in fp32 a prompt's pass and a step differ by
    3.8 u). `weight` is one number for both channels of a pair. dtype: the ring's.
    """
    units = 8 if dtype in (torch.float32, torch.float64) else 4
    return (units * torch.finfo(dtype).eps / 2) ** 2


class Nearest(NamedTuple):
    """The nearest earlier row of each row and head.

    distance: squared L2, fp32 (fp64 for fp64) [R, H], inf for none, 0 up to what rounding makes of equal queries (see
    `tie`); position: int32 [R, H], the row found, -1 for none; it lies at position % C of the ring.
    """

    distance: Tensor
    position: Tensor


@dataclass(frozen=True)
class Rule:
    """When a row reuses the cached attention of an earlier row: one layer's numbers.

    The row at position m searches the rows at [m - window, m) that have an entry. The entry of row p covers slots
    [sinks, p + 1 - band).
    limit: squared distance below which a row matches, in the ring's dtype (see `tie`). 0: no row matches.
    min_context: context in tokens below which there is no search.
    deepest: entries of this depth are not reused. None: no limit.
    near, far: the gaps m - p that are accepted. The whole window is searched in any case.
    patience, reuses, rest, price: the profit guard. Each KV head has an account, which is full at first. A search
    without a match costs 1. A search with a match in every query head earns (keys saved) / (its own cost in keys) - 1.
    Its cost is `price` times the rows searched; in the paper's Eq. 9 price is 1. Below 0 the head rests for `rest` rows
    and then searches once. The account holds at most `patience`, or the earnings of `reuses` reuses of the whole
    context if that is more: one match can pay for many searches that fail by chance. A head that stops matching rests
    after that many searches. patience=inf: there is no guard.
    """

    window: int
    band: int
    limit: float
    sinks: int = 0
    min_context: int = 0
    deepest: int | None = None
    near: int = 1
    far: int = 1 << 30
    patience: float = math.inf
    reuses: float = 0.0
    rest: int = 1
    price: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("band", 1), ("sinks", 0), ("min_context", 0), ("near", 1), ("rest", 1)):
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 30
            require(ok, f"{name}: expected an int in [{least}, 2^30), got {value!r}")
        require(self.near <= self.far, f"far: expected at least near={self.near}, got {self.far!r}")
        ok = self.deepest is None or (isinstance(self.deepest, int) and 1 <= self.deepest < 1 << 15)
        require(ok, f"deepest: expected None or a count in [1, 2^15), got {self.deepest!r}")
        for name in ("limit", "patience", "reuses", "price"):
            value = getattr(self, name)
            ok = isinstance(value, (int, float)) and value >= 0
            require(ok, f"{name}: expected a number >= 0, got {value!r}")

    @property
    def oldest(self) -> int:
        """Rows before this position have an empty entry."""
        return self.sinks + self.band


class Matched(NamedTuple):
    """The reads of each row, and the place of its own entry. R rows, H query heads, G KV heads.

    start: int32 [R, H], the slot from which the head attends, in addition to the sinks: p + 1 - band (always above
        `sinks`) if it reuses the entry of row p, else `sinks`. All heads of a KV head reuse one, or none does (they
        share a stream).
    read_entry: int32 [R, H], the entry reused, as a row of memory [S * H * C], -1 for none; write_entry: the row of
        memory that the row's own entry belongs in.
    reads: int32 [R, G, 2]: keys that the KV head streams, and bytes of the ring (entries with them) that it reads.
    notes: fp32 [R, H, len(NOTES)].
    """

    start: Tensor
    read_entry: Tensor
    write_entry: Tensor
    reads: Tensor
    notes: Tensor
