"""Cosines, norms and ranges against the same by loops, and the tables that angles predict."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from longreach.evals.sampling_study.angles import Angles
from longreach.evals.sampling_study.exact import Exact
from longreach.evals.sampling_study.geometry import KeyGeometry, ranges
from longreach.evals.sampling_study.panel import magicpig, state_of
from longreach.methods.call import LayerCall
from tests.evals.sampling_study.small import HEADS, KEYS, KV_HEADS, ROWS, call, weights


def test_cosines_and_norms() -> None:
    calls = [call(seed) for seed in range(3)]
    geometry = KeyGeometry(2)  # the second layer is not measured
    for one in calls:
        exact = Exact.of(one)
        geometry.add(0, exact.k, exact.v)
    found = geometry.results()
    k = torch.stack([one.kv.k[0, :, :KEYS].double() for one in calls])  # [prompts, G, n, D]
    v = torch.stack([one.kv.v[0, :, :KEYS].double() for one in calls])
    first, mean = k[:, :, 0], k[:, :, 4:].mean(2)
    for head in range(KV_HEADS):
        for name, x in (("first_keys", first), ("mean_keys", mean)):
            cosines = [float(F.cosine_similarity(x[a, head], x[b, head], 0)) for a, b in ((0, 1), (0, 2), (1, 2))]
            assert found[name]["min"][0][head] == pytest.approx(min(cosines), abs=1e-5)
            assert found[name]["mean"][0][head] == pytest.approx(sum(cosines) / 3, abs=1e-5)
        both = F.cosine_similarity(first[:, head], mean[:, head], -1).mean()
        assert found["first_to_mean"][0][head] == pytest.approx(float(both), abs=1e-5)
        norms = v[:, head].norm(dim=-1)
        ratio = (norms[:, 0] / norms[:, 4:].median(-1).values).mean()
        assert found["first_value_norm"][0][head] == pytest.approx(float(ratio), rel=1e-5)
    assert found["first_to_mean"][1] is None and found["mean_keys"]["min"][1] is None
    assert found["first_keys_other"]["min"] == [None, None]


def test_ranges_are_over_the_visible_keys() -> None:
    made = call()
    exact = Exact.of(made)
    found = ranges(exact)
    ends = torch.tensor([0.05, 0.95], dtype=torch.float64)
    for row in range(ROWS):
        for head in range(HEADS):
            share, v, _ = weights(made, row, head)
            low, high = (v - share @ v).norm(dim=-1).log().quantile(ends)
            assert float(found["value_distance"][row, head]) == pytest.approx(float(high - low), rel=1e-3)
            low, high = share.log().quantile(ends)  # logits but for a constant
            assert float(found["logits"][row, head]) == pytest.approx(float(high - low), rel=1e-3)


def test_the_share_that_angles_predict_is_sampled() -> None:
    """Mean over seeds of what the method's tables sample; p is in bins, so agreement is to 1%."""
    made = call()
    before, angles = KEYS - ROWS, Angles(magicpig(6, 20, 64, 0).schedule)
    angles.add(made.rows.q, Exact.of(made), before, made.layer)
    stop = int(angles.schedule.stop(torch.tensor(before), made.layer))
    assert float(angles.count.sum()) == ROWS * HEADS * (stop - 4)
    sampled = []
    for seed in range(40):
        method = magicpig(6, 20, 64, seed)
        mine = LayerCall.observer(made)
        outcome = method.run(mine, state_of(method, mine))
        assert outcome.notes is not None
        columns = outcome.notes.columns(*(x[None] for x in outcome.notes.tensors))[0]  # [R, G, columns], shares
        sampled.append(float((columns[..., 0] * made.context[:, None]).mean()) / (stop - 4))
    assert sum(sampled) / 40 == pytest.approx(angles.share(6, 20), rel=0.05)


def test_tables_for_a_share() -> None:
    angles = Angles(magicpig(8, 20, 64, 0).schedule)
    made = call()
    angles.add(made.rows.q, Exact.of(made), KEYS - ROWS, made.layer)
    for bits in (4, 8):
        tables = angles.tables_for(bits, 0.04)
        off = [abs(angles.share(bits, n) - 0.04) for n in (tables - 1, tables, tables + 1)]
        assert off[1] == min(off)
