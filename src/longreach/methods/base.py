"""Base of attention methods: a frozen config that turns queries and history into Selections and Partials."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import UnknownName
from longreach.methods.call import LayerCall, ModelShape, Phase
from longreach.methods.plan_maker import PlanMaker
from longreach.ops import KVView, Partial, Rows
from longreach.ops.doors import EVERYTHING
from longreach.ops.types import require
from longreach.plans import AUTO, NONE

Keeps = Literal["nothing", "tokens", "sequences"]


class Notes(NamedTuple):
    """Diagnostics of rows for a method's report, added up over rows and passes on the device.

    tensors: [R, ...] each. columns: turns them, one layer or more stacked before R, into the numbers that are added up:
    float [L, R, H, C]. summary: turns the sums, fp64 [H, C] on the host, and the number of rows into the report's
    values (JSON).
    """

    tensors: tuple[Tensor, ...]
    columns: Callable[..., Tensor]
    summary: Callable[[Tensor, int], dict[str, Any]]


class Outcome(NamedTuple):
    """The result of a layer. dense_reason: why the method attended densely, if it did; notes: for its report.

    partly_dense: (why, number of rows), where the method attended densely for some rows of the pass only.
    relative_error: fp32 [R, H], the standard error of each output over its length, before anything is redone; None
    unless the method measured it (`methods.error_bars`).
    """

    partial: Partial
    dense_reason: str | None = None
    notes: Notes | None = None
    relative_error: Tensor | None = None
    partly_dense: tuple[str, int] | None = None


@dataclass(frozen=True)
class Configured:
    """Base of methods for all slots: a frozen dataclass of options that JSON can hold."""

    name: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """{"name": ..., option: value}; the registry reads it back."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Option names and their defaults."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    @classmethod
    def make(cls, **options: Any) -> Self:
        """The method with these options; an unknown one is an error that lists the known ones."""
        for key in options:
            if key not in cls.options():
                raise UnknownName(f"option of {cls.name}", key, cls.options())
        tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        return cls(**tuples)


