"""Which tokens fusion methods choose: by their definitions, in fp64."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.fusion import A3, PIE, A3Deep, CacheBlend, Dependence, FullReuse, LegoLink
from longreach.methods.fusion.base import best, best_on_host
from longreach.methods.fusion.scores import attention_of_all_heads
from longreach.methods.registry import FUSIONS, choose_eviction, choose_fusion, fusion_class
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.ops import KVView, Rows
from longreach.runtime.counting import host_bytes
from longreach.testing.inputs import random_kv
from tests.methods.metered import passes_of
from tests.ops.attend.kernels import here

SYSTEM, LENGTHS, QUESTION = 4, (9, 14, 11), 5
N = SYSTEM + sum(LENGTHS) + QUESTION
H, G, D = 4, 2, 16
SHAPE = ModelShape(layers=12, query_heads=H, kv_heads=G, head_dim=D)


def parts(exact: int = 1) -> PromptParts:
    """The first `exact` chunks are what a plain prefill makes."""
    stored, sure = torch.zeros(2, N, dtype=torch.bool)
    before, after = torch.zeros(2, N, dtype=torch.int64)
    start = SYSTEM
    for number, length in enumerate(LENGTHS):
        part = slice(start, start + length)
        stored[part], sure[part] = True, number < exact
        before[part] = torch.arange(length)
        after[part] = torch.arange(length).flip(0)
        start += length
    return PromptParts(stored, sure, before, after, question=N - QUESTION, device=here(stored).device)


def layer(page: int | None = None, impl: str = "auto") -> tuple[FullLayer, Rows, KVView, Tensor, Tensor]:
    kv = random_kv([N], heads=G, dim=D, page=page)
    pos = torch.arange(N - QUESTION, N)
    rows = Rows(torch.randn(QUESTION, H, D), torch.zeros_like(pos), pos)
    values, stored = torch.randn(N, G, D), torch.randn(sum(LENGTHS), G, D)
    call = LayerCall(1, here(rows), here(kv), here(torch.arange(1)), 0.3, impl=impl)
    return FullLayer(call, here(values), lambda: here(stored)), rows, kv, values, stored


def keys(kv: KVView) -> Tensor:
    """fp64 [N, G, D]."""
    slots = torch.arange(N)
    page, offset = kv.locate(torch.zeros_like(slots), slots)
    return kv.k[page, :, offset].double()


def top(scores: Tensor, count: int, exact: int = 1) -> set[int]:
    """The candidates with the largest scores, the earlier of equal ones."""
    start = SYSTEM + sum(LENGTHS[:exact])
    free = range(start, SYSTEM + sum(LENGTHS))
    return set(sorted(free, key=lambda n: (-float(scores[n]), n))[:count])


def chosen(index: Tensor) -> set[int]:
    assert index.dtype == torch.int64 and bool((index.diff() > 0).all()), "ascending, none twice"
    return set(index.tolist())


def test_position_only() -> None:
    prompt = parts()
    assert not chosen(PIE().choose(prompt, None)) and not chosen(FullReuse().choose(prompt, None))
    second, third = range(13, 27), range(27, 38)
    assert chosen(LegoLink(first=2, last=3).choose(prompt, None)) == {
        *second[:2], *second[-3:], *third[:2], *third[-3:]
    }  # fmt: skip
    assert chosen(LegoLink(first=1, last=0).choose(prompt, None)) == {13, 27}
    assert chosen(LegoLink(first=99).choose(prompt, None)) == {*second, *third}


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.4, 1.0])
def test_cacheblend_takes_the_values_that_moved_most(ratio: float) -> None:
    seen, _, _, values, stored = layer()
    moved = torch.zeros(N, dtype=torch.float64)
    moved[SYSTEM : N - QUESTION] = (values[SYSTEM : N - QUESTION].double() - stored.double()).square().sum((1, 2))
    assert chosen(CacheBlend(ratio=ratio).choose(parts(), seen)) == top(moved, round(ratio * N))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("method", [A3(ratio=0.2), A3Deep(ratio=0.2)], ids=repr)
def test_a3_takes_what_the_question_attends_to(method: Fusion, page: int | None, impl: str) -> None:
    seen, rows, kv, *_ = layer(page, impl)
    x = torch.einsum("rhd,nhd->rhn", rows.q.double(), keys(kv).repeat_interleave(H // G, 1)) * 0.3
    x = x.masked_fill(torch.arange(N) > rows.pos[:, None, None], -torch.inf)
    assert chosen(method.choose(parts(), seen)) == top(x.softmax(-1).sum((0, 1)), round(0.2 * N))


@pytest.mark.parametrize("question", [QUESTION, 70], ids=["few rows", "more rows than are scored at a time"])
@pytest.mark.parametrize("method", [A3(), A3(heads="joint"), A3Deep()], ids=repr)
def test_a3_reads_the_keys_that_the_question_sees_and_no_values(method: Fusion, question: int) -> None:
    """Counted by hand; and values are poisoned."""
    kv, pos = random_kv([N + question], heads=G, dim=D), torch.arange(N, N + question)
    stored, exact = torch.zeros(2, N + question, dtype=torch.bool)
    stored[SYSTEM:N] = True
    prompt = PromptParts(stored, exact, torch.zeros_like(exact), torch.zeros_like(exact), question=N)
    rows = Rows(torch.randn(question, H, D), torch.zeros_like(pos), pos)

    def chosen_by(kv: KVView) -> tuple[Tensor, LayerCall]:
        call = LayerCall(1, rows, kv, torch.arange(1), 0.3)
        return method.choose(prompt, FullLayer(call, torch.zeros(0), lambda: torch.zeros(0))), call

    want, call = chosen_by(kv)
    found = passes_of(call, "key_bytes")
    assert torch.tensor(found).sum(0).tolist() == [[int(p) + 1] * G for p in pos]
    vector = D * kv.k.element_size()
    assert host_bytes(call.meter.noted) == (vector * G * sum(int(p) + 1 for p in pos), 0, 0)
    assert torch.equal(chosen_by(replace(kv, v=torch.full_like(kv.v, torch.nan)))[0], want)


def test_a3_with_one_softmax_for_all_heads() -> None:
    seen, rows, kv, *_ = layer()
    x = torch.einsum("rhd,nhd->rn", rows.q.double(), keys(kv).repeat_interleave(H // G, 1)) / (H * D) ** 0.5
    n = torch.arange(N)
    x = x.masked_fill((n > rows.pos[:, None]) | (n < SYSTEM), -torch.inf).softmax(-1).sum(0)
    pooled = torch.stack([x[max(0, i - 2) : i + 3].mean() for i in range(N)])
    assert chosen(A3(ratio=0.2, heads="joint").choose(parts(), seen)) == top(pooled, round(0.2 * N))
    got = attention_of_all_heads(parts(), seen.call).cpu().double()  # also where no token may be chosen
    torch.testing.assert_close(got, pooled, rtol=1e-4, atol=1e-6)
    assert bool((pooled[[0, 1, -2, -1]] != pooled[[2, 2, -3, -3]]).all())


def best_on_device(scores: Tensor, prompt: PromptParts, ratio: float) -> Tensor:
    return best(here(scores), prompt, ratio)


ways = pytest.mark.parametrize("best_of", [best_on_device, best_on_host])


@ways
def test_a_ratio_is_of_all_tokens_and_never_spent_on_exact_ones(best_of: Any) -> None:
    """Ties go to the earlier; where there are fewer candidates than the ratio asks for, all are taken."""
    scores = torch.zeros(N)
    for exact, ratio, count in ((0, 0.25, 11), (1, 0.25, 11), (2, 0.25, 11), (2, 0.5, 11), (3, 1.0, 0)):
        got = chosen(best_of(scores, parts(exact), ratio))
        assert got == top(torch.zeros(N), round(ratio * N), exact) and len(got) == count


@ways
@pytest.mark.parametrize("worst", [torch.nan, -torch.inf])
def test_scores_that_are_no_numbers_come_last_but_before_what_is_no_candidate(best_of: Any, worst: float) -> None:
    scores = torch.rand(N)
    scores[torch.tensor([1, 14, 20, 30, N - 1])] = worst
    ranked = scores.nan_to_num(nan=-1.0, neginf=-1.0)
    for ratio in (0.2, 0.5, 1.0):
        assert chosen(best_of(scores, parts(), ratio)) == top(ranked, round(ratio * N))


@ways
def test_scores_with_ties_infinities_and_nan(best_of: Any) -> None:
    """NaN is smaller than all numbers; scores in fp64 are compared in fp32."""
    dice = torch.Generator().manual_seed(3)
    rank = torch.randint(0, 7, (N,), generator=dice)
    values = torch.tensor([torch.nan, -torch.inf, -2.0, 0.0, 1.0, 1.0 + 1e-12, torch.inf], dtype=torch.float64)
    same = torch.tensor([0, 1, 2, 3, 4, 4, 6])  # the fifth and sixth are one number in fp32
    for count in range(N):
        assert chosen(best_of(values[rank], parts(), count / N)) == top(same[rank].float(), count), count


@pytest.mark.parametrize("name", FUSIONS)
def test_configurations_round_trip_through_json(name: str) -> None:
    method = fusion_class(name).make()
    fields = json.loads(json.dumps(method.to_json()))
    assert fields.pop("name") == name and choose_fusion(name, **fields) == method == choose_fusion(method)
    with pytest.raises(UnknownName, match=f"option of {name}"):
        choose_fusion(name, speed=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: A3(ratio=1.5), r"ratio: expected a number in \[0, 1\], got 1.5"),
        (lambda: CacheBlend(ratio="all"), "ratio: expected a number"),  # type: ignore[arg-type]
        (lambda: A3(ratio=True), "ratio: expected a number"),
        (lambda: Dependence(ratio=-0.1), "ratio: expected a number"),
        (lambda: A3(heads="all"), "heads: expected 'each' or 'joint', got 'all'"),  # type: ignore[arg-type]
        (lambda: LegoLink(first=-1), "first: expected a count >= 0, got -1"),
        (lambda: A3Deep(rounds=0), "rounds: expected a count >= 1"),
        (lambda: A3Deep(layer=-1), "layer: expected a layer's number"),
        (lambda: A3Deep(layer=12).probes(SHAPE), r"expected a layer of the model, which has 12 \(0 to 11\), got 12"),
        (lambda: choose_fusion(3), "fuse: expected a configured method of this slot or its name, got 3"),  # type: ignore[arg-type]
        (
            lambda: choose_fusion(None, ratio=0.1),
            r"fuse.ratio: an option of a method, and the fuse slot has none; name",
        ),
        (lambda: choose_eviction(None, capacity=9), r"evict.capacity: .* name the method: evict=snapkv [(]--evict"),
        (lambda: choose_fusion(A3(), ratio=0.1), "fuse: give options with a method's name"),
    ],
)
def test_options_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_names() -> None:
    assert choose_fusion(None) is choose_fusion("none") is None
    with pytest.raises(UnknownName, match="unknown fuse method 'epic'; known: none, full_reuse, pie, legolink"):
        choose_fusion("epic")
    assert A3Deep().probes(SHAPE) == (4,) and A3Deep(layer=2, rounds=3).probes(SHAPE) == (2, 2, 2)
    assert A3().probes(SHAPE) == ()


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.4, 1.0])
def test_dependence_takes_the_tokens_that_moved_most(ratio: float) -> None:
    moved = torch.rand(N, dtype=torch.float64).masked_fill(~parts().stored, 0.0)
    prompt = replace(parts(), dependence=moved)
    assert chosen(Dependence(ratio=ratio).choose(prompt, None)) == top(moved, round(ratio * N))
    assert Dependence().full_layers == 0 and Dependence().probes(SHAPE) == () and Dependence.needs_dependence
    with pytest.raises(InvalidInput, match="were stored without dependence; precompute them with it"):
        Dependence(ratio=ratio).choose(parts(), None)
