"""A plan for Kascade made of one prompt, by the calibration of `longreach calibrate kascade` on its last tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.kascade.calibrate import TILE, K, TileSimilarity, block_tiles, pooled_over_tiles, tile_tokens
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.methods.kascade.plan import KIND, KascadePlan
from longreach.methods.plan_maker import PlanMaker, PlanParts, PromptRead
from longreach.ops.doors import EVERYTHING
from longreach.plans import Plan

TILES = 8  # at the prompt's end: 16 and 32 choose about the same anchors on longreach-mini and cost more
EVERY = 3  # takes a third of the time of all rows
SERVED = 0.8  # more than a calibration on many prompts asks for: one prompt needs fewer kinds of look-up than they
EASY = 0.7  # prompts that few anchors serve with this share ask for too little to calibrate on
MOST_LOGITS = 1 << 27  # kept at a time, 256 MiB in fp16
NEEDED = 2048  # tokens of a prompt; the paper's development set has 2.3K on average


def fewest_anchors(layers: int) -> int:
    """Fewest anchors of a plan that is made of one prompt: the paper's 5 of 32 and 36 layers, and at least 3.

    Repetitive text and short prose are served by fewer. On longreach-mini such plans lose look-ups (docs/plans.md).
    """
    return min(layers, max(3, round(layers / 7)))


@dataclass(frozen=True)
class KascadeMaker(PlanMaker):
    """Similarity of layers over the last `tiles` tiles of a prompt, and the fewest anchors that serve every layer.

    group: query heads of a KV head. every: n, each n-th row stands for its tile. k, tile, served: as in `calibrate
    kascade`; all layers count equally.
    """

    group: int
    tiles: int = TILES
    every: int = EVERY
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
            for rows, before in self._blocks(call):
                pooled = self._pooled(replace(call, rows=call.rows.take(rows)), before)
                found.add(layer, pooled[..., : prompt.length], before)
            importance[layer] = prompt.changes[layer].double().mean()
        result = CalibrationResult.mean(layers, [found.finish().cpu()], [importance])
        result = replace(result, weighted=False)
        chosen = result.plan(None, self.k, self.tile, self.served)
        enough, least = result.plan(None, self.k, self.tile, EASY).anchors, fewest_anchors(len(layers))
        if len(enough) < least:
            raise InvalidInput(
                f"this prompt is too easy to plan by: anchors in {len(enough)} of {len(layers)} layers find {EASY:.0%} "
                f"of the best weight, where a plan needs {least} or more; the next prompt is tried"
            )
        options = {"k": self.k, "tile": self.tile, "tiles": self.tiles, "every": self.every, "served": self.served}
        return PlanParts(
            result.values(chosen), result.arrays(), {**options, "weighted": False, "budget": len(chosen.anchors)}
        )

    def about(self, plan: Plan) -> str:
        found = KascadePlan.of(plan)
        text = f"anchors {' '.join(map(str, found.anchors))}"
        return text if 2 * len(found.anchors) <= len(found.layers) else f"{text} (more than half of the layers: slow)"

    def _pooled(self, call: LayerCall, before: Tensor) -> Tensor:
        """As `pooled_over_tiles`. Triton keeps the logits of its pass over the keys, so it reads them once."""
        if call.sink_logit is None and call.computes("score_keys", "triton"):
            lse, logits = call.op("score_keys")
            return pooled_over_tiles(call, lse, before, self.tokens, logits)
        return pooled_over_tiles(call, call.attend(EVERYTHING).lse, before, self.tokens)

    def _blocks(self, call: LayerCall) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers [r] of the rows that stand for some tiles, and the keys before each tile [t].

        Tiles end with the prompt, so that each is whole. `every`: the prompt's last row, and each n-th one before it.
        """
        pos = call.rows.pos
        first, last = int(pos[0]), int(pos[-1])
        starts = range(first, last + 1, self.tokens)
        logits = -(-self.tokens // self.every) * call.rows.q.shape[1] * call.kv.capacity  # of a tile
        at_once = max(1, min(block_tiles(call.kv.heads, call.kv.capacity), MOST_LOGITS // logits))
        for number in range(0, len(starts), at_once):
            some = starts[number : number + at_once]
            rows = torch.arange(some[0], some[-1] + self.tokens, device=pos.device)
            yield rows[(last - rows) % self.every == 0] - first, torch.tensor(list(some), device=pos.device)
