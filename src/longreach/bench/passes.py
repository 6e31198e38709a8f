"""The passes that an anchor of Kascade makes, each by itself (Figure 8 of the paper)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from longreach.bench.check import WrongResult, bound
from longreach.methods.base import LayerCall, Outcome
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.part import Part
from longreach.ops import Lists, Logits, Partial


class Pass(NamedTuple):
    """call: makes it anew from what those before it left. read: bytes, what they left for it among them."""

    call: Callable[[], object]
    read: int


def anchor_passes(method: Kascade, call: LayerCall, part: Part, whole: Outcome) -> dict[str, Pass]:
    """What an anchor that is not dense does, in turn. whole: what the method made of the same call.

    Raises WrongResult where the passes do not add up to that.
    """
    copy, length = part.copy, call.rows.pos.long() + 1

    def score() -> tuple[Tensor, Logits]:
        return call.score_keys(None if copy is None else copy.keys)

    lse, logits = score()

    def pool() -> Tensor:
        return method.over_heads(call, call.pooled_scores(lse, logits=logits).float())

    scores = pool()
    count = method.keys(length, length)[:, None].repeat(1, scores.shape[1])

    def top_k() -> tuple[Tensor, Tensor]:
        most = method.most(call.kv.capacity)
        return call.top_k(scores, count, length, first=method.sinks, last=method.recent, capacity=most)

    chosen = Lists(*top_k(), in_sight=True)

    def attend() -> Partial:
        return call.attend_values(chosen, logits) if copy is None else call.attend(chosen)

    want = whole.partial.out.double()
    off = float((attend().out.double() - want).norm() / want.norm())
    if not off <= bound(call.rows.q.dtype):
        raise WrongResult(f"an anchor's passes differ from the anchor by {off:.2e}; their times do not count")
    vector = call.kv.k.shape[3] * call.kv.k.element_size()
    keys = length.sum() * call.kv.heads * vector if copy is None else copy.bytes_read(call).sum()
    listed = int(chosen.reads(call.rows, call.kv).sum()) * vector
    return {
        "score": Pass(score, int(keys)),
        "pool": Pass(pool, _bytes(logits.x) + (0 if logits.top is None else _bytes(logits.top))),
        "top_k": Pass(top_k, _bytes(scores)),
        "attend": Pass(attend, listed if copy is None else 2 * listed),
    }


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
