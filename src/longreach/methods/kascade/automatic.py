"""A plan for Kascade made of one prompt, by the calibration of `longreach calibrate kascade` on its last tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.kascade.calibrate import TILE, K, TileSimilarity, pooled_over_tiles, tile_tokens
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.methods.kascade.plan import KIND, KascadePlan
from longreach.methods.plan_maker import PlanMaker, PlanParts, PromptRead
from longreach.ops.doors import EVERYTHING
from longreach.ops.reference_chunks import SCORES_AT_ONCE
from longreach.plans import Plan

TILES = 8  # at the prompt's end: 16 and 32 choose about the same anchors on longreach-mini and cost more
SERVED = 0.7  # more than a calibration on many prompts asks for: one prompt needs fewer kinds of look-up than they
NEEDED = 2048  # tokens of a prompt; the paper's development set has 2.3K on average


@dataclass(frozen=True)
class KascadeMaker(PlanMaker):
    """Similarity of layers over the last `tiles` tiles of a prompt, and the fewest anchors that serve every layer.

    group: query heads of a KV head. tiles, k, tile, served: as in `calibrate kascade`; all layers count equally.
    """

    group: int
    tiles: int = TILES
    k: int = K
    tile: int = TILE
    served: float = SERVED

    kind = KIND

    @property
    def needed(self) -> int:  # type: ignore[override]
        return max(NEEDED, self.k + self.tiles * self.tokens + 1)

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.tiles * self.tokens

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return tile_tokens(self.tile, self.group)

    def make(self, prompt: PromptRead) -> PlanParts:
        layers = sorted(prompt.calls)
        if not layers:
            raise Unsupported("every layer of this model has a sliding window, so Kascade cannot save reads")
        shape, device = prompt.model, prompt.calls[layers[0]].rows.q.device
        found = TileSimilarity(shape.layers, shape.kv_heads, self.k, self.tokens, device)
        found.start()
        importance = torch.zeros(shape.layers, dtype=torch.float64)
        for layer in layers:
            call = prompt.calls[layer]
            lse = call.attend(EVERYTHING).lse
            for rows, before in self._blocks(call):
                some = replace(call, rows=call.rows.take(rows))
                found.add(layer, pooled_over_tiles(some, lse[rows], before, self.tokens)[..., : prompt.length], before)
            importance[layer] = prompt.changes[layer].double().mean()
        result = CalibrationResult.mean(layers, [found.finish().cpu()], [importance])
        result = replace(result, weighted=False)
        chosen = result.plan(None, self.k, self.tile, self.served)
        settings = {"k": self.k, "tile": self.tile, "tiles": self.tiles, "served": self.served, "weighted": False}
        return PlanParts(result.values(chosen), result.arrays(), {**settings, "budget": len(chosen.anchors)})

    def about(self, plan: Plan) -> str:
        return f"anchors {' '.join(map(str, KascadePlan.of(plan).anchors))}"

    def _blocks(self, call: LayerCall) -> Iterator[tuple[Tensor, Tensor]]:
        """Row numbers [r] of some tiles, and the keys before each tile [t].

        Rows before the first whole tile are left out; the last tile may be cut short.
        """
        pos = call.rows.pos
        first, last = int(pos[0]), int(pos[-1])
        starts = [p for p in range(-(-first // self.tokens) * self.tokens, last + 1, self.tokens) if p > self.k]
        at_once = max(1, SCORES_AT_ONCE // (call.kv.heads * call.kv.capacity))
        for number in range(0, len(starts), at_once):
            some = starts[number : number + at_once]
            rows = torch.arange(some[0] - first, min(some[-1] + self.tokens, last + 1) - first, device=pos.device)
            yield rows, torch.tensor(some, device=pos.device)
