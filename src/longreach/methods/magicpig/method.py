"""MagicPIG: keys sampled by locality-sensitive hashing, weighted by the probability of being sampled."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput
from longreach.methods.base import (
    AttentionMethod,
    Outcome,
    attend_densely,
    budget,
    check_budget,
    check_plan_name,
    is_count,
)
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import OTHER_KEYS, check_layers, check_layers_of, max_keys, placed
from longreach.methods.error_bars import ErrorBars, Hashed, check_error_bars, measured, redo_bytes
from longreach.methods.magicpig.notes import notes, notes_of_numbers, numbers_of_dense
from longreach.methods.magicpig.plan import DENSE, KIND, MagicPIGPlan, Options, Pair, chosen_for, view
from longreach.methods.magicpig.schedule import MOST_TOKENS, Schedule
from longreach.methods.magicpig.state import LayerTables
from longreach.ops import Rows, Span, Spans, absolute, merge, relative
from longreach.ops.doors import EVERYTHING, Later
from longreach.ops.simhash import projections
from longreach.ops.simhash.api import Share
from longreach.ops.simhash.attention import workspace_bytes
from longreach.ops.simhash.probability import MOST_BITS, MOST_LEAST, MOST_TABLES, check_enough_tables
from longreach.ops.simhash.sealing import workspace_bytes as sealing_bytes
from longreach.ops.types import require
from longreach.plans import find, shipped_for

PRESETS = ((8, 75), (9, 120), (10, 75), (10, 150), (10, 220), (11, 300))  # (bits, tables) of the paper, and (10, 75)
PAIR = (10, 75)  # if neither the caller nor a plan gives a pair
PAPER = ((0, 16), 32)  # the paper's dense layers, and its model's number of layers
# Similar keys collide together. The factors are fitted to longreach-mini at 1K to 16K tokens, for all presets and
# lengths together (docs/magicpig, "Error bars").
HASHED = {"own": Hashed(each=0.6, together=0.65, few=8), "group": Hashed(each=0.3, together=0.5, few=10)}
CHOSEN = ("bits", "tables", "dense_layers")  # options that a plan replaces


MOST_GROUP = 16  # query heads of a KV head that share hash tables, see ops.simhash


def check_shape(model: ModelShape) -> None:
    """Raise InvalidInput for a model that the method does not serve."""
    require(
        not model.values_in_keys,
        "magicpig: expected keys and values apart, got one latent vector for both (MLA); decode with another method",
    )
    group = model.query_heads // model.kv_heads
    require(
        group <= MOST_GROUP,
        lambda: (
            f"magicpig: expected at most {MOST_GROUP} query heads a KV head, got {group}; decode with another method"
        ),
    )


@dataclass(frozen=True)
class MagicPIG(AttentionMethod):
    """Attention to sink tokens, to recent tokens, and to a sample of the keys between them.

    Hash tables hold the keys by their SimHash codes. A query head samples a key if their codes are equal in at least
    `least` tables. The angle of query and key gives the probability u of this (Eq. 10), and log(1 / u) is added to the
    key's logit. Over random projections, the estimates of the softmax's numerator and denominator are unbiased. The
    projections are drawn once, from `seed`. So similar queries sample similar keys, and errors persist over steps.

    bits, tables: signs in a code, and tables (K and L of the paper; `PRESETS` has its pairs). More bits sample fewer
    keys, more tables sample more. bits=0 attends to all keys, with no tables, and takes no other option.
        None: 10 and 75.
    seed: of the projections.
    least: tables in which a key must collide.
    share: "group": all query heads of a KV head attend to the union of their samples. A key that m heads sampled has
    the log-weight log(m / sum of the heads' u). It reads as many keys as "own", with less error. "own": each query head
    attends to its own sample (the paper).
    sinks, local: first and last tokens that are always attended to; they are in no table.
    seal: a token that leaves the last `local` is attended to until its block of `seal` positions is complete, which
    enters the tables at the next token. Layers cut their blocks at different positions, so they seal at different
    tokens, but for the first blocks.
    centre: before keys are hashed, the mean of the first `centre` keys after the sinks is subtracted, for each KV head.
    No block enters before these keys have left the last `local`. 0: keys are not centred. The paper subtracts the mean
    of the prompt, which depends on how the prompt is cut into chunks.
    floor: the least u that weights use. It bounds the weights, and biases the weights of keys with a smaller u.
    capacity: the most keys that a list holds, a count or a fraction of the row's context. A row that samples more keys
    attends densely in that head; the report counts such rows.
    error_bars: the report gives the standard error of the output (`methods.error_bars`). This reads the sampled keys
    and values a second time. It is the standard error over draws of the projections, so errors persist over steps.
    redo: rows with a larger relative error attend densely in that KV head; it includes error_bars. If a head samples no
    key, its error is unknown and counts as 1.
    dense_layers: layers that attend densely. None: the paper's (0 and 16 of 32), at the same relative depth.
    plan: bits and tables of each layer, and the dense layers, chosen by `longreach calibrate magicpig`: a file or a
    shipped plan's name. It replaces bits, tables and dense_layers; seed, least, share, sinks, local, seal and centre
    must be the plan's. None: the shipped plan of the model, if there is one and none of these three is given.
    budget: bytes to read over dense attention's, in (0, 1]; the plan's layers are chosen again for it, and for the
    dtype of the cache. None: the plan's own pairs, which were chosen for its budget and for the dtype of the
    calibration. In a cache of another dtype they may miss the plan's budget and limit on memory: the shipped plan's,
    chosen for fp32, read more than 20% in bf16. Budget and limit hold at the length of the calibration. Shorter
    contexts read a larger share, and their tables take a larger share of memory: calibrate at the length used.

    As long as no block is in the tables, rows attend to all keys. If the host knows this of all sequences of a pass,
    the pass is dense attention and reads nothing else. It knows this on a CPU, and on a GPU if the cache has no room
    for a context that long. Else a step on a GPU reads the projections too. Eviction is refused: tables store the slots
    of keys, and after eviction a slot holds keys of different positions in different heads.
    Metadata read: projections, look-ups in the tables, lists. Keys are read for weights, attention and hashing.
    """

    bits: int | None = None
    tables: int | None = None
    least: int = 2
    share: Share = "group"
    sinks: int = 4
    local: int = 64
    seal: int = 256
    centre: int = 1024
    floor: float = 0.0
    capacity: int | float = 0.5
    seed: int = 0
    dense_layers: tuple[int, ...] | None = None
    error_bars: bool = False
    redo: float | None = None
    plan: str | None = None
    budget: float | None = None

    name = "magicpig"
    phases = ("decode",)
    keeps = "tokens"
    observes_prompt = True
    reads_follow_lengths = False

    def __post_init__(self) -> None:
        bits, tables = self.pair
        for name, value, least, most in (
            ("bits", bits, 0, MOST_BITS),
            ("tables", tables, 1, MOST_TABLES),
            ("least", self.least, 1, MOST_LEAST),
        ):
            fits = is_count(value, least) and value <= most
            require(fits, f"{name}: expected an int in [{least}, {most}], got {value!r}")
        check_enough_tables(tables, self.least)
        for name, least in (("sinks", 0), ("local", 1), ("seal", 1), ("centre", 0)):
            value = getattr(self, name)
            fits = is_count(value, least) and value <= MOST_TOKENS
            require(fits, f"{name}: expected a count of tokens in [{least}, {MOST_TOKENS}], got {value!r}")
        require(self.share in ("own", "group"), f"share: expected 'own' or 'group', got {self.share!r}")
        ok = isinstance(self.floor, (int, float)) and not isinstance(self.floor, bool)
        ok = ok and math.isfinite(self.floor) and 0 <= self.floor < 1
        require(ok, f"floor: expected a number in [0, 1), got {self.floor!r}")
        check_budget("capacity", self.capacity)
        ok = isinstance(self.seed, int) and not isinstance(self.seed, bool) and 0 <= self.seed < 1 << 32
        require(ok, f"seed: expected an int in [0, 2^32), got {self.seed!r}")
        check_error_bars(self.error_bars, self.redo)
        if self.dense_layers is not None:
            check_layers("dense_layers", self.dense_layers)
        self._check_plan()
        self._check_used()

    def _check_plan(self) -> None:
        check_plan_name(self.plan)
        if self.budget is not None:
            number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
            ok = number and 0 < self.budget <= 1  # NaN is not
            require(ok, f"budget: expected bytes over dense attention's, a number in (0, 1], got {self.budget!r}")
        for name in ("plan", "budget"):
            given = [other for other in CHOSEN if getattr(self, other) is not None]
            clash = getattr(self, name) is not None and given
            require(
                not clash,
                f"{', '.join(given)}: a plan chooses {'them' if len(given) > 1 else 'it'} for each layer; leave "
                f"{' and '.join(given)} out, or {name}",
            )

    def _check_used(self) -> None:
        """Raise InvalidInput for options that bits=0 leaves without an effect."""
        if self.bits != 0:
            return
        given = [f.name for f in fields(self) if f.name != "bits" and getattr(self, f.name) != f.default]
        require(
            not given,
            f"{', '.join(given)}: expected bits >= 1, as bits=0 reads all keys in all layers, without tables; leave "
            f"{' and '.join(given)} out, or bits=0",
        )

    def check(self, model: ModelShape) -> None:
        check_shape(model)
        check_layers_of("dense_layers", self.dense_layers or (), model.layers)
        plan = self.plan_for(model)
        if plan is not None and self.budget is not None:
            chosen_for(plan, self.budget, plan.element)

    @property
    def pair(self) -> Pair:
        """Bits and tables of the layers if no plan is used."""
        bits, tables = PAIR
        return bits if self.bits is None else self.bits, tables if self.tables is None else self.tables

    def plan_for(self, model: ModelShape) -> MagicPIGPlan | None:
        """The plan that is used for a model, checked against the model and the options; None if none is used.

        Raises InvalidInput for a plan that is missing, broken, of another model or made with other options, and for a
        budget without a plan.
        """
        if any(getattr(self, name) is not None for name in CHOSEN):
            return None
        if self.plan is None and self.budget is None and shipped_for(KIND, model) is None:
            return None
        try:
            found = view(find(KIND, self.plan, model))
        except InvalidInput as error:
            if self.plan is None and self.budget is not None:
                raise InvalidInput(f"budget={self.budget:g} needs a plan: {error}") from error
            raise
        for f in fields(Options):
            planned, mine = getattr(found.options, f.name), getattr(self, f.name)
            require(
                planned == mine,
                f"{f.name}: the plan {self.plan or 'shipped for this model'} was made with {planned!r}, and this is "
                f"{mine!r}; to keep {f.name}={mine} give bits= and tables= in place of a plan, or calibrate with it "
                f"(longreach calibrate magicpig); else give {f.name}={planned}",
            )
        return found

    def _pair_of(self, call: LayerCall) -> Pair | str:
        """Bits and tables of a layer, or the reason why it attends densely."""
        chosen = call.once((self, "pairs", call.kv.k.element_size()), lambda: self._chosen(call))
        if chosen is not None:
            return "dense in the plan" if chosen[call.layer] == DENSE else chosen[call.layer]
        if not self.pair[0]:
            return "bits=0"
        return "in dense_layers" if call.layer in self._dense_layers(call.model) else self.pair

    def _dense_layers(self, model: ModelShape | None) -> tuple[int, ...]:
        """The layers that attend densely if no plan is used."""
        if self.dense_layers is not None:
            return self.dense_layers
        if model is None:
            raise InvalidInput("LayerCall.model is required: the default dense_layers of magicpig depend on it")
        return placed(*PAPER, model.layers)

    def _chosen(self, call: LayerCall) -> tuple[Pair, ...] | None:
        if any(getattr(self, name) is not None for name in CHOSEN):
            return None
        if call.model is None:
            raise InvalidInput("LayerCall.model is required: magicpig looks up its plan by model")
        return self._pairs(call.model, call.kv.k.element_size())

    def _pairs(self, model: ModelShape, element: int) -> tuple[Pair, ...] | None:
        """The plan's pair of each layer; None if no plan is used. element: bytes of a number in the cache."""
        plan = self.plan_for(model)
        return None if plan is None else chosen_for(plan, self.budget, element)

    def eviction_refusal(self) -> str:
        return f"{OTHER_KEYS}, and its tables name keys by their slot"

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.sinks, self.local, self.seal, self.centre)

    def new_state(self, call: LayerCall, slots: int) -> LayerTables | None:
        pair = self._pair_of(call)
        if isinstance(pair, str):
            return None
        k = call.kv.k
        directions = projections(k.shape[3], *pair, self.seed).to(k.device)
        return LayerTables(call.kv, slots, self.schedule, call.layer, directions)

    def observe_prompt(self, call: LayerCall, state: SequenceState | None) -> None:
        if call.prompt_tokens_left:  # each time that blocks enter, all keys of a segment are moved
            return
        if isinstance(state, LayerTables) and not call.evicted:
            state.ensure_capacity(call.kv)
            state.follow(call, call.once("magicpig: tokens after", lambda: _after(call)))

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if not isinstance(state, LayerTables):
            return attend_densely(call, str(self._pair_of(call)))
        call.refuse_evicted(self)
        state.ensure_capacity(call.kv)
        began = len(call.meter.noted)
        state.follow(call, call.once("magicpig: tokens before", lambda: _before(call)), step=True)
        if self._known_empty(call, state):
            return self._densely(call, state, began)
        return self._in_one_call(call, state, began) if self._one_call(call) else self._sampled(call, state, began)

    def _one_call(self, call: LayerCall) -> bool:
        """Whether one op computes the step."""
        return not self._needs_lists and not call.computes("simhash_attend", "reference")

    def _known_empty(self, call: LayerCall, state: LayerTables) -> bool:
        """Whether the host can tell, without a device sync, that no sequence of the pass has keys in the tables."""
        if call.kv.capacity < self.schedule.start:
            return True
        stop = state.tables.stop
        return stop.device.type == "cpu" and not bool((stop[call.slots.long()] > self.sinks).any())

    def _densely(self, call: LayerCall, state: LayerTables, began: int) -> Outcome:
        """Dense attention, with the notes of a step that samples no key: it reads neither projections nor tables."""
        noted, device = call.meter.noted, call.rows.q.device
        sealed, searched = noted[began].read.other, len(noted)
        assert isinstance(sealed, Later)
        whole = call.attend(EVERYTHING)
        (rows, query_heads, _), kv_heads, error = call.rows.q.shape, call.kv.heads, None
        if self._one_call(call):
            numbers = numbers_of_dense(call.context, kv_heads)
            layer_notes = notes_of_numbers(
                call, numbers, sealed, state.projections.nbytes, self.share, self.sinks, state.summary,
                lists=call.computes("simhash_attend", "numba"),
            )  # fmt: skip
        else:
            bars = None
            if self._needs_lists:
                error = torch.zeros(rows, query_heads, device=device)
                bars = ErrorBars(error, torch.zeros(rows, kv_heads, dtype=torch.bool, device=device), slice(0, 0))
            none = torch.zeros(rows, kv_heads, dtype=torch.int64, device=device)
            reads = [noted[began:searched], noted[searched:], noted[:0]]
            layer_notes = notes(call, none, none, none > 0, none[:, :1] > 0, reads, state.summary, bars)
        return Outcome(whole, "no keys in the tables yet", layer_notes, error)

    def _sampled(self, call: LayerCall, state: LayerTables, began: int) -> Outcome:
        """Op by op, with lists: for error bars, and in PyTorch."""
        tables = state.tables
        by_slot = Rows(call.rows.q, call.slots[call.rows.seq.long()], call.rows.pos)
        codes = call.op("simhash_codes", call.rows.q, state.projections)
        capacity = max_keys(self.capacity, call.kv.capacity)
        found = call.op(
            "simhash_collide", tables, codes, rows=by_slot, capacity=capacity, least=self.least, share=self.share
        )
        # by the row's own context, as the room of a list depends on the other sequences of the batch
        limit = call.once((self, "limit"), lambda: budget(self.capacity, call.context))
        fits = found.count <= limit[:, None]
        found = replace(found, count=torch.where(fits, found.count, capacity + 1))
        if found.count.device.type == "cpu":  # reading it costs nothing, and shorter lists are counted faster
            room = max(1, int(torch.where(fits, found.count, 0).max()))
            found = replace(found, index=found.index[..., :room].contiguous(), met=found.met[..., :room].contiguous())
        weights = call.op("simhash_weigh", tables, found, state.centre[call.slots.long()], floor=self.floor)
        lists = found.lists(weights.log_weight)
        searched = len(call.meter.noted)
        over, start = lists.overflowed, tables.stop[by_slot.seq.long()].long().clamp(min=self.sinks)[:, None]
        sampled = start > self.sinks
        # a list that overflowed is attended to as everything, so nothing is left for the spans
        sinks = torch.where(over, 0, self.sinks)
        rest = torch.where(over, call.context[:, None], start)
        always = Spans((Span(absolute(0), absolute(sinks)), Span(absolute(rest), relative(1))), lists.per)
        certain, sample = call.attend(always), call.attend(lists, sink=False)
        whole, bars = merge(certain, sample), None
        if self.error_bars or self.redo is not None:
            whole, bars = measured(
                call, whole, lists, weights.factor, self.redo, candidates=start - self.sinks,
                hashed=(HASHED[self.share], state.centre[by_slot.seq.long()]),
            )  # fmt: skip
        noted = call.meter.noted
        reads = [noted[began:searched], noted[searched:], noted[:0]]
        if bars is not None:
            reads[1:] = [noted[searched : bars.reads.start] + noted[bars.reads.stop :], noted[bars.reads]]
        if found.per == "kv":
            used = torch.arange(found.index.shape[2], dtype=torch.int32, device=over.device) < found.count[..., None]
            met, union = torch.where(used, found.met, 0).sum(-1, dtype=torch.int64), found.count
        else:
            met, union = found.count, lists.keys_read(call.rows, call.kv)
        layer_notes = notes(call, met, union, over, sampled, reads, state.summary, bars)
        return Outcome(whole, notes=layer_notes, relative_error=None if bars is None else bars.relative)

    def _in_one_call(self, call: LayerCall, state: LayerTables, began: int) -> Outcome:
        """`_sampled` without error bars, where kernels attend without lists."""
        sealed = call.meter.noted[began].read.other
        assert isinstance(sealed, Later)
        limit = call.once((self, "limit"), lambda: budget(self.capacity, call.context))
        found = call.op(
            "simhash_attend", state.tables, state.projections, state.centre, limit, least=self.least,
            share=self.share, sinks=self.sinks, floor=self.floor,
        )  # fmt: skip
        return Outcome(
            found.partial,
            notes=notes_of_numbers(
                call, found.numbers, sealed, state.projections.nbytes, self.share, self.sinks, state.summary,
                lists=found.lists is not None,
            ),
        )  # fmt: skip

    @property
    def _needs_lists(self) -> bool:
        return self.error_bars or self.redo is not None

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        layers, pairs = range(model.layers), self._pairs(model, dtype.itemsize)
        if pairs is not None:
            return [layer for layer in layers if pairs[layer] == DENSE]
        return layers if not self.pair[0] else self._dense_layers(model)

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        pairs = self._pairs(model, dtype.itemsize) or (self.pair,)
        tables = max((tables for bits, tables in pairs if bits), default=0)
        if not tables:
            return 0
        sealing = max(sealing_bytes(rows * model.kv_heads * tables, bits, self.seal) for bits, tables in pairs if bits)
        if not self._needs_lists:
            group = model.query_heads // model.kv_heads
            attending = workspace_bytes(capacity, tables, model.kv_heads, group, model.head_dim)
            return max(sealing, rows * attending)
        listed = max_keys(self.capacity, capacity) * (model.kv_heads if self.share == "group" else model.query_heads)
        # look-ups count matches of every position; afterwards an entry has an index, the number of heads that sampled
        # it, a weight, a factor, and what counts it
        counters = 4 * model.query_heads * capacity + (4 + 1) * listed
        results = 3 * 4 * model.query_heads * (model.head_dim + 1)  # of two passes of attention, and merged
        inputs = 4 * model.head_dim * (model.kv_heads + model.query_heads)
        codes = 2 * model.query_heads * tables
        lists = (4 + 1 + 4 + 4 + 2) * listed
        units = model.kv_heads if self.share == "group" else model.query_heads
        bars = Hashed.workspace_bytes(model, units, max_keys(self.capacity, capacity))
        whole = max(sealing, rows * (codes + max(counters, lists + results + inputs + bars)))
        return whole + redo_bytes(model, rows, self.redo)


def _after(call: LayerCall) -> Tensor:
    """int64 [B]: tokens of each sequence, this pass included; 0 for a sequence without rows."""
    none = torch.zeros(call.kv.sequences, dtype=torch.int64, device=call.rows.pos.device)
    return none.scatter_reduce_(0, call.rows.seq.long(), call.context, "amax")


def _before(call: LayerCall) -> Tensor:
    """int64 [B]: tokens before the first row of each sequence; 0 for a sequence without rows."""
    never = torch.iinfo(torch.int64).max
    first = torch.full((call.kv.sequences,), never, dtype=torch.int64, device=call.rows.pos.device)
    first.scatter_reduce_(0, call.rows.seq.long(), call.rows.pos.long(), "amin")
    return torch.where(first == never, 0, first)
