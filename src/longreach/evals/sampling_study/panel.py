"""The methods of the study, each run on the same rows, with its errors and its reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput
from longreach.evals.read_shares import ReadShares
from longreach.evals.sampling_study.exact import Exact
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.kascade import Kascade
from longreach.methods.loki import Loki
from longreach.methods.magicpig import PRESETS, MagicPIG
from longreach.methods.oracle_sampling import OracleSampling
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.quest import Quest
from longreach.ops import Selection
from longreach.ops.doors import EVERYTHING
from longreach.ops.types import RowRange, Rows
from longreach.runtime.ledger import Ledger

LADDER = (0.01, 0.02, 0.05, 0.1, 0.2)  # budgets of keys of methods that take one
DRAWS = (0.02, 0.05, 0.1, 0.3, 1.0)  # of oracle_sampling draw=iid, which reads fewer keys than it draws
PAPER_4 = ((10, 240), (9, 120), (8, 65), (7, 35))  # bits and tables that read 4% in the paper (Table 11)
GROUP, OWN = "magicpig share=group", "magicpig share=own"  # lines
BITS, TABLES = (7, 8, 9, 10, 11), 120  # Table 12


@dataclass(frozen=True)
class Trial:
    """A method of the study. line: the name that its budgets share. weights: False for MagicPIG without its weights."""

    label: str
    line: str
    method: AttentionMethod
    weights: bool = True

    @property
    def tables(self) -> Hashable:
        """Equal for methods whose state is the same: both ways to share read the same hash tables."""
        return replace(self.method, share="group") if isinstance(self.method, MagicPIG) else self.method


def magicpig(bits: int, tables: int, centre: int, seed: int) -> MagicPIG:
    """All layers sparse, and no limit on a list, so that all presets are compared equally."""
    return MagicPIG(bits, tables, centre=centre, capacity=1.0, seed=seed, dense_layers=())


def presets(centre: int, seed: int) -> Iterator[Trial]:
    """Each preset, with own lists, with lists of groups, without centring, and without weights."""
    for bits, tables in PRESETS:
        name, method = f"magicpig bits={bits} tables={tables}", magicpig(bits, tables, centre, seed)
        yield Trial(f"{name} share=own", OWN, replace(method, share="own"))
        yield Trial(f"{name} share=group", GROUP, method)
        yield Trial(f"{name} share=group centre=0", "magicpig centre=0", replace(method, centre=0))
        yield Trial(f"{name} share=group, no weights", "magicpig, no weights", method, weights=False)


def pairs(some: Sequence[tuple[int, int]], centre: int, seed: int) -> Iterator[Trial]:
    """Pairs of bits and tables, with own lists and with lists of groups."""
    for bits, tables in some:
        name, method = f"magicpig bits={bits} tables={tables}", magicpig(bits, tables, centre, seed)
        yield Trial(f"{name} share=own", OWN, replace(method, share="own"))
        yield Trial(f"{name} share=group", GROUP, method)


def others(seed: int) -> Iterator[Trial]:
    """Methods that choose keys, top-k and sampled, at each budget of LADDER."""
    for k in LADDER:
        yield Trial(f"quest k={k}", "quest", Quest(k=k, dense_layers=()))
        for choose in ("top", "sample"):
            more = "" if choose == "top" else " choose=sample"
            drawn: Any = {"choose": choose, "seed": seed if choose == "sample" else 0}
            for name, method in (
                ("loki", Loki(k=k, **drawn)),
                ("kascade", Kascade(k=k, min_keys=1, **drawn)),
                ("oracle_top_k", OracleTopK(k=k, **drawn)),
            ):
                yield Trial(f"{name} k={k}{more}", f"{name}{more}", method)
    for k in DRAWS:
        yield Trial(f"oracle_sampling k={k}", "oracle_sampling", OracleSampling(k=k, seed=seed))


def fitting(trials: Sequence[Trial], model: ModelShape) -> tuple[list[Trial], dict[str, str]]:
    """(trials that can run on a model, why others cannot by name of their method)."""
    fit, reasons = list[Trial](), dict[str, str]()
    for trial in {t.label: t for t in trials}.values():
        try:
            trial.method.check(model)
            fit.append(trial)
        except InvalidInput as error:
            reasons.setdefault(trial.method.name, str(error))
    return fit, reasons


class Unweighted(LayerCall):
    """A call in which MagicPIG's sampled keys all weigh the same. A control: no method has this option."""

    @classmethod
    def of(cls, call: LayerCall) -> Unweighted:
        return cls(**{f.name: getattr(call, f.name) for f in fields(LayerCall) if f.init})

    def computes(self, name: str, impl: str) -> bool:
        """As if no kernel computed the whole step, weights included."""
        return impl == "reference" if name == "simhash_attend" else super().computes(name, impl)

    def op(self, name: str, *args: Any, **given: Any) -> Any:
        found = super().op(name, *args, **given)
        return found._replace(log_weight=torch.zeros_like(found.log_weight)) if name == "simhash_weigh" else found


