"""The passes that an anchor of Kascade makes, each by itself (Figure 8 of the paper)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from longreach.bench.check import WrongResult, bound
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.state import KascadeState
from longreach.ops import Lists, Logits, Partial


class Timed(NamedTuple):
    """call: repeats this pass from the results of those before it. read: bytes, including those results."""

    call: Callable[[], object]
    read: int


def anchor_passes(method: Kascade, call: LayerCall, state: KascadeState, whole: Outcome) -> dict[str, Timed]:
    """The passes of an anchor that is not dense, in order. whole: the method's own outcome of the same call.

    Raises WrongResult where the passes do not add up to that.
    """
    copy, length, budget = state.copy, call.rows.pos.long() + 1, method.budget

    def score() -> tuple[Tensor, Logits]:
        return call.op("score_keys", keys=None if copy is None else copy.scoring)

    lse, logits = score()

    def pool() -> Tensor:
        return budget.over_heads(call, call.op("pooled_scores", lse=lse, logits=logits).float())

    scores = pool()
    count = budget.keys(length, length)[:, None].repeat(1, scores.shape[1])

    def top_k() -> tuple[Tensor, Tensor]:
        capacity = budget.max_keys(call.kv.capacity)
        return call.op("top_k", scores, count, length, first=method.sinks, last=method.recent, capacity=capacity)

    chosen = Lists(*top_k(), all_visible=True)

    def attend() -> Partial:
        return call.op("attend_from_logits", chosen, logits) if copy is None else call.attend(chosen)

    want = whole.partial.out.double()
    off = float((attend().out.double() - want).norm() / want.norm())
    if not off <= bound(call.rows.q.dtype):
        raise WrongResult(f"an anchor's passes differ from the anchor by {off:.2e}; their times do not count")
    vector = call.kv.k.shape[3] * call.kv.k.element_size()
    scored = vector if copy is None else call.kv.k.shape[3] + copy["scale"].element_size()
    keys = length.sum() * call.kv.heads * scored
    listed = int(chosen.keys_read(call.rows, call.kv).sum()) * vector
    return {
        "score": Timed(score, int(keys)),
        "pool": Timed(pool, _bytes(logits.x) + (0 if logits.top is None else _bytes(logits.top))),
        "top_k": Timed(top_k, _bytes(scores)),
        "attend": Timed(attend, listed if copy is None else 2 * listed),
    }


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