@dataclass(frozen=True)
class PromptObserver(Configured):
    """A method that may observe the rows of prompts that another method attends for.

    keeps: the kind of its state. "tokens": what follows from the keys in the cache, and can be made again of them: page
        by page (`PerTokenState`), or by slot (MagicPIG's tables). "sequences": numbers for whole sequences, addressed
        by slot and reset when a slot is reused.
    observes_prompt: whether its state depends on the prompt, so that `observe_prompt` is called during prefill.
    """

    keeps: ClassVar[Keeps] = "nothing"
    observes_prompt: ClassVar[bool] = False

    def observe_prompt(self, call: LayerCall, state: SequenceState | None) -> None:
        """Update the state by prompt rows that the prefill method has attended for.

        Called for methods with `observes_prompt`, in each layer that `run` will be called in, after the rows' keys are
        in the cache. Rows that `run` attends for are not passed here.
        """

    def new_state(self, call: LayerCall, slots: int) -> SequenceState | None:
        """The state of one layer for `slots` sequences, else None. Called once, at the layer's first call."""
        return None

    def state_bytes(self, model: ModelShape, slots: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes of state that all layers of a model keep for `slots` sequences, one page of `capacity` slots each.

        State of sequences does not depend on the capacity. In paged memory, state that is kept page by page is that of
        as many slots as there are pages, and of a page's capacity; hash tables are by slot there too. dtype: of keys.
        Heads are those of all ranks. Layers with a sliding window keep no state, but are counted. Raises what
        `new_state` raises, for example for a missing plan.
        """
        none = torch.empty(0, dtype=torch.int64, device="meta")  # takes no memory
        seq, states = none.new_empty(slots), list[SequenceState | None]()
        for layer in range(model.layers):
            heads, dim = model.heads_of(layer)
            k = torch.empty(slots, heads, capacity, dim, dtype=dtype, device="meta")
            rows = Rows(k.new_empty(0, model.query_heads, dim), none, none)
            view = KVView(k, k, seq, values_in_keys=model.values_in_keys)
            states.append(self.new_state(LayerCall(layer, rows, view, seq, 1.0, model=model), slots))
        return sum(state.nbytes for state in states if state is not None)


@dataclass(frozen=True)
class AttentionMethod(PromptObserver, ABC):
    """Base of methods that fill the prefill or decode slot. Subclasses are frozen dataclasses of options.

    A method that observes prompts gets in `observe_prompt` the rows that its own `run` does not attend for.

    capture: whether a decode step is captured in one CUDA graph, or attention runs on the host at each replay.
    needs_pre_rope: whether it uses `LayerCall.pre_rope` or `rotary`. needs_frequencies: `LayerCall.frequencies`.
    reads_follow_lengths: whether the bytes that it reads depend on lengths alone, so that a dry run can count them.
    reads_whole_on_miss: whether a decode step reads all keys of a layer if it finds nothing there to reuse.
    """

    phases: ClassVar[tuple[Phase, ...]]
    capture: ClassVar[Literal["full", "piecewise"]] = "full"
    needs_pre_rope: ClassVar[bool] = False
    needs_frequencies: ClassVar[bool] = False
    reads_follow_lengths: ClassVar[bool] = True
    reads_whole_on_miss: ClassVar[bool] = False
    chunked_prefill_exact: ClassVar[bool] = True

    @abstractmethod
    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        """Attend for the rows of one layer. What is read is counted by the call."""

    def eviction_refusal(self) -> str | None:
        """Why the method cannot decode after keys were evicted, other ones in each KV head; None if it can."""
        return None

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        """The most bytes of logits, scores and lists that one layer's decode call holds, beyond dense attention's.

        rows: rows of the call, with `capacity` slots visible to each; dtype: of keys. Heads are those of all ranks.
        Of the Triton implementation; a few words a row (counts, positions) are left out.
        """
        return 0

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        """Layers in which every decode step reads all keys: they stay in GPU memory first if others go to host memory.

        dtype: of keys. Default: all layers. Raises InvalidInput where `check` does.
        """
        return range(model.layers)

    def plan_maker(self, model: ModelShape) -> PlanMaker | None:
        """What makes the method's plan of a prompt, if a session is to make it; else None."""
        return None

    def check(self, model: ModelShape) -> None:
        """Raise InvalidInput if an option does not fit the model. Called before a session attaches or switches."""

    def check_prompts(self, model: ModelShape) -> None:
        """Raise InvalidInput if the method can decode but not read prompts of the model. Called after `check`, for the
        prefill method."""


def attend_densely(call: LayerCall, reason: str | None = None) -> Outcome:
    """Exact attention over all keys visible to the rows. reason: why, for the report."""
    return Outcome(call.attend(EVERYTHING), reason)


def budget(amount: int | float, length: Tensor) -> Tensor:
    """Keys of a budget at each length. amount: a count (int), or a fraction of the length (float), at least 1."""
    if isinstance(amount, int):
        return torch.full_like(length, amount).minimum(length)
    # the fraction as the caller wrote it: 0.1 * 30 must be 3, not 3.0000000000000004 rounded up
    return torch.ceil(amount * length.double() - 1e-9).long().clamp(min=1).minimum(length)


def logits_bytes(model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of a layer's kept logits, in the widest dtype that an implementation uses."""
    return rows * model.query_heads * capacity * (8 if dtype == torch.float64 else 4)


def is_count(value: object, least: int = 0) -> bool:
    """Whether `value` is an int (True is none) of at least `least` that a 32-bit index can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def check_plan_name(plan: object) -> None:
    """Raise InvalidInput unless `plan` can be the `plan` option of a calibrated method."""
    named = plan is None or (isinstance(plan, str) and plan != "")
    require(named, f"plan: expected a file, the name of a shipped plan, {AUTO}, {NONE}, or None, got {plan!r}")


def check_budget(name: str, amount: int | float) -> None:
    """Raise InvalidInput unless `amount` is a count >= 1 or a fraction in (0, 1]."""
    count = is_count(amount, 1)
    share = isinstance(amount, float) and 0.0 < amount <= 1.0
    require(count or share, f"{name}: expected a count (int >= 1) or a fraction (float in (0, 1]), got {amount!r}")
