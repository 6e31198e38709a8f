"""Kascade's calibration: similarity of layers over tiles, and importance of their attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported
from longreach.evals.attention.weights import window_of
from longreach.evals.calibration.base import Calibration, PlanContent, check_count
from longreach.evals.calibration.gather import Gather, packed, unpacked
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade.anchors import check_anchors
from longreach.methods.kascade.calibrate import (
    TILE,
    K,
    TileSimilarity,
    block_tiles,
    change,
    pooled_over_tiles,
    tile_tokens,
    tokens_needed,
)
from longreach.methods.kascade.calibration_result import SERVED, CalibrationResult, check_ranks
from longreach.ops import KVView, Rows

if TYPE_CHECKING:
    from longreach.evals.calibration.run import CalibrationRun

FEW = 4  # tiles: the least over so few means little


class KascadeGather(Gather):
    """For each prompt: the result of `TileSimilarity`, the mean of `change` in each layer, and the layers with windows.

    k: keys a tile chooses; tile: query rows of a tile, the query heads of a KV head counted.
    """

    needs_residuals = True

    def __init__(self, shape: ModelShape, *, k: int = K, tile: int = TILE):
        self.shape, self.k = shape, k
        self.tokens = tile_tokens(tile, shape.query_heads // shape.kv_heads)

    def chunk(self, tokens: int) -> int:
        """Whole tiles."""
        return -(-tokens // self.tokens) * self.tokens

    def begin(self, prompt: Prompt) -> None:
        self._found: TileSimilarity | None = None
        self._length, self._layer = len(prompt.tokens), self.shape.layers
        self._windows: list[int | None] = [None] * self.shape.layers
        self._changes: Tensor | None = None

    def layer(self, call: LayerCall, outcome: Outcome) -> None:
        if self._found is None:
            self._found = TileSimilarity(
                self.shape.layers, self.shape.kv_heads, self.k, self.tokens, call.rows.q.device
            )
        if call.layer <= self._layer:  # the first of a pass: positions are the same for all layers
            self._start(call.rows, call.kv)
        self._layer = call.layer
        self._windows[call.layer] = window_of(call)
        if self._windows[call.layer] is not None:
            return
        for rows, before in self._blocks:
            some = replace(call, rows=call.rows.take(rows))
            scores = pooled_over_tiles(some, outcome.partial.lse[rows], before, self.tokens)
            self._found.add(call.layer, scores[..., : self._last + 1], before)

    def _start(self, rows: Rows, kv: KVView) -> None:
        """A pass begins: blocks of (rows [r], keys before each of their tiles [t]), the tiles with a choice to make."""
        assert self._found is not None
        self._found.start()
        first, self._last = int(rows.pos[0]), int(rows.pos[-1])
        assert first % self.tokens == 0
        starts = [p for p in range(first, self._last + 1, self.tokens) if p > self.k]
        size = block_tiles(kv.heads, kv.capacity)  # pooled_scores gives a score to every slot
        place = torch.arange(len(rows.pos), device=rows.pos.device)
        self._blocks = []
        for at in range(0, len(starts), size):
            some = starts[at : at + size]
            index = place[some[0] - first : some[-1] + self.tokens - first]
            self._blocks.append((index, torch.tensor(some, device=rows.pos.device)))

    def residual(self, layer: int, x: Tensor, out: Tensor) -> None:
        if self._changes is None:
            self._changes = torch.zeros(self.shape.layers, dtype=torch.float64, device=x.device)
        self._changes[layer] += change(x, out).sum(dtype=torch.float64)

    def finish(self) -> dict[str, Any]:
        assert self._found is not None and self._changes is not None
        return {
            "windows": self._windows,
            "similarity": packed(self._found.finish()),
            "importance": packed(self._changes / self._length),
        }


def calibrated(parts: Sequence[Any]) -> CalibrationResult:
    """The mean over prompts. Raises Unsupported for a model whose layers all have windows."""
    layers = [n for n, window in enumerate(parts[0]["windows"]) if window is None]
    if not layers:
        raise Unsupported("every layer of this model has a sliding window, so Kascade cannot save reads")
    return CalibrationResult.mean(
        layers, [unpacked(p["similarity"]) for p in parts], [unpacked(p["importance"]) for p in parts]
    )


@dataclass(frozen=True)
class KascadeCalibration(Calibration):
    """Anchor layers and head map for Kascade.

    budget: layers that choose keys, the first layer among them; None: the fewest that meet `served`. served: without
    budget, the share of its best attention weight that every layer must find on the keys of its anchor. weighted:
    whether layers count by how much their attention turns the residual stream. ranks: of tensor parallelism. k: keys
    that a tile chooses. tile: query rows that choose together, the query heads of a KV head counted.
    """

    kind: ClassVar[str] = "kascade"

    budget: int | None = None
    served: float | None = None
    weighted: bool = False
    ranks: int = 1
    k: int = K
    tile: int = TILE

    def __post_init__(self) -> None:
        if self.budget is not None and self.served is not None:
            raise InvalidInput("budget fixes the number of anchors, and served finds one; give one of them")
        if self.budget is not None and self.budget < 1:
            raise InvalidInput(f"budget: expected at least 1 anchor, got {self.budget}; choose another (--budget)")
        if self.served is not None and not 0 <= self.served <= 1:
            raise InvalidInput(f"served: expected a share in [0, 1], got {self.served}; choose another (--served)")
        for name in ("ranks", "k", "tile"):
            check_count(name, getattr(self, name))

    def check(self, shape: ModelShape) -> None:
        if self.budget is not None:
            check_anchors(self.budget, shape.layers)
        check_ranks(self.ranks, shape.kv_heads)

    def least_tokens(self, shape: ModelShape) -> int:
        return tokens_needed(self.k, self.tile, shape.query_heads // shape.kv_heads)

    def settings(self) -> dict[str, Any]:
        return {"k": self.k, "tile": self.tile}

    def remark(self, run: CalibrationRun) -> str | None:
        tokens = tile_tokens(self.tile, run.shape.query_heads // run.shape.kv_heads)
        length = min(len(prompt.tokens) for prompt in run.prompts.prompts)
        tiles = sum(start > self.k for start in range(0, length, tokens))
        if tiles >= FEW:
            return None
        return (
            f"the shortest prompt has {length} tokens, and {tiles} of its tiles of {tokens} tokens more than {self.k} "
            f"keys before them: too few to go by; raise --length"
        )

    def make(self, run: CalibrationRun) -> PlanContent:
        found = calibrated(run.gather(KascadeGather(run.shape, k=self.k, tile=self.tile)))
        found = replace(found, ranks=self.ranks, weighted=self.weighted)
        served = SERVED if self.served is None else self.served
        chosen = found.plan(self.budget, self.k, self.tile, served)
        how = {"budget": len(chosen.anchors), **({"served": served} if self.budget is None else {})}
        more = {**how, "ranks": self.ranks, "weighted": self.weighted}
        return PlanContent(found.values(chosen), found.arrays(), more)
