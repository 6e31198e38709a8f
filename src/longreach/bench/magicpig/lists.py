"""The keys that MagicPIG attends to in a step, with their log-weights, by its four ops one after another."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longreach.bench.check import WrongResult
from longreach.methods.call import LayerCall
from longreach.methods.choosing import max_keys
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.state import LayerTables
from longreach.ops import Lists, Selection, Span, Spans, absolute, relative
from longreach.ops.simhash import codes, collide, weigh


@torch.no_grad()
def sampled_lists(call: LayerCall, method: MagicPIG, state: LayerTables, impl: str) -> Lists:
    """The sampled keys of a call's rows: each KV head's (share="group") or each query head's (share="own")."""
    room, coded = max_keys(method.capacity, call.kv.capacity), codes(call.rows.q, state.projections, impl=impl)
    by_slot = replace(call.rows, seq=_slots(call))
    found = collide(
        by_slot, state.tables, coded, capacity=room, least=method.least, share=method.share, impl=impl
    )  # fmt: skip
    weights = weigh(
        call.rows, call.kv, state.tables, found, state.centre[call.slots.long()], floor=method.floor, impl=impl
    )  # fmt: skip
    return found.lists(weights.log_weight)


def attended_keys(name: str, call: LayerCall, method: MagicPIG, state: LayerTables, impl: str) -> tuple[Selection, ...]:
    """All keys that a call's rows attend to: those that are always read, and the sample.

    name: of what is measured. Raises WrongResult if a list overflowed: its head then attends to all keys.
    """
    lists = sampled_lists(call, method, state, impl)
    if bool(lists.overflowed.any()):
        raise WrongResult(
            f"{name}: a list of layer {call.layer} overflowed, and its head attended densely; its time does not count"
        )
    stop = state.tables.stop[_slots(call)].long().clamp(min=method.sinks)[:, None]
    return Spans((Span(absolute(0), absolute(method.sinks)), Span(absolute(stop), relative(1)))), lists


def _slots(call: LayerCall) -> Tensor:
    """int64 [R]: the cache slot of each row."""
    return call.slots.long()[call.rows.seq.long()]
