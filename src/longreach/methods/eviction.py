"""Eviction: after a prompt is read, each layer and KV head keeps the keys that the prompt's end attends to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.cache import StatelessOnTruncate
from longreach.errors import InvalidInput
from longreach.methods.base import PromptObserver, is_count
from longreach.methods.call import LayerCall
from longreach.ops import KVView, Rows
from longreach.ops.types import require


class LastRows(StatelessOnTruncate):
    """Queries of the last `size` rows of each sequence's prompt, in one layer, by slot of the row modulo size."""

    def __init__(self, call: LayerCall, size: int, slots: int):
        device = call.rows.q.device
        self.size, self.call = size, call
        self.q = call.rows.q.new_zeros(slots, size + 1, *call.rows.q.shape[1:])  # the last entry takes what is older
        self.pos = torch.full((slots, size + 1), -1, dtype=torch.int64, device=device)

    def reset(self, slots: Tensor) -> None:
        self.pos[slots] = -1

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """The rows past the cut are forgotten. Lengths are in tokens: only what was never evicted from is cut there."""
        here = self.pos[slots]
        self.pos[slots] = here.masked_fill(here >= lengths[:, None], -1)

    def note(self, call: LayerCall) -> None:
        rows = call.rows
        if rows.runs is not None:  # a host that knows where sequences end copies only their last rows
            index, start = list[Tensor](), 0
            for run in rows.runs:
                index.append(torch.arange(start + max(0, run.rows - self.size), start + run.rows))
                start += run.rows
            rows = rows.take(torch.cat(index).to(rows.pos.device))
        at, pos = rows.seq.long(), rows.pos.long()
        recent = pos >= call.kv.seq_lens.long()[at] - self.size
        place = call.slots.long()[at], torch.where(recent, pos % self.size, self.size)
        self.q[place], self.pos[place] = rows.q, pos
        self.call = replace(call, rows=rows.take(torch.arange(0, device=pos.device)))

    def rows(self, slot: int, seq: int, length: int) -> Rows:
        """The noted rows of the sequence in `slot`, which holds `length` slots, as rows of sequence `seq` of a view."""
        pos = self.pos[slot, : self.size]
        index = ((pos >= max(0, length - self.size)) & (pos < length)).nonzero()[:, 0]
        return Rows(self.q[slot, index].contiguous(), torch.full_like(index, seq), pos[index])


@dataclass(frozen=True)
class Eviction(PromptObserver, ABC):
    """Base of methods that fill the evict slot. Subclasses are frozen dataclasses of options.

    window: rows at a prompt's end whose queries are kept until then; under fusion the question's rows take their place.
    Layers with a sliding window keep all keys.
    """

    window: int = 32

    keeps = "sequences"
    observes_prompt = True

    def new_state(self, call: LayerCall, slots: int) -> LastRows:
        return LastRows(call, self.window, slots)

    def observe_prompt(self, call: LayerCall, state: object) -> None:
        assert isinstance(state, LastRows)
        state.note(call)

    def check_parts(self, length: int, first: int, last: int) -> None:
        """Raise InvalidInput where a prompt of `length` tokens has more that are to stay, at its ends, than may."""

    @abstractmethod
    def keep(self, call: LayerCall, length: int, first: int, last: int) -> Tensor | None:
        """int64 [G, n]: the slots of a sequence that each KV head keeps, ascending; None for all.

        call: rows at the prompt's end over the layer's keys; the sequence holds `length` slots. The `first` and `last`
        of them are to stay. Raises InvalidInput where these are more than may stay.
        """

    def kept(
        self, state: LastRows, view: KVView, slots: Sequence[int], lengths: Sequence[int], first: int
    ) -> dict[int, Tensor]:
        """slot -> what its sequence keeps in one layer; sequences that keep all are left out.

        view: all sequences of the cache, by slot. lengths: slots in use of each of `slots`.
        """
        found = dict[int, Tensor]()
        for slot, length in zip(slots, lengths, strict=True):
            rows = state.rows(slot, slot, length)
            if not len(rows.pos):
                continue
            call = replace(state.call, rows=rows, kv=view, slots=torch.arange(len(view.seq_lens), device=view.k.device))
            index = self.keep(call, length, min(first, length), min(self.window, length))
            if index is not None:
                found[slot] = index
        return found


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Keep the keys that the prompt's last rows attend to most (arXiv 2404.14469).

    capacity: keys that each KV head keeps, those that stay in any case included: the system prompt and the question of
    a fused prompt, else the last `window` rows. Votes are post-softmax scores summed over rows and the query heads of a
    KV head, then pooled over `kernel` neighbours (odd), so that a kept key's context stays with it: by their maximum,
    or their mean. A3's code (arXiv 2511.17560) repeats keys for each query head before it evicts; here KV heads choose.
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
                f"snapkv: capacity {self.capacity} is less than the {first} tokens of the system prompt and {last} of "
                f"the question, which stay; give a larger capacity"
            )

    def keep(self, call: LayerCall, length: int, first: int, last: int) -> Tensor | None:
        self.check_parts(length, first, last)
        if length <= self.capacity:
            return None
        lse, logits = call.op("score_keys")
        scores = call.op("pooled_scores", lse=lse, logits=logits)[..., :length]
        columns = torch.arange(length, device=scores.device)
        votes = torch.where(columns <= call.rows.pos[:, None, None], scores, 0.0).sum(0)  # [G, N]
        half = self.kernel // 2
        if self.pool == "max":
            votes = F.max_pool1d(votes[None], self.kernel, stride=1, padding=half)[0]
        else:
            votes = F.avg_pool1d(votes[None], self.kernel, stride=1, padding=half, count_include_pad=False)[0]
        stays = (columns < first) | (columns >= length - last)
        ranked = votes.masked_fill(stays, torch.inf).sort(descending=True, stable=True).indices
        return ranked[:, : self.capacity].sort().values
