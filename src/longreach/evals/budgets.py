"""Equal budgets: how much a method may choose so that it reads as many bytes while decoding as another one does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from longreach.adapters.transformers import cache_windows, shape_of
from longreach.cache import PerTokenState, SequenceState
from longreach.errors import InvalidInput
from longreach.evals.evaluate import Evaluation
from longreach.evals.methods import DENSE, Spec
from longreach.methods.base import AttentionMethod, Outcome, PromptObserver
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import HeadShard, KVView, RotaryFrequencies, Rows
from longreach.runtime import Ledger, Pass, Segment, drive

BUDGETS = {"streaming_llm": "window", "quest": "k", "omnikv": "k", "less_is_more": "k", "loki": "k"}
WHOLE = {"block_mka": "blocks"}  # budgets that are counts, whatever the context
COUNTED = {"oracle_top_k": "k", "oracle_sampling": "k"}  # always reads more than dense: gets as many keys instead
STEPS = 100_000  # budgets are multiples of 1 / STEPS of the context
SAMPLES, ROWS = 4, 6  # prompts of each task whose lengths are used; steps of a dry run
NEAR, ENOUGH = 0.02, 0.001  # relative difference that counts as equal; the search's tolerance


class DryRun:
    """Bytes that decode steps read, counted without a model: keys and values are all the same.

    Holds for methods whose reads depend on lengths alone, not on what keys and queries are.

    contexts: lengths of the sequences of the steps, in batches of `batch`. windows: layer -> window of the layers
    that no method attends for. dtype: of keys and values.
    """

    def __init__(
        self, shape: ModelShape, contexts: Sequence[int], *, dtype: torch.dtype, batch: int = 1,
        windows: Mapping[int, int] | None = None,
    ):  # fmt: skip
        if not contexts or min(contexts) < 1:
            raise InvalidInput(f"contexts: expected lengths of at least 1, got {list(contexts)}")
        self.shape, self.dtype, self.windows = shape, dtype, windows or {}
        self.batches = [tuple(contexts[n : n + batch]) for n in range(0, len(contexts), batch)]
        self.longest = max(contexts)
        self._shares: dict[AttentionMethod, float] = {}

    def share(self, method: AttentionMethod) -> float:
        """Bytes of keys, values and metadata over those of dense attention, all layers and steps together."""
        if method not in self._shares:
            ledger = Ledger()
            self._steps(method, ledger)
            found = ledger.report().fraction("decode")
            assert found is not None
            self._shares[method] = found
        return self._shares[method]

    def attended(self, method: AttentionMethod) -> float:
        """The share of its context that a row attends to, the mean over KV heads and layers that are not dense."""
        shares = []
        for call, outcome in self._steps(method, Ledger()):
            if not outcome.dense_reason and call.layer not in self.windows:
                keys = sum(s.keys_read(call.rows, call.kv).double() for s in call.meter.values[-1:])
                shares.append(float((keys / (call.rows.pos[:, None] + 1)).mean()))
        if not shares:
            raise InvalidInput(f"{method.name} attends densely in every layer: it has no number of keys to be equalled")
        return sum(shares) / len(shares)

    def _steps(self, method: AttentionMethod, ledger: Ledger) -> list[tuple[LayerCall, Outcome]]:
        """A decode step of each batch: the calls of its layers and their outcomes, counted by the ledger."""
        found = []
        for contexts in self.batches:
            step = Pass((Segment("decode", method),), self.shape, ZeroStates(), ledger, "reference")
            calls = (self._call(step, layer, contexts) for layer in range(self.shape.layers))
            found += drive(step, calls, windows=self.windows)
        return found

    def _call(self, step: Pass, layer: int, contexts: Sequence[int]) -> LayerCall:
        shape, rows = self.shape, len(contexts)
        heads, dim = shape.heads_of(layer)
        one = torch.zeros(dim, dtype=self.dtype)  # every key and value, in the memory of one
        memory = one.expand(rows, heads, max(contexts), -1)
        filled, seq = torch.tensor(contexts), torch.arange(rows)
        q = torch.randn(rows, shape.query_heads, dim, generator=torch.Generator().manual_seed(layer))
        view = KVView(memory, memory, filled, values_in_keys=shape.values_in_keys)
        here = Rows(q.to(self.dtype), seq, filled - 1)
        return step.call(
            layer, here, view, seq, dim**-0.5, shard=HeadShard.whole(heads),
            frequencies=lambda: RotaryFrequencies(torch.zeros(dim // 2)),
        )  # fmt: skip


class ZeroStates:
    """Fresh, zero-filled state. Its contents do not affect how many bytes are read, but must not be NaN."""

    def get(self, method: PromptObserver, call: LayerCall) -> SequenceState | None:
        state = method.new_state(call, call.kv.sequences)
        if isinstance(state, PerTokenState):
            state.zero()
        return state


@dataclass(frozen=True)
class Budget:
    """A budget found for a method: option=value reads `share` of dense attention's bytes, by the dry run.

    unreachable: why there is no value that comes near enough, or none but the least; value and share are then the
    nearest.
    """

    option: str
    value: float
    share: float
    unreachable: str | None = None


@dataclass(frozen=True)
class Equal:
    """Methods with budgets that make them read as many bytes as another method.

    to: its label; share: its bytes over dense attention's; attended: keys a row attends to over its context, where a
    method gets as many keys, else None. specs: the methods to run, found budgets in their labels. found: label ->
    budget. unreachable, kept: label -> reason, of methods that are left out, and of those that run unchanged: with a
    budget given by the user, or without one to search (kascade's variants).
    """

    to: str
    share: float
    attended: float | None
    specs: tuple[Spec, ...]
    found: dict[str, Budget]
    unreachable: dict[str, str]
    kept: dict[str, str]

    def to_json(self) -> dict[str, object]:
        """All but the specs, whose configurations a record holds."""
        return {
            "to": self.to, "share": self.share, "attended": self.attended,
            "found": {label: asdict(budget) for label, budget in self.found.items()},
            "unreachable": self.unreachable, "kept": self.kept,
        }  # fmt: skip


def equal_bytes(evaluation: Evaluation, to: str) -> Equal:
    """`equalled` for an evaluation whose prompts are made: by the lengths of some of them, with answers half as long as
    they may be. Where answers turn out longer or shorter, so do contexts, and what is read is what was measured."""
    contexts = sorted(
        len(one.prompt) + 1 + (evaluation.tasks[name].task.max_new_tokens - 1) // 2
        for name, asked in evaluation.asked.items() for one in asked[:SAMPLES]
    )  # fmt: skip
    some = contexts[:: -(-len(contexts) // ROWS)]
    model, settings = evaluation.model, evaluation.settings
    dry = DryRun(shape_of(model), some, dtype=model.dtype, batch=settings.batch, windows=cache_windows(model))
    return equalled(evaluation.specs, to, dry)


def equalled(specs: Sequence[Spec], to: str, dry: DryRun) -> Equal:
    """Budgets for the specs with which they read as many bytes as the one labelled `to`.

    A spec that sets its own budget keeps it, as does one whose reads depend on more than lengths. Raises InvalidInput
    where no spec is called `to`, it is dense, or its reads depend on more than lengths.
    """
    by_label = {spec.label: spec for spec in specs}
    if to not in by_label or by_label[to].decode.name == DENSE:
        known = ", ".join(label for label, s in by_label.items() if s.decode.name != DENSE)
        raise InvalidInput(
            f"--equal-bytes: {to!r} is not one of the sparse methods being evaluated (known: {known or 'none'})"
        )
    if not by_label[to].decode.reads_follow_lengths:
        raise InvalidInput(
            f"--equal-bytes: what {to!r} reads depends on keys and queries, and budgets are found from lengths alone; "
            f"name another method, and set the options of this one so that it reads as much"
        )
    target, attended = dry.share(by_label[to].decode), None
    asked, found, unreachable, kept = list[Spec](), dict[str, Budget](), dict[str, str](), dict[str, str]()
    for label, spec in by_label.items():
        method = spec.decode
        option = COUNTED.get(method.name)
        if option is None and method.reads_follow_lengths:
            option = (BUDGETS | WHOLE).get(method.name)
        if label == to or method.name == DENSE or option is None:
            asked.append(spec)
            if label != to and method.name != DENSE:
                kept[label] = f"{method.name} keeps its options"
        elif any(word.startswith(f"{option}=") for word in shlex.split(label)):
            asked.append(spec)
            kept[label] = f"its {option} was given"
        else:
            if method.name in COUNTED:
                attended = dry.attended(by_label[to].decode)
                budget = _as_many(method, option, attended, dry)
            else:
                budget = _nearest(method, option, target, dry)
            if budget.unreachable:
                unreachable[label] = budget.unreachable
                continue
            named = Spec(f"{label} {option}={budget.value}", spec.prefill, _with(method, option, budget.value))
            asked.append(named)
            found[named.label] = budget
    return Equal(to, target, attended, tuple(asked), found, unreachable, kept)


def _with(method: AttentionMethod, option: str, value: float) -> AttentionMethod:
    return type(method).make(**{**{k: v for k, v in method.to_json().items() if k != "name"}, option: value})


def _as_many(method: AttentionMethod, option: str, attended: float, dry: DryRun) -> Budget:
    """As many keys: a share of the context, cut so that rounding up makes no key more of it."""
    value = max(1, int(attended * STEPS)) / STEPS
    return Budget(option, value, dry.share(_with(method, option, value)))


def _nearest(method: AttentionMethod, option: str, target: float, dry: DryRun) -> Budget:
    """The budget whose bytes come nearest to the target's; bytes grow with the budget."""
    whole = method.name in WHOLE
    most = dry.longest if whole else STEPS

    def value(step: int) -> float:
        return step if whole else step / STEPS

    def share(step: int) -> float:
        return dry.share(_with(method, option, value(step)))

    low, high, straight = 1, most, True
    if share(low) >= target:
        high = low
    elif share(high) <= target:
        low = high
    while high - low > 1 and min(abs(share(n) / target - 1) for n in (low, high)) > ENOUGH:
        part = (target - share(low)) / (share(high) - share(low)) if straight else 0.5
        middle = min(max(low + round(part * (high - low)), low + 1), high - 1)
        low, high = (middle, high) if share(middle) < target else (low, middle)
        straight = not straight  # bytes grow almost in proportion; halving handles jumps
    step = min((low, high), key=lambda n: abs(share(n) - target))
    off = share(step) / target - 1
    why = None
    said = f"{method.name} reads {share(step):.1%} of dense attention's bytes"
    if share(step) == share(1):  # near or not: with so little a method hardly chooses at all
        why = f"{said} with its least budget, and the target is {target:.1%}; {_less(method)}"
    elif abs(off) > NEAR:
        if step == most:
            why = f"{said} at most, and the target is {target:.1%}"
        else:
            why = f"{said} with {option}={value(step)}, the nearest to {target:.1%}; raise --length"
    return Budget(option, value(step), share(step), why)


def _less(method: AttentionMethod) -> str:
    """What to do if a method reads too much with any budget."""
    layers = [name for name in ("dense_layers", "layers") if name in method.options()]
    return f"give it fewer layers that attend densely, by its option {layers[0]}" if layers else "give it fewer sinks"
