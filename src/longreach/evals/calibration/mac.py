"""MAC's calibration: queries before rotation, energy of keys, and weight on recent keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from longreach.evals.attention.weights import weights, window_of
from longreach.evals.calibration.base import Calibration, PlanContent, check_count, check_share
from longreach.evals.calibration.gather import Gather, packed, unpacked
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.mac.calibrate import BANDS, BINS, WINDOWS, counts, energy, masses, nearest, plan_of, unrelated
from longreach.methods.mac.plan import SCALES, MACPlan, Scale

if TYPE_CHECKING:
    from longreach.evals.calibration.run import CalibrationRun


class MACGather(Gather):
    """Of each prompt, layer by layer: the mean energy of the keys, the weight on the last keys of some rows, and the
    distances of queries: between unrelated rows, and between a row and its nearest in each window.

    rows: how many of each prompt are looked at, evenly spaced over what follows the first `window` tokens, and the
    first 2 `widest`: a band as long as a row's context would hold all of its weight. window: the widest; rows at least
    this many positions from each other count as unrelated. widest: the widest band. sinks: first tokens, left out of
    the weight.
    A prompt's distances in logits are by its own keys' energies, those to the nearest rows by the keys read so far.
    """

    needs_pre_rope: ClassVar[bool] = True

    def __init__(self, shape: ModelShape, *, rows: int, window: int, widest: int, sinks: int):
        self.shape, self.rows, self.window, self.widest, self.sinks = shape, rows, window, widest, sinks
        self.group = shape.query_heads // shape.kv_heads
        self.windows = windows_of(window)

    def begin(self, prompt: Prompt) -> None:
        tokens, layers, heads = len(prompt.tokens), self.shape.layers, self.shape.query_heads
        first = max(self.window, 2 * self.widest)
        some = min(self.rows, tokens - first)
        self._rows = [first + (tokens - first) * n // some for n in range(some)]
        self._tokens = 0
        self._taken = [False] * layers
        self._energy: list[Tensor] = [torch.zeros(())] * layers
        self._mass = torch.zeros(layers, heads, len(BANDS), dtype=torch.float64)
        self._recent: list[Tensor | None] = [None] * layers  # the last queries [W, H, D]
        self._queries: list[list[Tensor]] = [[] for _ in range(layers)]  # of the rows looked at
        self._close = {s: torch.zeros(layers, len(self.windows), BINS, dtype=torch.int64) for s in SCALES}
        self._scale = [0.0] * layers

    def layer(self, call: LayerCall, outcome: Outcome) -> None:
        if window_of(call) is not None:
            return
        n, pos = call.layer, call.rows.pos
        first = int(pos[0])
        self._taken[n], self._scale[n] = True, call.scale
        if n == min(i for i, taken in enumerate(self._taken) if taken):
            self._tokens += len(pos)
        assert call.rotary is not None
        turn = call.rotary()
        page, offset = call.kv.locate(call.rows.seq.long(), pos.long())
        self._energy[n] = self._energy[n].to(pos.device) + energy(call.kv.k[page, :, offset], turn).sum(0)
        queries = turn.undo(call.rows.q)
        recent = self._recent[n]
        known = queries if recent is None else torch.cat([recent, queries])
        start = first - (0 if recent is None else len(recent))  # the position of the first of them
        index = [r - first for r in self._rows if first <= r <= int(pos[-1])]
        for i in index:
            at = first + i - start
            self._queries[n].append(known[at].float())
            before = known[at - self.window : at].float()
            for scale in SCALES:
                weight = self._weight(n, scale, int(pos[-1]) + 1)
                least = nearest(known[at].float() * weight, before * weight, self.windows)
                self._close[scale][n] += torch.stack([counts(x) for x in least]).cpu()
        if index:
            self._weigh(call, outcome, torch.tensor(index, device=pos.device))
        self._recent[n] = known[-self.window :].clone()

    def _weigh(self, call: LayerCall, outcome: Outcome, index: Tensor) -> None:
        for one in index.split(8):
            pos = call.rows.pos[one].long()
            for head in range(self.shape.kv_heads):
                mine = slice(head * self.group, (head + 1) * self.group)
                share = weights(call, one, head, int(pos.max()) + 1).share
                self._mass[call.layer, mine] += masses(share, pos, BANDS, self.sinks).cpu()

    def finish(self) -> dict[str, Any]:
        layers, pos = range(self.shape.layers), torch.tensor(self._rows)
        far = {s: torch.zeros(self.shape.layers, BINS, dtype=torch.int64) for s in SCALES}
        shape = (self.shape.kv_heads, self.shape.head_dim)
        energies = torch.zeros(self.shape.layers, *shape, dtype=torch.float64)
        for n in (n for n in layers if self._taken[n]):
            energies[n] = (self._energy[n] / self._tokens).cpu()
            q = torch.stack(self._queries[n])
            for scale in SCALES:
                weighed = q * self._weight(n, scale, self._tokens)
                far[scale][n] = counts(unrelated(weighed, pos.to(q.device), self.window)).cpu()
        return {
            "tokens": self._tokens,
            "rows": len(self._rows),
            "taken": self._taken,
            "energy": packed(energies),
            "mass": packed(self._mass),
            "far": {s: packed(x) for s, x in far.items()},
            "close": {s: packed(x) for s, x in self._close.items()},
        }

    def _weight(self, layer: int, scale: Scale, tokens: int) -> Tensor:
        """The factor of queries after `tokens` tokens: fp32 [H, D], or [1, 1] for none."""
        total = self._energy[layer]
        if scale == "sqrt2d":
            return total.new_ones(1, 1, dtype=torch.float32)
        return ((total / tokens).sqrt() * self._scale[layer]).repeat_interleave(self.group, 0).float()


def windows_of(window: int) -> tuple[int, ...]:
    """The windows that are tried, the widest last."""
    return (*(w for w in WINDOWS if w < window), window)


def calibrated(
    what: MACGather, parts: Sequence[Mapping[str, Any]], *, alpha: float, epsilon: float
) -> tuple[MACPlan, dict[str, Any]]:
    """The plan of all prompts together, and the measurements behind it, as JSON."""
    tokens, rows = sum(p["tokens"] for p in parts), sum(p["rows"] for p in parts)
    energies = torch.stack([unpacked(p["energy"]) * (p["tokens"] / tokens) for p in parts]).sum(0)
    mass = torch.stack([unpacked(p["mass"]) for p in parts]).sum(0) / rows  # [L, H, bands]
    far = {s: torch.stack([unpacked(p["far"][s]) for p in parts]).sum(0) for s in SCALES}
    close = {s: torch.stack([unpacked(p["close"][s]) for p in parts]).sum(0) for s in SCALES}
    means = mass.mean(1).tolist()
    plan, accepted = plan_of(
        what.windows, means, parts[0]["taken"], far, close, energies, alpha=alpha, epsilon=epsilon,
        widest=what.widest, sinks=what.sinks,
    )  # fmt: skip
    rests = {
        "alpha": alpha, "epsilon": epsilon, "widest": what.widest, "bands": list(BANDS),
        "mass": means, "windows": list(what.windows), "accepted": accepted, "taken": list(parts[0]["taken"]),
    }  # fmt: skip
    return plan, rests


@dataclass(frozen=True)
class MACCalibration(Calibration):
    """Bands, windows and thresholds for MAC, and the energy of a model's keys.

    epsilon: weight that may lie before a row's band. alpha: share of pairs of unrelated queries that may match. window:
    the widest window that is tried. widest: the widest band; a layer that needs a wider one reuses nothing. sinks:
    first tokens, left out of the weight. rows: measured in a prompt.
    """

    kind: ClassVar[str] = "mac"

    epsilon: float = 0.05
    alpha: float = 0.01
    window: int = 1024
    widest: int = 512
    sinks: int = 4
    rows: int = 64

    def __post_init__(self) -> None:
        for name in ("epsilon", "alpha"):
            check_share(name, getattr(self, name))
        for name in ("window", "widest", "rows"):
            check_count(name, getattr(self, name))
        check_count("sinks", self.sinks, 0)

    def least_tokens(self, shape: ModelShape) -> int:
        return self.window + max(self.window, 2 * self.widest) + 2

    def settings(self) -> dict[str, Any]:
        return {"window": self.window, "widest": self.widest, "sinks": self.sinks, "rows": self.rows}

    def make(self, run: CalibrationRun) -> PlanContent:
        what = MACGather(run.shape, rows=self.rows, window=self.window, widest=self.widest, sinks=self.sinks)
        chosen = {"alpha": self.alpha, "epsilon": self.epsilon}
        found, rests = calibrated(what, run.gather(what), **chosen)
        return PlanContent({**found.values(), **rests}, found.arrays(), chosen)
