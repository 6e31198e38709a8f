"""Checks of a forced step against fp64: the reusing heads, keys read, outputs and new entries."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.bench.case import Memory
from longreach.bench.check import WrongResult, bound
from longreach.bench.mac.forced_hits import ForcedHits
from longreach.methods.call import LayerCall


@torch.no_grad()
def check_step(planted: ForcedHits, copy: int) -> float:
    """The largest relative error (norms) of outputs and new entries, of some heads that reuse and some that do not.

    Raises WrongResult where it exceeds what rounding explains, or where a KV head reads other keys than it should.
    """
    name, shape, reuse = planted.hits.name, planted.inputs.shape, planted.reuse[copy]
    call, outcome = planted.run(copy)
    want = torch.where(reuse, planted.gap + planted.band, shape.context)
    if not torch.equal(keys_counted(call).long(), want):
        raise WrongResult(f"{name}: KV heads read other keys than was forced; its time does not count")
    group, worst = shape.heads // shape.kv_heads, 0.0
    state = planted.states[copy]
    newest = (shape.context - 1) % state.ring.size
    for seq, head in sampled(reuse):
        mine = slice(head * group, (head + 1) * group)
        whole, amended = exact(planted, copy, seq, head)
        row = (seq * shape.heads + torch.arange(shape.heads, device=reuse.device)[mine]) * state.ring.size + newest
        for got, right in ((outcome.partial.out[seq, mine], whole), (state.entries.out[row], amended)):
            worst = max(worst, float(((got.double() - right).norm(dim=-1) / right.norm(dim=-1)).max().nan_to_num(9e9)))
    most = bound(planted.inputs.dtype)
    if not worst <= most or not bool(torch.isfinite(outcome.partial.out).all()):
        raise WrongResult(f"{name}: relative error {worst:.2e} exceeds {most:.1e}; its time does not count")
    return worst


def keys_counted(call: LayerCall) -> Tensor:
    """int [B, G]: the keys that each KV head read, as the match has counted them."""
    (counted,) = (noted.read.counted for noted in call.meter.noted if isinstance(noted.read.counted, Tensor))
    return counted


def sampled(reuse: Tensor) -> list[tuple[int, int]]:
    """(sequence, KV head) pairs: corners, and the first of each kind. reuse: bool [B, G]."""
    batch, heads = reuse.shape
    corners = {(0, 0), (batch - 1, heads - 1)}
    kinds = (x.nonzero()[:1].tolist() for x in (reuse, ~reuse))
    return sorted(corners | {(b, g) for kind in kinds for b, g in kind})


def exact(planted: ForcedHits, copy: int, seq: int, head: int) -> tuple[Tensor, Tensor]:
    """fp64 [query heads of the KV head, D] each: the row's output, merged with the reused entry, and its new entry."""
    inputs, state = planted.inputs, planted.states[copy]
    shape, group = inputs.shape, inputs.shape.heads // inputs.shape.kv_heads
    own = torch.arange(head * group, (head + 1) * group, device=inputs.device)
    reused = bool(planted.reuse[copy][seq, head])
    start = shape.context - planted.gap - planted.band if reused else 0
    k, v = (x[seq, head, start:].double() for x in inputs.kv(copy, Memory()))
    logits = inputs.q(copy, 1)[seq, own].double() @ k.T * inputs.scale
    taken = (seq * shape.heads + own) * state.ring.size + planted.place(state)
    entry = state.entries.out[taken].double()
    weight = state.entries.lse[taken, None].double() if reused else torch.full_like(logits[:, :1], -torch.inf)
    logits = torch.cat([logits, weight], 1)  # an entry counts as one key

    def over(x: Tensor) -> Tensor:
        w = x.softmax(1)
        return w[:, :-1] @ v + w[:, -1:] * (entry if reused else 0.0)

    amended = logits.clone()
    amended[:, shape.context - planted.band - start : shape.context - start] = -torch.inf
    return over(logits), over(amended)
