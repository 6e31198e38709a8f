"""A model reads prompts densely; for some rows MAC-Attention's matches and their outputs are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from longreach.evals.attention.weights import weights, window_of
from longreach.evals.calibration.gather import Gather, packed
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.mac_study.amended import Reused, steps
from longreach.evals.mac_study.matching import WAYS, Recent, RowHistory, Way, compared, matches, windows_up_to
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.mac.calibrate import masses
from longreach.methods.mac.plan import SCALES, MACPlan

BANDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class StudySettings:
    """window: the widest that is searched, and tokens before the first row measured. band: the one at which ways of
    matching are compared. sinks: first tokens that no entry holds. rows: number measured in a prompt, evenly spaced."""

    window: int
    band: int
    sinks: int
    rows: int

    @property
    def windows(self) -> tuple[int, ...]:
        return windows_up_to(self.window)

    @property
    def bands(self) -> tuple[int, ...]:
        return tuple(sorted({*(b for b in BANDS if b <= self.window), self.band}))

    @property
    def needed(self) -> int:
        """Tokens of a prompt at least."""
        return self.window + self.rows

    def windows_of(self, way: Way) -> tuple[int, ...]:
        """Windows that a way is tried with; errors are measured in all of them for sqrt2d, else in the widest."""
        return self.windows if way in SCALES else (self.window,)

    def errors_of(self, way: Way) -> tuple[int, tuple[int, ...]]:
        """(of how many windows, the widest last, errors are measured; the bands)."""
        count = len(self.windows) if way == "sqrt2d" else 1
        return count, self.bands if way in SCALES else (self.band,)


class ReuseGather(Gather):
    """Of each prompt, layer by layer and way by way (`matching.WAYS`): distances [L, windows, R, H] to the nearest rows
    and their gaps, -1 for none; errors of outputs that reuse them [L, windows, R, H, bands]; the weight on the last
    keys [L, H, bands], means over rows.

    Memory beyond the model's and a pass's own, with passes of C tokens: W H D numbers of queries for each of L layers,
    some five times (W + C) H D for the one at work, three sets of `amended.MOST` logits (or one row's), and some
    hundred numbers of fp32 for each row, head and layer that is kept.
    """

    needs_pre_rope: ClassVar[bool] = True

    def __init__(self, shape: ModelShape, plan: MACPlan, what: StudySettings):
        self.shape, self.plan, self.what = shape, plan, what
        self.group = shape.query_heads // shape.kv_heads

    def begin(self, prompt: Prompt) -> None:
        tokens, what = len(prompt.tokens), self.what
        layers, heads, n = self.shape.layers, self.shape.query_heads, what.rows
        self._rows = [what.window + (tokens - what.window) * i // n for i in range(n)]
        self._taken = [False] * layers
        self._recent = [Recent(what.window) for _ in range(layers)]
        self._distance, self._gap, self._error = dict[Way, Tensor](), dict[Way, Tensor](), dict[Way, Tensor]()
        for way in WAYS:
            count, bands = what.errors_of(way)
            shape = (layers, len(what.windows_of(way)), n, heads)
            self._distance[way] = torch.full(shape, torch.inf)
            self._gap[way] = torch.full(shape, -1, dtype=torch.int32)
            self._error[way] = torch.zeros(layers, count, n, heads, len(bands))
        self._mass = torch.zeros(layers, heads, len(what.bands), dtype=torch.float64)

    def layer(self, call: LayerCall, outcome: Outcome) -> None:
        if window_of(call) is not None:
            return
        self._taken[call.layer] = True
        known = self._recent[call.layer].extend(call)
        first, last = int(call.rows.pos[0]), int(call.rows.pos[-1])
        mine = [(n, r - first) for n, r in enumerate(self._rows) if first <= r <= last]
        if not mine:
            return
        number, index = torch.tensor(mine, device=call.rows.q.device).T
        self._weigh(call, outcome, index)
        found = {way: self._match(way, call, known, index, number.cpu()) for way in WAYS}
        place = 0
        for some in steps(call, index):
            part = slice(place, place + len(some))
            place += len(some)
            self._reuse(call.take(some), known, {way: x[:, part] for way, x in found.items()}, number[part].cpu())

    def _match(self, way: Way, call: LayerCall, known: RowHistory, index: Tensor, number: Tensor) -> Tensor:
        """Positions [windows, r, H] of the nearest rows; distances and gaps are noted."""
        energy = self.plan.energy[call.layer].double().to(index.device)
        weight = (energy.sqrt() * call.scale).repeat_interleave(self.group, 0).float()
        pos, heads = call.rows.pos[index], self.shape.kv_heads
        queries, windows = compared(way, known, weight), self.what.windows_of(way)
        near = matches(queries, known.first, pos, heads, windows, self.what.sinks + 1)
        gap = torch.where(near.position >= 0, pos[:, None] - near.position, -1)
        self._distance[way][call.layer][:, number] = near.distance.float().cpu()
        self._gap[way][call.layer][:, number] = gap.int().cpu()
        return near.position

    def _reuse(self, call: LayerCall, known: RowHistory, found: dict[Way, Tensor], number: Tensor) -> None:
        rows = Reused(call)
        head = torch.arange(self.shape.query_heads, device=call.rows.q.device)
        for way, positions in found.items():
            count, bands = self.what.errors_of(way)
            for place, position in enumerate(positions[-count:]):
                queries = known.q[(position.long() - known.first).clamp(min=0), head]
                error = rows.errors(queries, position, bands, self.what.sinks)
                self._error[way][call.layer, place, number] = error.float().cpu()

    def _weigh(self, call: LayerCall, outcome: Outcome, index: Tensor) -> None:
        for one in steps(call, index):
            pos = call.rows.pos[one].long()
            for head in range(self.shape.kv_heads):
                mine = slice(head * self.group, (head + 1) * self.group)
                share = weights(call, one, head, int(pos.max()) + 1).share
                self._mass[call.layer, mine] += masses(share, pos, self.what.bands, self.what.sinks).cpu()

    def finish(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "taken": self._taken,
            "distance": _packed(self._distance),
            "gap": _packed(self._gap),
            "error": _packed(self._error),
            "mass": packed(self._mass / len(self._rows)),
        }


def _packed(found: dict[Way, Tensor]) -> dict[str, Any]:
    return {way: packed(x) for way, x in found.items()}


def layers_of(parts: Sequence[Any]) -> list[int]:
    """The layers of full attention."""
    return [n for n, taken in enumerate(parts[0]["taken"]) if taken]
