"""Shares of far attention mass that ways of recall find: of dense attention's weight beyond the window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longreach.evals.calibration.prompts import Prompt
from longreach.evals.progress import Progress, unseen
from longreach.mka.block import Code
from longreach.mka.index import BlockIndex
from longreach.ops import KVView, Rows
from longreach.ops.recall import BlockCode, planes_of, recall
from longreach.train.mka.budgets import levels_of
from longreach.train.mka.dense_rows import Cut, LayerRows, dense_rows

ORACLE, INDEX, CHANCE = "oracle", "index", "chance"
COUNTS = (4, 8)
BITS = (128, 32)
ROWS = 96


class Shares:
    """Sums of mass, of all far blocks and of recalled ones, by layer, way of recall and number of blocks."""

    def __init__(self, counts: Sequence[int], bits: Sequence[int] = BITS, seed: int = 0):
        self.counts, self.bits, self.seed = tuple(counts), tuple(bits), seed
        self.rows = 0
        self._far: defaultdict[int, float] = defaultdict(float)
        self._all: defaultdict[int, float] = defaultdict(float)
        self._found: defaultdict[tuple[int, str, int], float] = defaultdict(float)

    def add(self, layers: Mapping[int, LayerRows], indices: Mapping[int, BlockIndex] | None = None) -> None:
        """Add the rows of a prompt. indices: the trained index of each layer, if there are any."""
        for layer, rows in layers.items():
            self._far[layer] += float(rows.mass.sum(dtype=torch.float64))
            self._all[layer] += rows.q.shape[0] * rows.q.shape[1]
            for name, chosen in self._ways(rows, (indices or {}).get(layer)).items():
                for count, mass in chosen.items():
                    self._found[layer, name, count] += mass
        self.rows += len(next(iter(layers.values())).pos)

    def _ways(self, rows: LayerRows, index: BlockIndex | None) -> dict[str, dict[int, float]]:
        most = max(self.counts)
        codes: dict[str, Code] = {} if index is None else {INDEX: index.rotated(rows.frequencies)}
        codes |= {"summary": BlockCode("summary", rows.frequencies), "bounds": BlockCode("bounds")}
        for bits in self.bits:
            planes = planes_of(rows.q.shape[2], bits, self.seed).to(rows.q.device)
            codes[f"hash {bits}"] = BlockCode("hash", rows.frequencies, planes)
        best = rows.mass.masked_fill(~rows.allowed, -1.0).topk(most, -1).values.clamp(min=0)
        ways = {ORACLE: {count: _sum(best[..., :count]) for count in self.counts}}
        for name, code in codes.items():
            ways[name] = {count: _sum(recalled(rows, code, count)) for count in self.counts}
        even = rows.mass.sum(-1) / rows.stop[:, None]
        ways[CHANCE] = {count: count * _sum(even) for count in self.counts}
        return ways

    def to_json(self) -> dict[str, Any]:
        """Shares by way of recall and number of blocks: of all layers together, and of each. far: the share of dense
        attention's mass beyond the window."""
        names = dict.fromkeys(name for _, name, _ in self._found)

        def table(layers: Iterable[int]) -> dict[str, Any]:
            far = sum(self._far[n] for n in layers)
            shares = {
                name: {
                    str(c): sum(self._found[n, name, c] for n in layers) / max(far, 1e-300) for c in self.counts
                } for name in names
            }  # fmt: skip
            return {"far": far / sum(self._all[n] for n in layers), **shares}

        layers = sorted(self._far)
        return {
            "counts": list(self.counts), "rows": self.rows, "all": table(layers),
            "layers": {str(n): table([n]) for n in layers},
        }  # fmt: skip


@torch.no_grad()
def recalled(rows: LayerRows, code: Code, count: int) -> Tensor:
    """fp32 [R, G, count]: mass of the blocks that a code recalls, as the model does; 0 for entries not in use."""
    units, block = rows.k.shape[1], rows.k.shape[2]
    first = (torch.arange(units, device=rows.q.device) * block).expand(1, rows.k.shape[0], units)
    codes = code.of_blocks(rows.k[None], first).contiguous()
    view = KVView(codes, codes, torch.full((1,), units, device=rows.q.device))
    queries = code.of_rows(rows.q, rows.pos).to(codes.dtype)
    scale = rows.scale if code.pool == "softmax" else 1.0
    chosen, used = recall(Rows(queries, torch.zeros_like(rows.pos), rows.pos), view, None, rows.stop, count=count,
                          scale=scale, pool=code.pool)  # fmt: skip
    there = torch.arange(count, device=used.device) < used[..., None]
    return torch.where(there, rows.mass.gather(-1, chosen.long()), 0.0)


def _sum(mass: Tensor) -> float:
    return float(mass.sum(dtype=torch.float64))


def recall_shares(
    model: Any, prompts: Sequence[Prompt], *, block: int = 64, window: int = 512, counts: Sequence[int] = COUNTS,
    bits: Sequence[int] = BITS, rows: int = ROWS, seed: int = 0, progress: Progress = unseen,
) -> dict[str, Any]:  # fmt: skip
    """What each way of recall finds in prompts that the model reads densely, as JSON (`Shares.to_json`).

    The model may be any that longreach attaches to; one converted with recall="index" is read with its present weights,
    and its index is measured too. block, window: keys of a block, and of the window. counts: recalled blocks. bits: of
    hashes. rows: of a prompt, half of them its last, that have more far blocks than they recall.
    """
    cut, found = Cut(block, window, rows, max(counts)), Shares(counts, bits, seed)
    indices = indices_of(model)
    with progress("reading densely", sum(len(p.tokens) for p in prompts)) as advance:
        for layers in dense_rows(model, prompts, cut, seed=seed, advance=advance):
            found.add(layers, indices)
    return {"block": block, "window": window, **found.to_json()}


def indices_of(model: Any) -> dict[int, BlockIndex]:
    """layer -> its index of blocks, of layers that recall by one."""
    return {layer: levels.index for layer, levels in levels_of(model).items() if hasattr(levels, "index")}