class Tried:
    """A trial's errors and reads. errors: for each layer, fp64 [R, H] of each pass."""

    def __init__(self, layers: int):
        self.ledger = Ledger()
        self.errors: list[list[Tensor]] = [[] for _ in range(layers)]

    def run(self, trial: Trial, call: LayerCall, exact: Exact, state: SequenceState | None) -> list[Selection]:
        """Run the method on a call of its own; returns the selections whose values it read."""
        call = call if trial.weights else Unweighted.of(call)
        outcome = trial.method.run(call, state)
        self.ledger.add("decode", call, trial.method.name, outcome, EVERYTHING)
        self.errors[call.layer].append(exact.error(outcome.partial.out))
        return list(call.meter.values)

    def results(self, trial: Trial, layers: int) -> dict[str, Any]:
        """See `SamplingStudy.run`."""
        report = self.ledger.report()
        by_layer = {layer.layer: layer for layer in report.layers}
        shares = ReadShares.of(report, "decode")
        assert shares is not None
        dense = sum(layer.dense_bytes for layer in report.layers)
        notes = {n: layer.notes for n, layer in by_layer.items() if layer.notes is not None}
        found: dict[str, Any] = {
            "method": trial.method.to_json(), "line": trial.line, "weights": trial.weights, **summary(self.errors),
            "reads": {"total": shares.total, "keys": shares.keys, "values": shares.values,
                      "metadata": shares.metadata},
            "layer_reads": [_over(by_layer[n]) if n in by_layer else None for n in range(layers)],
        }  # fmt: skip
        if isinstance(trial.method, MagicPIG):
            one = next(iter(notes.values()))
            found |= {
                **{name: [notes[n][name] if n in notes else None for n in range(layers)]
                   for name in ("sampled_head", "sampled_group")},
                "search": sum(n["search_bytes"] for n in notes.values()) / dense,
                "attention": sum(n["attention_bytes"] for n in notes.values()) / dense,
                "table_share": one["table_share"],
            }  # fmt: skip
        return found


def _over(layer: Any) -> float:
    return float((layer.key_bytes + layer.value_bytes + layer.metadata_bytes) / layer.dense_bytes)


def summary(errors: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """{"errors": [layers][query heads], means over rows, "mean", "median"} over all rows, layers and heads."""
    joined = [torch.cat(list(layer)).cpu() if layer else None for layer in errors]
    everything = torch.cat([x.flatten() for x in joined if x is not None])
    return {
        "errors": [None if x is None else x.mean(0).tolist() for x in joined],
        "mean": float(everything.mean()), "median": float(everything.median()),
    }  # fmt: skip


def own_call(call: LayerCall, shared: dict[Hashable, Any]) -> LayerCall:
    """The call as a decode step's, with a meter of its own. shared: values that methods leave for later layers."""
    return replace(call.observer(), phase="decode", prompt_tokens_left=0, shared=shared)


def state_of(method: AttentionMethod, call: LayerCall) -> SequenceState | None:
    """The method's state of the keys before the first row of a call of one sequence, made of the keys in the cache."""
    state = method.new_state(call, 1)
    if method.observes_prompt:
        before = int(call.rows.pos.min())
        pos = torch.arange(before, dtype=call.rows.pos.dtype, device=call.rows.pos.device)
        none = call.rows.q.new_zeros(()).expand(before, *call.rows.q.shape[1:])  # queries are not looked at
        rows = Rows(none, torch.zeros_like(pos), pos, (RowRange(before, 0, 0),))
        history = replace(call.observer(), rows=rows, phase="prefill", shared={}, pre_rope=None, rotary=None)
        method.observe_prompt(history, state)
    return state
