"""Methods driven without a model: sequences of random queries, keys and values, a KV cache, passes over it.

Three layers: plain logits, soft-capped ones, and one whose heads have sink logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach import runtime
from longreach.cache import Append, CacheConfig, KVCache
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.call import LayerCall, ModelShape, Phase
from longreach.methods.dense import Dense
from longreach.ops import HeadShard, RotaryFrequencies, Rows, Selection, Spans, angles, unrotate
from longreach.ops.rope import RotaryAngles as Rotated
from longreach.runtime import Segment, StateStore
from longreach.testing.oracle import Exact, exact_attend
from longreach.testing.tolerance import bounds, unit_roundoff

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = DIM**-0.5
LOGITS: tuple[dict[str, Any], ...] = ({}, {"softcap": 20.0}, {"sink_logit": torch.tensor([0.5, 2.0, -1.0, 1.0])})
LAYERS = len(LOGITS)
MODEL = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, config="that of the tests")
FREQUENCIES = 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
on_device = functools.cache(Tensor.to)  # copied once: a CUDA graph that is captured takes no copies from the host
CACHES = {"contiguous": CacheConfig(), "paged": CacheConfig("paged", page=5)}


@dataclass(frozen=True)
class Text:
    """One sequence as every layer sees it: q [L, N, H, D], k and v [L, N, G, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def to(self, what: torch.dtype | str) -> Text:
        """In another dtype, or on another device."""
        return Text(self.q.to(what), self.k.to(what), self.v.to(what))


def text(length: int, seed: int = 0, heavy: dict[int, float] | None = None) -> Text:
    """A random sequence. heavy: slot -> logit that every query of every layer has with its key (cap aside).

    Queries share the direction u, which other keys have nothing of: theirs are logits of size 1.
    """
    draw = torch.Generator().manual_seed(seed)
    u = torch.nn.functional.normalize(torch.randn(DIM, generator=draw), dim=0)
    q = torch.randn(LAYERS, length, HEADS, DIM, generator=draw)
    k, v = torch.randn(2, LAYERS, length, KV_HEADS, DIM, generator=draw)
    q, k = (x - (x @ u)[..., None] * u for x in (q, k))
    for slot, logit in (heavy or {}).items():
        k[:, slot] = u * logit
    return Text(q + u / SCALE, k, v)


class Turn(NamedTuple):
    """The next `count` tokens of a text, in a slot that holds what comes before them."""

    text: Text
    slot: int
    count: int = 1


@dataclass(frozen=True)
class Pass:
    """One pass: the call of each layer, with what it read, and its outcome."""

    calls: list[LayerCall]
    outcomes: list[Outcome]

    def outs(self, row: int) -> Tensor:
        """[L, n, H, D]: the results of sequence `row` of the batch."""
        mine = self.calls[0].rows.seq == row
        return torch.stack([o.partial.out[mine] for o in self.outcomes])


def run(
    cache: KVCache,
    method: AttentionMethod,
    turns: Sequence[Turn],
    *,
    before: Callable[[LayerCall], None] | None = None,
    impl: str = "auto",
    phase: Phase | None = None,
) -> Pass:
    """One pass over all layers, committed. before: called when a layer's keys are in, before the method runs.

    phase: None for decoding where every sequence holds something and gets one token.
    """
    start = [cache.lengths[t.slot] for t in turns]
    phase = phase or ("decode" if all(start) and all(t.count == 1 for t in turns) else "prefill")
    observers = (method.by,) if isinstance(method, Observed) else ()
    step = cache.begin([t.slot for t in turns], [t.count for t in turns])
    layers = runtime.Pass((Segment(phase, method, observers),), MODEL, states_of(cache), impl=impl)

    def calls() -> Iterator[LayerCall]:
        for layer in range(LAYERS):
            q, k, v = (
                torch.cat([x[layer, n : n + t.count] for t, x, n in zip(turns, parts, start, strict=True)])
                for parts in ([t.text.q for t in turns], [t.text.k for t in turns], [t.text.v for t in turns])
            )
            cache.append(layer, step, k, v)
            call = call_of(cache, layers, layer, step, q, k)
            if before is not None:
                before(call)
            yield call

    done = runtime.drive(layers, calls())
    cache.commit(step)
    slots = [t.slot for t in turns]
    states_of(cache).mark_observed((method, *observers), slots, start, [cache.lengths[s] for s in slots])
    return Pass([call for call, _ in done], [outcome for _, outcome in done])


def call_of(cache: KVCache, layers: runtime.Pass, layer: int, step: Append, q: Tensor, k: Tensor) -> LayerCall:
    cos, sin = (x[:, None] for x in angles(step.pos, on_device(FREQUENCIES, q.device)))
    terms = {name: on_device(x, q.device) if isinstance(x, Tensor) else x for name, x in LOGITS[layer].items()}
    return layers.call(
        layer,
        Rows(q, step.seq, step.at(layer).slot),
        cache.view(layer, step),
        step.slots,
        SCALE,
        shard=HeadShard.whole(KV_HEADS),
        pre_rope=lambda: (unrotate(q, cos, sin), unrotate(k, cos, sin)),
        rotary=lambda: Rotated(cos[:, 0].to(q.dtype), sin[:, 0].to(q.dtype)),
        frequencies=lambda: RotaryFrequencies(on_device(FREQUENCIES, q.device)),
        evicted=cache.evicted(layer),
        **terms,
    )


def states_of(cache: KVCache) -> StateStore:
    """Where methods keep their state beside a cache."""
    assert isinstance(cache.state, StateStore)
    return cache.state


def new_cache(config: CacheConfig | None = None, slots: int = 1, device: torch.device | str = "cpu") -> KVCache:
    return KVCache(LAYERS, slots, config, device, StateStore(slots))


def read_text(
    method: AttentionMethod,
    whole: Text,
    *,
    chunks: Sequence[int] | None = None,
    steps: int = 3,
    cache: KVCache | None = None,
    slot: int = 0,
    impl: str = "auto",
) -> list[Pass]:
    """Prefill all but the last `steps` tokens in chunks (one by default), then decode those, one cache throughout."""
    cache = cache or new_cache(device=whole.q.device)
    turns = [*(chunks or [whole.q.shape[1] - steps]), *[1] * steps]
    phases: list[Phase] = [*["prefill"] * (len(turns) - steps), *["decode"] * steps]
    return [
        run(cache, in_phase(method, phase), [Turn(whole, slot, n)], impl=impl, phase=phase)
        for phase, n in zip(phases, turns, strict=True)
    ]


def in_phase(method: AttentionMethod, phase: str) -> AttentionMethod:
    """Who attends in a phase: the method if it fills it, else dense, which the method observes if it does."""
    if phase in method.phases:
        return method
    return Observed(method) if method.observes_prompt else Dense()


@dataclass(frozen=True)
class Observed(Dense):
    """Dense attention of rows that a decode method observes."""

    by: AttentionMethod


def outputs(passes: Sequence[Pass]) -> Tensor:
    """[L, N, H, D]: results of all tokens of passes over one sequence."""
    return torch.cat([p.outs(0) for p in passes], 1)


# what the results are held against


def exact(call: LayerCall, selection: Selection | None = None) -> Exact:
    """Attention of a layer in fp64; dense without a selection."""
    return exact_attend(
        call.rows,
        call.kv,
        Spans.dense() if selection is None else selection,
        scale=call.scale,
        softcap=call.softcap,
        sink_logit=call.sink_logit,
    )


def tolerance(want: Exact) -> Tensor:
    """How far rounding alone may take a result from `want`: [R, H, D]."""
    return bounds(want, unit_roundoff(torch.float32))[0]


def shares(call: LayerCall) -> Tensor:
    """The probability exact attention gives each slot, in fp64: [R, H, N], N = the longest sequence."""
    rows, kv = call.rows, call.kv
    found = torch.zeros(*rows.q.shape[:2], int(kv.seq_lens.max()), dtype=torch.float64)
    for r, (seq, pos) in enumerate(zip(rows.seq, rows.pos.tolist(), strict=True)):
        slots = torch.arange(pos + 1)
        page, offset = kv.locate(seq, slots)
        k = kv.k[page, :, offset].double().repeat_interleave(HEADS // KV_HEADS, 1)
        x = (k * rows.q[r].double()).sum(-1).T * call.scale
        x = x if call.softcap is None else call.softcap * torch.tanh(x / call.softcap)
        sink = torch.full((HEADS, 1), -torch.inf) if call.sink_logit is None else call.sink_logit[:, None]
        found[r, :, : pos + 1] = torch.cat([x, sink.double()], 1).softmax(-1)[:, :-1]
    return found


def slots_read(call: LayerCall, selections: Sequence[Selection]) -> Tensor:
    """bool [R, G, N]: slots that some of the selections read for a row."""
    stop = int(call.kv.seq_lens.max())
    found = torch.zeros(call.rows.pos.shape[0], KV_HEADS, stop, dtype=torch.bool)
    for selection in selections:
        found = found | selection.streamed(call.rows, call.kv, stop)
    return found


def weighted(call: LayerCall, selections: Sequence[Selection]) -> Tensor:
    """fp64 [R, H, N]: exp(log-weight) of slots that some of the selections give to a row, 0 for the others."""
    stop = int(call.kv.seq_lens.max())
    found = torch.zeros(*call.rows.q.shape[:2], stop, dtype=torch.float64)
    for selection in selections:
        weight = selection.chosen(call.rows, call.kv, stop)[1]
        mine = selection.mask(call.rows, call.kv, stop).double()
        mine = mine if weight is None else mine * weight.double().exp()
        mine = mine.expand(-1, mine.shape[1] if mine.shape[1] > 1 else KV_HEADS, -1)
        found = torch.maximum(found, mine.repeat_interleave(HEADS // mine.shape[1], 1))
    return found


def largest_value(call: LayerCall) -> float:
    """max |v| over the slots in use."""
    values = []
    for seq, filled in enumerate(call.kv.seq_lens.tolist()):
        slots = torch.arange(filled)
        page, offset = call.kv.locate(torch.full_like(slots, seq), slots)
        values.append(call.kv.v[page, :, offset].abs().amax())
    return float(torch.stack(values).max())
