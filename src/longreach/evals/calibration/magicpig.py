"""MagicPIG's calibration: expected errors and reads of pairs of bits and tables, on a prompt's last rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported
from longreach.evals.attention.weights import weights, window_of
from longreach.evals.calibration.base import Calibration, PlanContent, check_count, check_share
from longreach.evals.calibration.gather import Gather, packed, unpacked
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.calibrate import PAIRS, centre_of, counted, expected_error, tokens_needed
from longreach.methods.magicpig.method import check_shape
from longreach.methods.magicpig.plan import ARRAYS, MagicPIGPlan, Options, Pair
from longreach.methods.magicpig.schedule import Schedule
from longreach.ops import Rows

if TYPE_CHECKING:
    from longreach.evals.calibration.run import CalibrationRun


class MagicPIGGather(Gather):
    """For each prompt, layer, KV head and pair: the arrays of a `MagicPIGPlan`, means over the prompt's last rows.

    rows: how many of them. keys: about how many keys of each prompt are hashed, evenly spaced; errors are computed over
    all keys.
    """

    def __init__(
        self, shape: ModelShape, options: Options, *, rows: int, keys: int, pairs: Sequence[Pair] = PAIRS
    ):  # fmt: skip
        self.shape, self.options, self.rows, self.keys, self.pairs = shape, options, rows, keys, tuple(pairs)
        self.schedule = Schedule(options.sinks, options.local, options.seal, options.centre)

    def begin(self, prompt: Prompt) -> None:
        self._length = len(prompt.tokens)
        self._recent: list[Tensor | None] = [None] * self.shape.layers  # the last queries [rows, H, D]
        self._taken = [False] * self.shape.layers
        self._element = 0
        shape = (self.shape.layers, self.shape.kv_heads, len(self.pairs))
        self._found = {name: torch.zeros(shape, dtype=torch.float64) for name in ARRAYS}

    def layer(self, call: LayerCall, outcome: Outcome) -> None:
        if window_of(call) is not None:
            return
        n, recent = call.layer, self._recent[call.layer]
        self._taken[n], self._element = True, call.kv.k.element_size()
        queries = call.rows.q if recent is None else torch.cat([recent, call.rows.q])
        self._recent[n] = queries = queries[-self.rows :].clone()
        if int(call.rows.pos[-1]) + 1 == self._length:
            self._measure(call, queries)

    def _measure(self, call: LayerCall, q: Tensor) -> None:
        n, length, device = call.layer, self._length, call.rows.pos.device
        pos = torch.arange(length - len(q), length, device=device)
        seq = torch.zeros_like(pos)
        rows = replace(call, rows=Rows(q, seq, pos))
        slots = torch.arange(length, device=device)
        page, offset = call.kv.locate(torch.zeros_like(slots), slots)
        k, v = (x[page, :, offset].float() for x in (call.kv.k, call.kv.v))  # [n, G, D]
        centre, stop = centre_of(k, self.schedule), self.schedule.stop(pos, n)
        certain = (slots < self.options.sinks) | (slots >= stop[:, None])
        group = q.shape[1] // k.shape[1]
        for g in range(k.shape[1]):
            found, mine = (
                weights(rows, torch.arange(len(q), device=device), g, length),
                slice(g * group, (g + 1) * group),
            )
            share = found.share * (1 - found.sink[..., None])
            self._found["error"][n, g] = expected_error(
                q[:, mine], k[:, g] - centre[g], v[:, g], share, certain, self.pairs, self.options
            ).cpu()
        inside = slots[self.options.sinks : int(stop.min())]
        inside = inside[:: max(1, len(inside) // self.keys)]
        for name, x in zip(ARRAYS[1:], counted(q, k[inside], centre, self.pairs, self.options), strict=True):
            self._found[name][n] = x

    def finish(self) -> dict[str, Any]:
        arrays = {name: packed(x) for name, x in self._found.items()}
        return {"taken": self._taken, "element": self._element, "arrays": arrays}


def calibrated(
    what: MagicPIGGather, parts: Sequence[Mapping[str, Any]], *, budget: float, memory: float | None, length: int
) -> MagicPIGPlan:
    """The plan of all prompts together. budget, memory, length: as in `MagicPIGPlan`.

    Raises Unsupported for a model whose layers all have windows, InvalidInput if no choice fits the budget.
    """
    layers = tuple(n for n, taken in enumerate(parts[0]["taken"]) if taken)
    if not layers:
        raise Unsupported("every layer of this model has a sliding window, so MagicPIG cannot save reads")
    arrays = {name: torch.stack([unpacked(p["arrays"][name]) for p in parts]).mean(0).float() for name in ARRAYS}
    shape = what.shape
    plan = MagicPIGPlan(
        chosen=((0, 0),) * shape.layers, pairs=what.pairs, layers=layers, options=what.options, budget=budget,
        memory=memory, length=length, element=parts[0]["element"],
        heads=(shape.query_heads, shape.kv_heads, shape.head_dim), **arrays,
    )  # fmt: skip
    return replace(plan, chosen=plan.choose(budget, memory))


@dataclass(frozen=True)
class MagicPIGCalibration(Calibration):
    """Bits and tables of each layer for MagicPIG, and its dense layers, for a budget of bytes.

    budget: bytes that a decode step reads after a prompt's tokens, over dense attention's, all layers together. memory:
    the most memory of tables over that of keys and values; None: no limit. rows: last rows of each prompt that are
    measured. keys: of each prompt, hashed to count reads. hash_seed: the method's `seed`. share, least, sinks, local,
    seal, centre: options of the method.
    """

    kind: ClassVar[str] = "magicpig"

    budget: float = 0.2
    memory: float | None = None
    rows: int = 16
    keys: int = 1024
    hash_seed: int = 0
    share: Literal["group", "own"] = "group"
    least: int = 2
    sinks: int = 4
    local: int = 64
    seal: int = 256
    centre: int = 1024

    def __post_init__(self) -> None:
        check_share("budget", self.budget, top=True)
        if self.memory is not None and not self.memory > 0:
            raise InvalidInput(f"memory: expected a share > 0, got {self.memory}; choose another (--memory)")
        for name in ("rows", "keys"):
            check_count(name, getattr(self, name))
        MagicPIG(**self._given())  # the method checks its options

    def _given(self) -> dict[str, Any]:
        """The options of the method."""
        names = ("least", "share", "sinks", "local", "seal", "centre")
        return {"seed": self.hash_seed, **{name: getattr(self, name) for name in names}}

    def check(self, shape: ModelShape) -> None:
        check_shape(shape)

    def least_tokens(self, shape: ModelShape) -> int:
        return tokens_needed(MagicPIG(**self._given()).schedule, self.rows)

    def settings(self) -> dict[str, Any]:
        given = {"hash_seed" if name == "seed" else name: value for name, value in self._given().items()}
        return {"rows": self.rows, "keys": self.keys, **given}

    def make(self, run: CalibrationRun) -> PlanContent:
        what = MagicPIGGather(run.shape, Options(**self._given()), rows=self.rows, keys=self.keys)
        chosen = {"budget": self.budget, "memory": self.memory}
        parts = run.gather(what)
        found = calibrated(what, parts, budget=self.budget, memory=self.memory, length=run.chosen.length)
        return PlanContent(found.values(), found.arrays(), chosen)
