"""SnapKV: keep the keys that a prompt's last rows attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.base import is_count
from longreach.methods.call import LayerCall
from longreach.methods.slots import Eviction, PromptEnd, slots_seen
from longreach.ops.types import require


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Keep the keys that the prompt's last rows attend to most (arXiv 2404.14469).

    Votes are post-softmax scores summed over rows and the query heads of a KV head, then pooled over neighbours among
    the keys that may leave, so that a kept key's context stays with it.

    capacity: keys that each KV head keeps, those that stay in any case included: the system prompt and the question
        of a fused prompt, else the last `window` rows.
    window: last rows of the prompt that vote, and stay.
    kernel: neighbours that votes are pooled over, an odd number.
    pool: "max" or "mean", how they are pooled.

    A3's code (arXiv 2511.17560) repeats keys for each query head before it evicts; here KV heads choose.
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

    def keeps_all(self, length: int) -> bool:
        return length <= self.capacity

    def keep(self, call: LayerCall, prompts: Sequence[PromptEnd]) -> Sequence[Tensor]:
        device, heads, longest = call.rows.q.device, call.kv.heads, max(p.length for p in prompts)
        seen = heads * sum(slots_seen(p.length - len(p.rows), len(p.rows)) for p in prompts)
        tile = [number for number, p in enumerate(prompts) for _ in p.rows]
        bounds = *(p.first for p in prompts), *(p.length - p.last for p in prompts), *(p.length for p in prompts)
        sent = torch.tensor([*bounds, *tile]).to(device, non_blocking=True)  # one copy
        (first, last, length), of = sent[: len(bounds)].view(3, -1), sent[len(bounds) :]
        lse, logits = call.op("score_keys", counted=seen)
        scores = call.op("pooled_scores", lse=lse, logits=logits, tile=of, tiles=len(prompts), counted=seen)
        slots = torch.arange(longest, device=device)
        stay = (slots < first[:, None, None]) | (slots >= last[:, None, None])  # [B, 1, N]
        votes = self._pooled(scores[:, :, :longest], stay).masked_fill(stay, torch.inf)
        count = torch.full(votes.shape[:2], self.capacity, device=device)
        index, _ = call.op("top_k", votes.float(), count, length, capacity=self.capacity)
        return index.long().unbind()  # type: ignore[no-any-return]

    def _pooled(self, votes: Tensor, stay: Tensor) -> Tensor:
        """Votes [B, G, N] pooled over the neighbours that may leave, those where `stay` [B, 1, N] is false."""
        half = self.kernel // 2
        if self.pool == "max":
            return F.max_pool1d(votes.masked_fill(stay, -torch.inf), self.kernel, stride=1, padding=half)
        total, near = (  # sums
            F.avg_pool2d(x, (1, self.kernel), stride=1, padding=(0, half), divisor_override=1)
            for x in (votes.masked_fill(stay, 0.0), (~stay).to(votes))
        )
        return total / near.clamp(min=1)
