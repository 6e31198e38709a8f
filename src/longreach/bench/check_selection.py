"""Checks, against fp64, that a method chose the right keys and that its output is attention over them."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.bench.case import Memory
from longreach.bench.check import WrongResult, bound
from longreach.bench.inputs import Inputs
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.ops import Lists, Selection

LEAST_MASS = {  # of the exact choice's probability, by how keys are scored; what a method must reach is its target
    "exact": 0.999,  # scores near the last one chosen are equal but for rounding
    "int8": 0.95,  # keys chosen by wrong scores hold far less
}


def sampled(inputs: Inputs) -> list[tuple[int, int]]:
    """(sequence, KV head) pairs that are checked."""
    shape = inputs.shape
    return [(b, g) for b in sorted({0, shape.batch - 1}) for g in sorted({0, shape.kv_heads - 1})]


def keys_and_values(inputs: Inputs, memory: Memory, copy: int, seq: int, head: int) -> tuple[Tensor, Tensor]:
    """fp64 [N, D] each."""
    k, v = inputs.kv(copy, memory)
    if memory.page is None:
        return k[seq, head].double(), v[seq, head].double()
    pages = inputs.table(memory.page)[seq].long()
    return k[pages, head].flatten(0, 1).double(), v[pages, head].flatten(0, 1).double()


def logits(inputs: Inputs, memory: Memory, copy: int, seq: int, head: int) -> tuple[Tensor, Tensor]:
    """fp64 [query heads of the KV head, N] of the sequence's last row, and its values [N, D]."""
    group = inputs.shape.heads // inputs.shape.kv_heads
    k, v = keys_and_values(inputs, memory, copy, seq, head)
    q = inputs.q(copy, 1)[seq, head * group : (head + 1) * group].double()
    return q @ k.T * inputs.scale, v


def listed(lists: Selection, seq: int, head: int) -> Tensor:
    """Slots that a KV head of a sequence attends to. Raises WrongResult where they do not ascend."""
    assert isinstance(lists, Lists)
    entry = head if lists.head_map is None else int(lists.head_map[head])
    slots = lists.index[seq, min(entry, lists.index.shape[1] - 1)][: int(lists.count[seq].flatten()[0])].long()
    if not bool((slots[1:] > slots[:-1]).all()):
        raise WrongResult(f"keys of sequence {seq}, KV head {head} do not ascend; its time does not count")
    return slots


def check_layer(kind: str, inputs: Inputs, memory: Memory, copy: int, call: LayerCall, outcome: Outcome) -> float:
    """The largest relative error (norms) of a layer's output over the keys of the values that it reports as read."""
    worst, group = 0.0, inputs.shape.heads // inputs.shape.kv_heads
    selection = call.meter.values[0]
    for seq, head in sampled(inputs):
        x, v = logits(inputs, memory, copy, seq, head)
        slots = listed(selection, seq, head) if isinstance(selection, Lists) else slice(None)
        want = x[:, slots].softmax(-1) @ v[slots]
        got = outcome.partial.out[seq, head * group : (head + 1) * group].double()
        worst = max(worst, float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()))
    most = bound(inputs.dtype)
    if not worst <= most:
        raise WrongResult(f"{kind}: relative error {worst:.2e} exceeds {most:.1e}; its time does not count")
    return worst


def check_selection(
    inputs: Inputs, memory: Memory, copy: int, lists: Selection, *, least: float = LEAST_MASS["exact"], sinks: int = 0,
    recent: int = 1,
) -> float:  # fmt: skip
    """The least share of the exact choice's probability that chosen keys have, over the anchor's own heads.

    The exact choice has the first `sinks` and the last `recent` keys too. One list a sequence is a choice of all heads.
    Raises WrongResult where those keys are not chosen, or the share is less than `least`.
    """
    assert isinstance(lists, Lists)
    shape, worst = inputs.shape, 1.0
    together = lists.index.shape[1] == 1 < shape.kv_heads
    for seq, head in sampled(inputs):
        if together and head:
            continue
        heads = range(shape.kv_heads) if together else [head]
        pooled = sum(logits(inputs, memory, copy, seq, h)[0].softmax(-1).sum(0) for h in heads)
        assert isinstance(pooled, Tensor)
        count = int(lists.count[seq, head])
        chosen = lists.index[seq, head, :count].long()
        forced = torch.zeros(shape.context, dtype=torch.bool, device=pooled.device)
        forced[:sinks], forced[shape.context - recent :] = True, True
        if int(forced[chosen].sum()) != int(forced.sum()):
            what = "the newest key" if sinks + recent == 1 else f"one of the first {sinks} and last {recent} keys"
            raise WrongResult(f"{what} of sequence {seq} is not among those chosen; its time does not count")
        best = pooled.masked_fill(forced, torch.inf).topk(count).indices
        worst = min(worst, float(pooled[chosen].sum() / pooled[best].sum()))
    if not worst >= least:
        raise WrongResult(f"chosen keys hold {worst:.4f} of what the best hold; their time does not count")
    return worst
