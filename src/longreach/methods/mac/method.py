"""MAC-Attention: match, amend, complete (arXiv 2604.00235)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod, Notes, Outcome, attend_densely, check_plan_name, is_count
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.mac.diagnostics import columns, probed
from longreach.methods.mac.plan import KIND, MOST, SCALES, MACPlan, Scale
from longreach.methods.mac.policy import limit_of, row_price, rule_of
from longreach.methods.mac.rows import last_rows
from longreach.methods.mac.state import LayerState
from longreach.ops import Partial, Span, Spans, absolute, merge, relative
from longreach.ops.match import Rule, recovered
from longreach.ops.types import require
from longreach.plans import find


@dataclass(frozen=True)
class MAC(AttentionMethod):
    """Attention that reuses the result of a recent row with a similar query.

    The ring holds the last `window` rows of each sequence, layer and query head: their queries before rotation, and
    their entries. The entry of the row at p is attention over [sinks, p + 1 - band). The row at m searches for the
    nearest query by L2. If it is near enough, the row attends to [max(sinks, p + 1 - band), m + 1) and to the sinks,
    and the entry replaces the rest (Eq. 7). The row's own entry is its attention before m + 1 - band merged with the
    reused entry: no subtraction and no second pass. The query heads of a KV head share one read, so they reuse together
    or not at all. After a prompt the ring holds its last rows.

    window: rows searched. None: the plan's, layer by layer.
    band: last keys before a row that are always read. None: the plan's, layer by layer.
    tau: the threshold, in [0, 1): a higher one accepts fewer rows. None: the plan's, layer by layer.
    scale: with "sqrt2d" a row is near enough below a distance of sqrt(2 d) (1 - tau) (Eq. 3; the paper has 0.75 for
        long answers, and 0.45 for long contexts, which loses answers of longreach-mini). With "calibrated" it is near
        enough if the logits of the two queries differ by less than 1 - tau, as a root mean square over keys of the
        plan's energy for each layer, KV head and pair of channels; this has the same meaning in every model. Distances
        are of the queries' dtype: in bf16 equal queries differ by some 0.6% of their length after recovery, so
        thresholds above 0.99 accept few of them.
    plan: a file or a shipped plan's name; None: the shipped plan of the model. Used only if an option needs it. A
        layer without a band in the plan attends densely.
    sinks: first tokens that entries leave out and every row reads. None: as many as the plan's bands leave out, else 0.
    min_context: rows with fewer tokens of context attend densely. None: the shortest context in which a search can
    pay (Eq. 9).
    max_gap: the largest gap to a reused row, however wide the window.
    max_reuse_depth: the most reuses that an entry may descend from; errors add up along a chain. None: no limit, as in
    the paper.
    rest_rows: the profit guard. A KV head whose searches cost more than they save attends densely for this many rows,
    then searches again. None: no guard.
    probe_every: a row at every multiple of this many tokens also attends densely,
    so that the report shows its error; 0: never.
    """

    window: int | None = 1024
    band: int | None = 256
    tau: float | None = 0.75
    scale: Scale = "sqrt2d"
    plan: str | None = None
    sinks: int | None = None
    min_context: int | None = None
    max_gap: int | None = None
    max_reuse_depth: int | None = 32
    rest_rows: int | None = 64
    probe_every: int = 0

    name = "mac"
    phases = ("decode",)
    keeps = "sequences"
    needs_pre_rope = True
    observes_prompt = True
    reads_follow_lengths = False
    reads_whole_on_miss = True

    def __post_init__(self) -> None:
        for name, least in (
            ("window", 1),
            ("band", 1),
            ("min_context", 0),
            ("max_gap", 1),
            ("max_reuse_depth", 1),
            ("rest_rows", 1),
        ):
            value = getattr(self, name)
            most = 1 << 15 if name == "max_reuse_depth" else MOST
            fits = value is None or (is_count(value, least) and value < most)
            require(fits, f"{name}: expected a count in [{least}, {most}) or None, got {value!r}")
        for name, value in (("sinks", 0 if self.sinks is None else self.sinks), ("probe_every", self.probe_every)):
            require(is_count(value) and value < MOST, f"{name}: expected a count in [0, 2^24), got {value!r}")
        ok = isinstance(self.tau, (int, float)) and not isinstance(self.tau, bool) and 0 <= self.tau < 1
        require(ok or self.tau is None, f"tau: expected a number in [0, 1) or None, got {self.tau!r}")
        require(self.scale in SCALES, f"scale: expected one of {', '.join(SCALES)}, got {self.scale!r}")
        check_plan_name(self.plan)
        require(
            self.plan is None or self.planned,
            "plan: expected None, as no option uses it; set window, band or tau to None, or scale='calibrated'",
        )

    @property
    def planned(self) -> bool:
        """Whether something is taken from a plan."""
        return None in (self.window, self.band, self.tau) or self.scale == "calibrated"

    def eviction_refusal(self) -> str:
        return OTHER_ENTRIES

    def check(self, model: ModelShape) -> None:
        if self.planned:
            self._plan_for(model)

    def _plan_for(self, model: ModelShape) -> MACPlan:
        plan = MACPlan.of(find(KIND, self.plan, model))
        enough = self.band is not None or self.sinks is None or self.sinks >= plan.sinks
        require(
            enough,
            f"sinks: expected at least {plan.sinks}, as the plan's bands leave out their weight, got {self.sinks}; "
            f"leave sinks out, or calibrate with --sinks {self.sinks}",
        )
        return plan

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        plan = self._plan_for(model) if self.planned and self.band is None else None
        return () if plan is None else [layer for layer in range(model.layers) if plan.band[layer] is None]

    def new_state(self, call: LayerCall, slots: int) -> LayerState | None:
        k, heads = call.kv.k, call.rows.q.shape[1]
        plan = None
        if self.planned:
            if call.model is None:
                raise InvalidInput("LayerCall.model is required: MAC looks up its plan by model")
            plan = self._plan_for(call.model)
            if self.band is None and plan.band[call.layer] is None:
                return None
        call.refuse_evicted(self)  # before a ring is made, which would block evictions
        weight = None if plan is None or self.scale == "sqrt2d" else _weight(plan.energy[call.layer], call)
        rule = self._rule(call.layer, plan, heads // call.kv.heads, k, call.kv.values_in_keys)
        return LayerState(slots, heads, call.kv.heads, k.shape[3], rule, weight, k)

    def _rule(self, layer: int, plan: MACPlan | None, group: int, k: Tensor, one: bool = False) -> Rule:
        """one: whether key and value are one vector."""
        dim, size, bounded = k.shape[3], k.element_size(), self.max_reuse_depth is not None
        window, band, tau, sinks = self.window, self.band, self.tau, self.sinks
        if plan is not None:
            window = plan.window[layer] if window is None else window
            tau = plan.tau[self.scale][layer] if tau is None else tau
            sinks = plan.sinks if sinks is None and band is None else sinks
            band = plan.band[layer] if band is None else band
        sinks = sinks or 0
        assert window is not None and band is not None and tau is not None
        return rule_of(
            window=window,
            band=band,
            limit=limit_of(self.scale, tau, dim),
            sinks=sinks,
            price=row_price(group, dim, size, bounded=bounded, values_in_keys=one),
            min_context=self.min_context,
            max_gap=self.max_gap,
            max_reuse_depth=self.max_reuse_depth,
            rest_rows=self.rest_rows,
        )

    def observe_prompt(self, call: LayerCall, state: SequenceState | None) -> None:
        if not isinstance(state, LayerState):
            return
        call.refuse_evicted(self)
        some = last_rows(call, state.ring.size)
        if some is None:
            return
        rule = state.rule
        with torch.no_grad():
            query = recovered(some.rows.q, some.angles(), state.weight, state.ring.query.dtype)
            entry = some.attend(Spans((Span(absolute(rule.sinks), relative(1 - rule.band)),)), sink=False)
            state.note(some.slots[some.rows.seq.long()], some.rows.pos, query, entry, math.inf)

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if not isinstance(state, LayerState):
            return attend_densely(call, "the plan has no band wide enough")
        call.refuse_evicted(self)
        if _several(call):
            outcome = attend_densely(call, "several new tokens at once")
            self.observe_prompt(call, state)
            return outcome
        rule = state.rule
        with torch.no_grad():
            found = call.op("match", state.ring, rule, weight=state.weight)
            spans = Spans((Span(absolute(found.start), relative(1)),), "query")
            keys = found.reads[..., 0]
            if rule.sinks:  # the match counts the sinks too, which are read by a pass of their own
                keys = keys - call.once(("sinks", rule.sinks), lambda: call.context.clamp(max=rule.sinks)[:, None])
            main, before = call.op(
                "attend_amend",
                spans,
                relative(1 - rule.band),
                state.entries,
                found.read_entry,
                found.write_entry,
                counted=keys,
            )
            whole, apart = main, list[Tensor]()
            if rule.sinks:
                kept = call.attend(Spans((Span(absolute(0), absolute(rule.sinks)),)), sink=False)
                whole = merge(main, kept)
                apart.append(kept.lse)
            if call.sink_logit is not None:
                apart.append(call.sink_logit.detach().to(whole.lse.dtype).expand_as(whole.lse))
            noted = Notes((found.notes, whole.lse, before), columns, state.summary)
            if self.probe_every:
                due, probe = call.once((self, "probe"), lambda: self._probe(call))
                error = _error(whole, call.attend(probe), due)
                noted = Notes((error, *noted.tensors), probed, state.summary)
        return Outcome(whole, notes=noted._replace(tensors=(*noted.tensors, *apart)))

    def _probe(self, call: LayerCall) -> tuple[Tensor, Spans]:
        """The rows that also attend densely, bool [R], and the span that only they read for it."""
        due = call.context % self.probe_every == 0
        return due, Spans((Span(absolute(torch.where(due, 0, call.context)[:, None]), relative(1)),))


OTHER_ENTRIES = "its entries hold attention over keys that were dropped"


def _weight(energy: Tensor, call: LayerCall) -> Tensor:
    """fp32 [H, D]: factors that turn a distance of queries into the root mean square difference of their logits."""
    mine = energy if call.shard is None else call.shard.slice(energy)
    group = call.rows.q.shape[1] // call.kv.heads
    weight = mine.double().sqrt() * call.scale
    return weight.repeat_interleave(group, 0).to(call.rows.q.device, torch.float32)


def _error(whole: Partial, dense: Partial, due: Tensor) -> Tensor:
    """|o - dense| / |dense| [R, H] for rows to be checked, else NaN."""
    apart = (whole.out - dense.out).norm(dim=-1) / dense.out.norm(dim=-1).clamp(min=1e-30)
    return torch.where(due[:, None], apart, torch.nan)


def _several(call: LayerCall) -> bool:
    """Whether a sequence may have several rows in the pass, from the host's information."""
    if call.rows.runs is not None:
        return any(run.rows > 1 for run in call.rows.runs)
    return call.rows.q.shape[0] > call.slots.shape[0]
