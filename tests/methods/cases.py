"""What the contract needs to know about each registered method, and cannot find out by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.block_mka import BlockMKA
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.kascade import Kascade
from longreach.methods.less_is_more import LessIsMore
from longreach.methods.loki import Loki
from longreach.methods.mac import MAC
from longreach.methods.magicpig import MagicPIG
from longreach.methods.omnikv import OmniKV
from longreach.methods.oracle_sampling import OracleSampling
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.quest import Quest
from longreach.methods.streaming_llm import StreamingLLM
from longreach.ops import Lists, Selection, Spans
from tests.methods.drive import HEADS, KV_HEADS, exact, largest_value, shares, slots_read, weighted

CONTEXT = 61  # tokens of a sequence with planted keys
HEAVY = 9.0  # their logit: e^9 against the sum of about 100 of all others


def values_read(call: LayerCall) -> tuple[Selection, ...]:
    """What was attended to, where values are read for nothing else."""
    return call.meter.values


def last_values_read(call: LayerCall) -> tuple[Selection, ...]:
    """What was attended to, where values were read before to find that out: lists, and spans if rows are redone."""
    read = call.meter.values
    redone = len(read) > 1 and isinstance(read[-1], Spans) and isinstance(read[-2], Lists)
    return read[-2:] if redone else read[-1:]


@dataclass(frozen=True)
class Lost:
    """A configuration, planted keys (slot -> logit), and the one of them that lies outside its selection."""

    method: AttentionMethod
    heavy: dict[int, float]
    slot: int


@dataclass(frozen=True)
class Case:
    """One method.

    everything: its budget set to everything, or its reuse to never: equals dense.
    default: its default budget; heavy: slots whose keys it reads for a row at the end of CONTEXT tokens, if they
        are heavy; lost: None where nothing can be outside (dense).
    attended: the selections whose values make up the result.
    variants: further configurations that the contract holds for. refused: options that must be.
    """

    everything: AttentionMethod
    default: AttentionMethod
    heavy: tuple[int, ...]
    lost: Lost | None
    attended: Callable[[LayerCall], tuple[Selection, ...]] = values_read
    variants: tuple[AttentionMethod, ...] = ()
    refused: tuple[dict[str, Any], ...] = ()

    def missed(self, call: LayerCall) -> Tensor:
        """[R, H]: the probability that exact attention gives to slots that were not attended to."""
        read = slots_read(call, self.attended(call)).repeat_interleave(HEADS // KV_HEADS, 1)
        return (shares(call) * ~read).sum(-1)

    def predicted(self, call: LayerCall, outcome: Outcome) -> Tensor:
        """[R, H], bound on |out - dense|: the distance of weights and probabilities, summed, times max|v|.

        Without log-weights, and with mass m missed, that is 2 m max|v|.
        """
        given = shares(call)
        weights = given * weighted(call, self.attended(call))
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) * given.sum(-1, keepdim=True)
        return (weights - given).abs().sum(-1) * largest_value(call)


class Reuse(Case):
    """A method that lets earlier results stand for what it does not read."""

    def predicted(self, call: LayerCall, outcome: Outcome) -> Tensor:
        """With mass m not read, and m' by the results that stand for it: out errs by at most 2 max(m, m') max|v|."""
        missed, lse = self.missed(call), exact(call).lse
        stands_for = 1 - (1 - missed) * torch.exp(lse - outcome.partial.lse)
        return 2 * torch.maximum(missed, stands_for) * largest_value(call)


BAD_LAYERS: tuple[Any, ...] = ((-1,), 0, ("0",), (1, 0), (1, 1), (True,))
BAD_BUDGETS: tuple[Any, ...] = (0, -3, 0.0, 1.5, -0.1, float("nan"), True, "all", None)
BAD_BARS: tuple[dict[str, Any], ...] = (
    *({"redo": x} for x in (-0.1, float("nan"), float("inf"), True, "0.1")),
    *({"error_bars": x} for x in (1, None, "yes")),
)
UNSAMPLED: tuple[dict[str, Any], ...] = ({"error_bars": True}, {"redo": 0.1}, {"redo": 0.0}, {"seed": 1})  # by top-k
MIDDLE = CONTEXT // 2

CASES = {
    "dense": Case(everything=Dense(), default=Dense(), heavy=(MIDDLE,), lost=None),
    "streaming_llm": Case(
        everything=StreamingLLM(window=1.0),
        default=StreamingLLM(),
        heavy=(1, CONTEXT - 5),
        lost=Lost(StreamingLLM(), {MIDDLE: HEAVY}, MIDDLE),
        variants=(StreamingLLM(sinks=0, window=7), StreamingLLM(sinks=9, window=1)),
        refused=({"sinks": -1}, {"sinks": 0.5}, {"sinks": True}, *({"window": x} for x in BAD_BUDGETS)),
    ),
    "oracle_top_k": Case(
        everything=OracleTopK(k=1.0),
        default=OracleTopK(),
        heavy=(2, MIDDLE, CONTEXT - 3),
        lost=Lost(OracleTopK(k=1), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        attended=last_values_read,
        variants=(
            OracleTopK(k=0.2, heads="all"),
            OracleTopK(k=5, dense_layers=(1,)),
            OracleTopK(k=0.3, choose="sample"),
            OracleTopK(k=9, heads="all", choose="sample", seed=3, error_bars=True),
            OracleTopK(k=0.2, choose="sample", redo=0.4),
        ),
        refused=(
            {"heads": "some"},
            {"choose": "best"},
            *({"seed": x} for x in (-1, 0.5, None)),
            *BAD_BARS,
            *UNSAMPLED,
            {"dense_layers": (-1,)},
            {"dense_layers": 0},
            {"dense_layers": ("0",)},
            *({"k": x} for x in BAD_BUDGETS),
        ),
    ),
    # its default draws so few keys of contexts as short as these that it misses some of the heavy ones
    "oracle_sampling": Case(
        everything=OracleSampling(k=1.0, draw="systematic"),
        default=OracleSampling(k=0.5),
        heavy=(2, MIDDLE, CONTEXT - 3),
        lost=Lost(OracleSampling(k=1, seed=1), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        attended=last_values_read,
        variants=(
            OracleSampling(k=9, seed=3, dense_layers=(1,)),
            OracleSampling(k=0.2, draw="systematic", error_bars=True),
            OracleSampling(k=0.3, redo=0.8),
        ),
        refused=(
            *BAD_BARS,
            {"draw": "best"},
            *({"seed": x} for x in (-1, 0.5, None)),
            *({"dense_layers": x} for x in BAD_LAYERS),
            *({"k": x} for x in BAD_BUDGETS),
        ),
    ),
    "quest": Case(
        everything=Quest(k=1.0),
        default=Quest(),
        heavy=(CONTEXT - 5,),
        lost=Lost(Quest(k=8, page=4, dense_layers=()), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        variants=(Quest(k=0.3, page=4, dense_layers=()), Quest(k=9, page=3, dense_layers=(1,))),
        refused=(
            *({"page": x} for x in (0, -1, 2.0, True, None)),
            *({"dense_layers": x} for x in BAD_LAYERS),
            *({"k": x} for x in BAD_BUDGETS),
        ),
    ),
    "omnikv": Case(
        everything=OmniKV(k=1.0),
        default=OmniKV(),
        heavy=(2, MIDDLE, CONTEXT - 3),
        lost=Lost(OmniKV(k=2, layers=(0,)), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        variants=(OmniKV(k=5, layers=(0, 1)), OmniKV(k=0.3, layers=(0,))),
        refused=(*({"layers": x} for x in (*BAD_LAYERS, ())), *({"k": x} for x in BAD_BUDGETS)),
    ),
    "less_is_more": Case(
        everything=LessIsMore(k=1.0),
        default=LessIsMore(),
        heavy=(2, CONTEXT - 1),
        lost=Lost(LessIsMore(k=2, sinks=0, layers=(0,)), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        variants=(LessIsMore(k=8, layers=(0, 1)), LessIsMore(k=0.3, recent=0.5, sinks=2, layers=(0,))),
        refused=(
            *({"layers": x} for x in (*BAD_LAYERS, ())),
            *({"recent": x} for x in (0.0, 1.5, 1, -0.25, float("nan"), None)),
            *({"sinks": x} for x in (-1, 0.5, True, None)),
            *({"k": x} for x in BAD_BUDGETS),
        ),
    ),
    "loki": Case(
        everything=Loki(k=1.0),
        default=Loki(),
        heavy=(2, MIDDLE, CONTEXT - 3),
        lost=Lost(Loki(k=2), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        variants=(
            Loki(k=0.3, rank=1.0),
            Loki(k=7, rank=6, dense_layers=(0,)),
            Loki(k=0.2, rank=8, choose="sample", redo=0.4),
        ),
        refused=(
            *BAD_BARS,
            *UNSAMPLED,
            {"choose": "best"},
            {"seed": -1},
            *({"dense_layers": x} for x in BAD_LAYERS),
            *({"plan": x} for x in ("", 3, True)),
            *({"rank": x} for x in BAD_BUDGETS),
            *({"k": x} for x in BAD_BUDGETS),
        ),
    ),
    "kascade": Case(
        everything=Kascade(k=1.0),
        default=Kascade(min_keys=8),
        heavy=(2, MIDDLE, CONTEXT - 3),
        lost=Lost(Kascade(k=2), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        attended=last_values_read,
        variants=(
            Kascade(k=0.2, min_keys=4, heads="all", dense_below=20),
            Kascade(k=7, sinks=2, recent=3, dense_layers=(2,)),
            Kascade(k=0.1, min_keys=5, scoring="int8"),
            Kascade(k=0.2, min_keys=6, sinks=1, choose="sample"),
            Kascade(k=0.2, min_keys=6, heads="all", choose="sample", redo=0.5),
        ),
        refused=(
            *BAD_BARS,
            *UNSAMPLED,
            {"choose": "best"},
            {"seed": -1},
            {"heads": "some"},
            {"scoring": "int4"},
            *({"plan": x} for x in ("", 3, True)),
            *({"min_keys": x} for x in (0, -1, 0.5, True, None)),
            *({"sinks": x} for x in (-1, 0.5, True, None)),
            *({"recent": x} for x in (0, -1, 0.5, True, None, 129)),
            *({"dense_below": x} for x in (-1, 0.5, True)),
            *({"dense_layers": x} for x in BAD_LAYERS),
            *({"k": x} for x in BAD_BUDGETS),
        ),
    ),
    # its default attends densely in contexts as short as these, so "default" is a small one
    "mac": Reuse(
        everything=MAC(window=16, band=4, tau=0.999, min_context=0, rest_rows=None),
        default=MAC(window=24, band=8, tau=0.0, min_context=0),
        heavy=(CONTEXT - 5, CONTEXT - 2),
        lost=Lost(MAC(window=40, band=4, tau=0.0, min_context=0), {5: 4.5}, 5),
        variants=(
            MAC(window=9, band=3, tau=0.1, sinks=2, min_context=0, max_reuse_depth=2, probe_every=4),
            MAC(window=None, band=None, tau=None, scale="calibrated", min_context=0, rest_rows=2, max_gap=11),
        ),
        refused=(
            *({"tau": x} for x in (1.0, -0.1, 1.5, True, "0.45", float("nan"))),
            *(
                {name: x}
                for name in ("window", "band", "max_gap", "max_reuse_depth", "rest_rows")
                for x in (0, -1, 2.5, True, 1 << 24)
            ),
            *({"sinks": x} for x in (-1, 0.5, True)),
            *({"min_context": x} for x in (-1, 0.5, True)),
            *({"probe_every": x} for x in (-1, 0.5, None)),
            *({"scale": x} for x in ("cosine", None, 2)),
            *({"plan": x} for x in ("", 3, True, "plan.json")),
        ),
    ),
    # its default attends densely in contexts as short as these, so "default" is a small one
    "magicpig": Case(
        everything=MagicPIG(bits=0),
        default=MagicPIG(bits=5, tables=12, local=8, seal=8, centre=8, dense_layers=()),
        heavy=(1, CONTEXT - 5),
        lost=Lost(MagicPIG(bits=16, tables=2, local=8, seal=8, centre=8, dense_layers=()), {MIDDLE: HEAVY}, MIDDLE),
        variants=(
            MagicPIG(bits=4, tables=9, share="own", sinks=1, local=4, seal=16, centre=7, dense_layers=(1,)),
            MagicPIG(bits=3, tables=5, least=1, sinks=0, local=8, seal=8, centre=0, floor=0.1, seed=3, error_bars=True),
            MagicPIG(bits=4, tables=20, local=8, seal=8, centre=8, capacity=15, dense_layers=()),
            MagicPIG(bits=4, tables=9, share="own", local=8, seal=8, centre=8, dense_layers=(), redo=2.0),
            MagicPIG(local=8, seal=8, centre=8),  # by the plan of the tests
        ),
        refused=(
            *BAD_BARS,
            *({"bits": x} for x in (-1, 17, 2.0, True)),
            *({"tables": x} for x in (0, 1025, 2.0, True)),
            *({"plan": x} for x in ("", 3, True)),
            *({"budget": x} for x in (0, 1.5, -0.1, float("nan"), True, "0.1")),
            *({"least": x} for x in (0, 17, -1, 1.0, True, None)),
            *({"share": x} for x in ("kv", None, 2)),
            *({"sinks": x} for x in (-1, 0.5, True, None)),
            *({"local": x} for x in (0, -1, 0.5, True, None)),
            *({"seal": x} for x in (0, -1, 0.5, True, None)),
            *({"centre": x} for x in (-1, 0.5, True, None)),
            *({"floor": x} for x in (-0.1, 1.0, float("nan"), True, None)),
            *({"capacity": x} for x in BAD_BUDGETS),
            *({"seed": x} for x in (-1, 1 << 32, 0.5, True, None)),
            *({"dense_layers": x} for x in BAD_LAYERS),
            *({name: 1 << 17} for name in ("sinks", "local", "seal", "centre")),
        ),
    ),
    # its default attends densely in contexts as short as these, so "default" is a small one
    "block_mka": Case(
        everything=BlockMKA(block=5, window=10, blocks=1000),
        default=BlockMKA(block=5, window=10, blocks=3),
        heavy=(2, MIDDLE, CONTEXT - 3),
        lost=Lost(BlockMKA(block=5, window=10, blocks=1), {20: HEAVY, 40: HEAVY + 0.7}, 20),
        variants=(
            BlockMKA(block=1, window=6, blocks=9, recall="summary", dense_layers=(1,)),
            BlockMKA(block=10, window=10, blocks=1, recall="summary", share=(0,)),
            BlockMKA(block=5, window=5, blocks=2, share=(1, 2), dense_layers=(0,)),
            BlockMKA(block=5, window=15, blocks=2, recall="hash", bits=24, seed=3),
        ),
        refused=(
            *({"block": x} for x in (0, -1, 2.0, True, None)),
            *({"window": x} for x in (0, -64, 100, 64.0, True, None)),
            *({"blocks": x} for x in (0, -1, 2.0, True, None)),
            *({"recall": x} for x in ("mean", None, 3)),
            *({"bits": x} for x in (0, 12, 264, 64, 64.0, True, None)),
            *({"seed": x} for x in (-1, 1, 1 << 32, 0.5, True, None)),
            *({"share": x} for x in BAD_LAYERS),
            *({"dense_layers": x} for x in BAD_LAYERS),
        ),
    ),
}

CONFIGS = [(name, m) for name, case in CASES.items() for m in (case.default, *case.variants)]
each_config = {"argvalues": [m for _, m in CONFIGS], "ids": [repr(m) for _, m in CONFIGS]}
