"""SnapKV: keep the keys that a prompt's last rows attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.base import is_count
from longreach.methods.call import LayerCall
from longreach.methods.slots import Eviction, slots_seen
from longreach.ops.types import require


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Keep the keys that the prompt's last rows attend to most (arXiv 2404.14469).

    capacity: keys that each KV head keeps, those that stay in any case included: the system prompt and the question of
    a fused prompt, else the last `window` rows. Votes are post-softmax scores summed over rows and the query heads of a
    KV head, then pooled over `kernel` neighbours (odd) among the keys that may leave, so that a kept key's context
    stays with it: by their maximum, or their mean. A3's code (arXiv 2511.17560) repeats keys for each query head before
    it evicts; here KV heads choose.
    """

    capacity: int = 1024
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"

    name = "snapkv"

    def __post_init__(self) -> None:
        for name in ("capacity", "window", "kernel"):
            require(is_count(getattr(self, name), 1), f"{name}: expected a count >= 1, got {getattr(self, name)!r}")
        require(self.kernel % 2 == 1, f"kernel: expected an odd number of neighbours, got {self.kernel}")
        require(self.pool in ("max", "mean"), f"pool: expected 'max' or 'mean', got {self.pool!r}")

    def check_parts(self, length: int, first: int, last: int) -> None:
        if length > self.capacity < first + last:
            raise InvalidInput(
                f"snapkv: capacity {self.capacity} is less than the {first + last} tokens that stay, {first} at the "
                f"prompt's beginning and {last} at its end; give a larger capacity"
            )

    def keep(self, call: LayerCall, length: int, first: int, last: int) -> Tensor | None:
        self.check_parts(length, first, last)
        if length <= self.capacity:
            return None
        rows, one = len(call.rows.pos), torch.zeros_like(call.rows.pos)
        seen = call.kv.heads * slots_seen(length - rows, rows)
        lse, logits = call.op("score_keys", counted=seen)
        scores = call.op("pooled_scores", lse=lse, logits=logits, tile=one, tiles=1, counted=seen)
        votes, half = scores[0, :, first : length - last], self.kernel // 2  # [G, what may leave]
        if self.pool == "max":
            votes = F.max_pool1d(votes[None], self.kernel, stride=1, padding=half)[0]
        else:
            votes = F.avg_pool1d(votes[None], self.kernel, stride=1, padding=half, count_include_pad=False)[0]
        best = votes.sort(descending=True, stable=True).indices[:, : self.capacity - first - last] + first
        columns = torch.arange(length, device=votes.device).expand(len(votes), -1)
        return torch.cat([columns[:, :first], best.sort().values, columns[:, length - last :]], 1)
