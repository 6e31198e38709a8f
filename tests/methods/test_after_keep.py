"""Decoding after keys were evicted, other ones in each KV head: exact over what is left, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import (
    MAC,
    Kascade,
    LessIsMore,
    Loki,
    MagicPIG,
    OmniKV,
    OracleSampling,
    OracleTopK,
    Quest,
    StreamingLLM,
    runtime,
)
from longreach.cache import DecodeBuffers, KVCache
from longreach.errors import Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from longreach.ops.selection import Selection
from tests.methods.drive import (
    CACHES,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    LOGITS,
    MODEL,
    SCALE,
    Pass,
    Text,
    Turn,
    call_of,
    in_phase,
    new_cache,
    run,
    states_of,
    text,
)
from tests.ops.attend.kernels import needs_gpu

WORKING = [
    Dense(),
    StreamingLLM(sinks=3, window=0.3),
    StreamingLLM(sinks=0, window=5),
    Quest(k=0.4, page=4, dense_layers=()),
    Quest(k=6, page=3, dense_layers=(1,)),
    Loki(k=0.4, rank=6),
    Loki(k=5),
    OracleTopK(k=0.3),
    OracleSampling(k=1.0, draw="systematic"),
]
REFUSING = [Kascade(k=5, min_keys=5), Kascade(k=5, min_keys=5, scoring="int8"), OmniKV(k=5, layers=(0,)),
            LessIsMore(k=5, layers=(0,)), OracleTopK(k=5, heads="all"),
            MagicPIG(bits=4, tables=9, local=4, seal=4, centre=8)]  # fmt: skip
each_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
impls = ["reference", "triton"]


class Kept:
    """What a plain list of tokens holds: layer -> sequence -> KV head -> positions, in the order of slots."""

    def __init__(self, lengths: dict[int, int]):
        self.at = [{s: [list(range(n)) for _ in range(KV_HEADS)] for s, n in lengths.items()} for _ in range(LAYERS)]

    def keep(self, cache: KVCache, dice: torch.Generator, slots: Sequence[int], share: float) -> None:
        """Evict random keys of every layer, as many in each head, other ones in each."""
        for layer in range(LAYERS):
            index = []
            for slot in slots:
                held = len(self.at[layer][slot][0])
                count = max(1, int(held * share) - layer)
                chosen = [torch.randperm(held, generator=dice)[:count].sort().values for _ in range(KV_HEADS)]
                self.at[layer][slot] = [[self.at[layer][slot][g][int(i)] for i in chosen[g]] for g in range(KV_HEADS)]
                index.append(torch.stack(chosen).to(cache.device))
            cache.keep(layer, slots, index)

    def add(self, slot: int, pos: int) -> None:
        for layer in self.at:
            for head in layer[slot]:
                head.append(pos)

    def cut(self, slot: int, length: int) -> None:
        for layer in self.at:
            layer[slot] = [[p for p in head if p < length] for head in layer[slot]]


def expected(kept: Kept, layer: int, slot: int, whole: Text, pos: int, chosen: Tensor) -> Tensor:
    """fp64 [H, D] of the row at `pos`, by the plain definition. chosen: bool [G, slots], what it attends to."""
    terms, out, group = LOGITS[layer], [], HEADS // KV_HEADS
    for h in range(HEADS):
        at = [p for n, p in enumerate(kept.at[layer][slot][h // group]) if bool(chosen[h // group, n])]
        k, v = (x[layer, at, h // group].double() for x in (whole.k, whole.v))
        x = (k @ whole.q[layer, pos, h].double()) * SCALE
        if "softcap" in terms:
            x = terms["softcap"] * torch.tanh(x / terms["softcap"])
        if "sink_logit" in terms:
            x = torch.cat([x, terms["sink_logit"][h : h + 1].double()])
            v = torch.cat([v, torch.zeros_like(v[:1])])
        out.append(x.softmax(0) @ v)
    return torch.stack(out)


def attended(turn: Pass, layer: int, row: int, slots: int) -> Tensor:
    """bool [G, slots]: what the last pass over values names for a row."""
    call = turn.calls[layer]
    selection: Selection = call.meter.values[-1]
    return selection.streamed(call.rows, call.kv, slots)[row]


def check(
    kept: Kept, turn: Pass, method: AttentionMethod, slots: Sequence[int], texts: dict[int, Text],
    lengths: dict[int, int],
) -> None:  # fmt: skip
    for layer in range(LAYERS):
        for row, slot in enumerate(slots):
            held = len(kept.at[layer][slot][0])
            assert int(turn.calls[layer].kv.seq_lens[row]) == held and int(turn.calls[layer].rows.pos[row]) == held - 1
            chosen = attended(turn, layer, row, held)
            want = expected(kept, layer, slot, texts[slot], lengths[slot] - 1, chosen)
            got = turn.outcomes[layer].partial.out[row].double()
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(texts[slot].v.abs().max()))
            if turn.outcomes[layer].dense_reason or isinstance(method, Dense):
                assert bool(chosen.all())


@pytest.mark.covering("config", "impl", method=type)
@pytest.mark.parametrize("impl", impls)
@pytest.mark.parametrize("method", WORKING, ids=repr)
@each_cache
def test_decoding_after_keep(method: AttentionMethod, config: Any, impl: str) -> None:
    """Ragged; kept twice, decoded, cut back and decoded again, a neighbour evicted from at another time."""
    dice = torch.Generator().manual_seed(3)
    texts, slots = {2: text(44, seed=1), 0: text(31, seed=2)}, [2, 0]
    cache, prefill = new_cache(config, slots=3), in_phase(method, "prefill")
    run(cache, prefill, [Turn(texts[2], 2, 33), Turn(texts[0], 0, 21)])
    lengths = {2: 33, 0: 21}
    kept = Kept(lengths)
    kept.keep(cache, dice, [2], 0.6)

    def decode(order: Sequence[int]) -> None:
        turn = run(cache, method, [Turn(texts[s], s) for s in order], impl=impl, phase="decode")
        for slot in order:
            kept.add(slot, lengths[slot])
            lengths[slot] += 1
        check(kept, turn, method, order, texts, lengths)

    decode(slots)
    decode([0, 2])
    kept.keep(cache, dice, [0, 2], 0.5)
    for order in ([0, 2], [2], [2, 0]):
        decode(order)
    cache.truncate([2], [lengths[2] - 2])
    lengths[2] -= 2
    kept.cut(2, lengths[2])
    decode([2, 0])
    decode([2])


class Static:
    """A decode step in buffers that stay in place, which a CUDA graph can hold."""

    def __init__(self, cache: KVCache, method: AttentionMethod, slots: Sequence[int], width: int):
        device, batch = cache.device, len(slots)
        self.cache, self.buffers = cache, DecodeBuffers(cache, slots, width)
        self.method, self.slots = method, slots
        self.layers = runtime.Pass((runtime.Segment("decode", method),), MODEL, states_of(cache))
        self.q = torch.zeros(LAYERS, batch, HEADS, DIM, device=device)
        self.k, self.v = torch.zeros(2, LAYERS, batch, KV_HEADS, DIM, device=device)
        self.outs = torch.zeros_like(self.q)

    def run(self) -> None:
        self.layers.restart()
        for layer in range(LAYERS):
            self.cache.append(layer, self.buffers.append, self.k[layer], self.v[layer])
            call = call_of(self.cache, self.layers, layer, self.buffers.append, self.q[layer], self.k[layer])
            self.outs[layer] = runtime.attend_layer(self.layers, call).partial.out
        self.buffers.advance()

    def decode(self, tokens: Sequence[Text], captured: bool) -> list[Tensor]:
        """[L, B, H, D] of each of the tokens. captured: from the third on by one CUDA graph."""
        graph, made = None, []
        self.buffers.open(len(tokens))
        for number, token in enumerate(tokens):
            for buffer, x in zip((self.q, self.k, self.v), (token.q, token.k, token.v), strict=True):
                buffer.copy_(x)
            if captured and number == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.run()
            self.run() if graph is None else graph.replay()
            before = [self.cache.lengths[s] for s in self.slots]
            self.buffers.count()
            after = [self.cache.lengths[s] for s in self.slots]
            states_of(self.cache).mark_observed((self.method,), self.slots, before, after)
            made.append(self.outs.clone())
        self.buffers.close()
        return made


@pytest.mark.covering("method", "config")
@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize("method", WORKING, ids=repr)
@each_cache
def test_steps_in_place_after_keep(method: AttentionMethod, config: Any, captured: bool) -> None:
    """Fixed buffers give what passes that are begun one by one give, captured or not."""
    device, slots, steps = "cuda" if captured else "cpu", [2, 0], 6
    texts, lengths = {2: text(44, seed=1).to(device), 0: text(31, seed=2).to(device)}, {2: 33, 0: 21}
    caches = [new_cache(config, slots=3, device=device) for _ in range(2)]
    for cache in caches:
        run(cache, in_phase(method, "prefill"), [Turn(texts[s], s, lengths[s]) for s in slots])
        Kept(lengths).keep(cache, torch.Generator().manual_seed(5), slots, 0.6)
    want = [run(caches[0], method, [Turn(texts[s], s) for s in slots], phase="decode") for _ in range(steps)]

    def tokens(n: int) -> Text:
        each = [Text(*(x[:, lengths[s] + n] for x in (texts[s].q, texts[s].k, texts[s].v))) for s in slots]
        return Text(*(torch.stack(x, 1) for x in zip(*((t.q, t.k, t.v) for t in each), strict=True)))

    static = Static(caches[1], method, slots, width=10 if config.kind == "paged" else 1)
    got = static.decode([tokens(n) for n in range(steps)], captured)
    for mine, plain in zip(got, want, strict=True):
        torch.testing.assert_close(mine, torch.stack([o.partial.out for o in plain.outcomes]), rtol=1e-5, atol=1e-5)
    caches[1].keep(0, [2], [torch.arange(4, device=device).expand(KV_HEADS, -1)])
    assert not static.buffers.valid, "memory has moved: a graph captured before must not run"


@pytest.mark.parametrize("method", REFUSING, ids=repr)
def test_methods_that_refuse_say_why(method: AttentionMethod) -> None:
    whole = text(30, seed=1)
    cache = new_cache()
    run(cache, in_phase(method, "prefill"), [Turn(whole, 0, 25)])
    Kept({0: 25}).keep(cache, torch.Generator().manual_seed(0), [0], 0.5)
    with pytest.raises(Unsupported, match=rf"{method.name}.*: after eviction a slot holds other keys in each head"):
        run(cache, method, [Turn(whole, 0)], phase="decode")
    cache.reset([0])  # an empty slot begins anew
    run(cache, in_phase(method, "prefill"), [Turn(whole, 0, 25)])
    run(cache, method, [Turn(whole, 0)], phase="decode")


def test_a_ring_refuses_before_anything_is_evicted() -> None:
    method, whole = MAC(window=16, band=4, min_context=0), text(30, seed=1)
    cache = new_cache()
    run(cache, in_phase(method, "prefill"), [Turn(whole, 0, 25)])
    held = cache.nbytes
    with pytest.raises(Unsupported):
        cache.keep(0, [0], [torch.arange(4).expand(KV_HEADS, -1).contiguous()])
    assert cache.nbytes == held and cache.slots_in_use(0) == [25]
    run(cache, method, [Turn(whole, 0)], phase="decode")
