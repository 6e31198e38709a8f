"""Rows of prompts that are read densely: queries, keys, and dense attention's mass on each block of keys."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from longreach.adapters.transformers import Advance, Reader, attach
from longreach.adapters.transformers.mka.dense import dense
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, Phase
from longreach.methods.dense import Dense
from longreach.ops import RotaryFrequencies

CHUNK = 2048  # tokens of a pass
AT_ONCE = 1 << 25  # weights of attention that are held together


@dataclass(frozen=True)
class LayerRows:
    """Rows of one layer and prompt, all of which may choose among more blocks than they recall.

    q: [R, H, D], k: [G, n, B, D], after rotation: queries, and the keys of all complete blocks. pos, stop: int64 [R],
    positions, and the number of blocks complete before each row's window. mass: fp32 [R, G, n], dense attention's
    weights on a block, summed over the query heads of a KV head; 0 from `stop` on.
    """

    q: Tensor
    k: Tensor
    pos: Tensor
    stop: Tensor
    mass: Tensor
    frequencies: RotaryFrequencies
    scale: float

    @property
    def allowed(self) -> Tensor:
        """bool [R, 1, n]: the blocks before each row's window."""
        return torch.arange(self.k.shape[1], device=self.stop.device) < self.stop[:, None, None]


@dataclass(frozen=True)
class Cut:
    """How keys are cut: into blocks of `block`, those complete before a row's window of `window` are far.

    rows: of a prompt, half of them its last ones, half drawn at random. more_than: far blocks that a row must have.
    """

    block: int
    window: int
    rows: int
    more_than: int

    def stop(self, pos: Tensor) -> Tensor:
        """Number of far blocks of rows at these positions."""
        return (pos // self.block - self.window // self.block).clamp(min=0)

    @property
    def least(self) -> int:
        """Tokens that a prompt must have for its last row to count."""
        return (self.more_than + 1 + self.window // self.block) * self.block + 1

    def chosen(self, length: int, seed: int) -> Tensor:
        """Positions of the rows of a prompt, ascending. Raises InvalidInput if it is too short."""
        if length < self.least:
            raise InvalidInput(
                f"a prompt of {length} tokens is too short: with blocks of {self.block}, a window of {self.window} and "
                f"{self.more_than} recalled blocks, {self.least} are needed; raise --length"
            )
        places = torch.arange(self.least - 1, length)
        last = places[-(self.rows // 2) :] if self.rows > 1 else places[:0]
        others = places[: len(places) - len(last)]
        drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[: self.rows - len(last)]
        return torch.cat([others[drawn].sort().values, last])


@dataclass(frozen=True)
class _DenseWithFrequencies(Dense):
    needs_frequencies: ClassVar[bool] = True


def dense_rows(
    model: Any, prompts: Iterable[Prompt], cut: Cut, *, layers: Sequence[int] | None = None, seed: int = 0,
    advance: Advance = lambda done: None,
) -> Generator[dict[int, LayerRows], None, None]:  # fmt: skip
    """layer -> rows of each prompt in turn, read by the model's own attention with its present weights.

    layers: None for all. advance: called with the tokens read. Raises InvalidInput for a prompt that is too short, and
    Unsupported for a model whose rotation depends on the length.
    """
    prompts = list(prompts)
    places = [cut.chosen(len(prompt.tokens), seed + number) for number, prompt in enumerate(prompts)]
    room = CacheConfig(capacity=max((len(p.tokens) for p in prompts), default=1))
    with dense(model), attach(model, prefill=_DenseWithFrequencies(), cache=room) as session:
        reader = Reader(session, CHUNK, graph=False)
        for prompt, chosen in zip(prompts, places, strict=True):
            seen = _Rows(cut, chosen.to(model.device), len(prompt.tokens), layers)
            session.on_layer = seen.layer
            with reader.rollback():
                reader.read(prompt.tokens, advance)
            yield seen.found  # outside of no_grad, which would reach the caller


class _Rows:
    """Gathers the rows of one prompt from its passes."""

    def __init__(self, cut: Cut, chosen: Tensor, length: int, layers: Sequence[int] | None):
        self.cut, self.chosen, self.length, self.layers = cut, chosen, length, layers
        self.found: dict[int, LayerRows] = {}
        self._parts: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def layer(self, phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        """The hook of the session."""
        if self.layers is not None and call.layer not in self.layers:
            return
        mine = torch.isin(call.rows.pos, self.chosen)
        read = int(call.rows.pos.max()) + 1
        page, offset = call.kv.locate(call.rows.seq[:1].long().expand(read), torch.arange(read, device=mine.device))
        keys = call.kv.k[page, :, offset]  # [N, G, D]
        q, pos = call.rows.q[mine], call.rows.pos[mine].long()
        mass = block_mass(q, keys, pos, self.cut.stop(pos), self.cut.block, call.scale, self.length // self.cut.block)
        parts = self._parts.setdefault(call.layer, [])
        parts.append((q.clone(), mass))
        if read < self.length:
            return
        assert call.frequencies is not None
        blocks = keys[: self.length // self.cut.block * self.cut.block].transpose(0, 1)
        queries, masses = (torch.cat(x) for x in zip(*parts, strict=True))
        self.found[call.layer] = LayerRows(
            queries, blocks.unflatten(1, (-1, self.cut.block)).contiguous(), self.chosen, self.cut.stop(self.chosen),
            masses, call.frequencies(), call.scale,
        )  # fmt: skip


def block_mass(q: Tensor, k: Tensor, pos: Tensor, stop: Tensor, block: int, scale: float, units: int) -> Tensor:
    """fp32 [R, G, units]: softmax(scale q.k) over keys up to each row's position, summed over blocks and query heads.

    q: [R, H, D]; k: [N, G, D] of positions 0 to N; pos, stop: int [R]. 0 for blocks from `stop` on.
    """
    found = torch.zeros(len(q), k.shape[1], units, device=q.device)
    wide, grouped = k.float(), q.float().unflatten(1, (k.shape[1], -1))
    size, keys = max(1, AT_ONCE // (q.shape[1] * len(k))), torch.arange(len(k), device=q.device)
    for start in range(0, len(q), size):
        some = slice(start, start + size)
        logits = torch.einsum("rghd,ngd->rghn", grouped[some], wide) * scale
        share = logits.masked_fill(keys > pos[some, None, None, None], -torch.inf).softmax(-1).sum(2)
        whole = share[..., : len(k) // block * block].unflatten(-1, (-1, block)).sum(-1)
        found[some, :, : whole.shape[-1]] = whole
    return found.masked_fill(torch.arange(units, device=q.device) >= stop[:, None, None], 0.0)
