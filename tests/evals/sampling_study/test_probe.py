"""Methods that the study runs on the last rows: errors, reads and controls against fp64 by loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.evals.sampling_study.exact import Exact
from longreach.evals.sampling_study.panel import GROUP, OWN, Trial, Tried, fitting, magicpig, own_call, state_of
from longreach.evals.sampling_study.probe import SamplingProbe
from longreach.methods.base import Outcome
from longreach.methods.loki import Loki
from longreach.methods.magicpig import MagicPIG
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.quest import Quest
from longreach.ops import Lists, Spans
from tests.evals.sampling_study.small import HEADS, KEYS, KV_HEADS, ROWS, SHAPE, call, weights

METHOD = magicpig(4, 20, 64, 3)
LABEL = "magicpig bits=4 tables=20 share=group"
TRIALS = [
    Trial("own", OWN, MagicPIG(4, 20, share="own", centre=64, capacity=1.0, seed=3, dense_layers=())),
    Trial(LABEL, GROUP, METHOD),
    Trial("bare", "magicpig, no weights", METHOD, weights=False),
    Trial("top", "oracle_top_k", OracleTopK(k=0.1)),
    Trial("quest", "quest", Quest(k=0.2, dense_layers=())),
]


def measured(trials: list[Trial] = TRIALS, **terms: Any) -> tuple[SamplingProbe, dict[str, Any]]:
    made = call(**terms)
    probe = SamplingProbe(SHAPE, trials, 0, lambda done: None)
    probe.begin(KEYS - ROWS, KEYS)
    probe("prefill", made, Outcome(made.attend(Spans.dense())))
    probe.finish()
    return probe, probe.results()


def weighted(row: int, head: int, keys: Tensor, log_weight: Tensor | float) -> float:
    """The error of softmax over these keys, in fp64."""
    share, v, _ = weights(call(), row, head)
    w = share[keys] * torch.as_tensor(log_weight, dtype=torch.float64).exp()
    out = (w[:, None] * v[keys]).sum(0) / w.sum()
    return float((out - share @ v).norm() / (share @ v).norm())


def test_errors_and_bytes_of_top_k() -> None:
    _, results = measured()
    top = results["methods"]["top"]
    wanted = torch.zeros(HEADS, dtype=torch.float64)
    for row in range(ROWS):
        for head in range(HEADS):
            group = [weights(call(), row, h)[0] for h in range(head // 2 * 2, head // 2 * 2 + 2)]
            best = (group[0] + group[1]).argsort(descending=True)[: -(-len(group[0]) // 10)]
            wanted[head] += weighted(row, head, best, 0.0) / ROWS
    assert top["errors"] == [pytest.approx(wanted.tolist(), rel=1e-3)]
    assert top["mean"] == pytest.approx(float(wanted.mean()), rel=1e-3)
    assert 2 * top["reads"]["values"] == pytest.approx(0.1, abs=1 / KEYS)
    assert top["reads"]["keys"] > 0.5  # all keys are read for the scores
    assert top["layer_reads"] == [pytest.approx(top["reads"]["total"])]


@pytest.mark.parametrize("trial", TRIALS[:3], ids=lambda t: t.label)
def test_magicpig_with_and_without_weights(trial: Trial) -> None:
    made = own_call(call(), {})
    exact = Exact.of(made)
    tried = Tried(1)
    spans, lists = tried.run(trial, made, exact, state_of(trial.method, made))
    assert isinstance(spans, Spans) and isinstance(lists, Lists) and lists.log_weight is not None
    assert trial.weights == bool(lists.log_weight[0, 0, : int(lists.count[0, 0])].any())
    certain = spans.mask(made.rows, made.kv, KEYS)
    for row in range(ROWS):
        for head in range(HEADS):
            place = head if lists.per == "query" else head // (HEADS // KV_HEADS)
            used = int(lists.count[row, place])
            assert used > 0
            always = certain[row, 0].nonzero().flatten()
            keys = torch.cat([always, lists.index[row, place, :used].long()])
            assert len(keys.unique()) == len(keys)
            log_weight = torch.cat([torch.zeros(len(always)), lists.log_weight[row, place, :used]]).double()
            found = float(tried.errors[0][0][row, head])
            assert found == pytest.approx(weighted(row, head, keys, log_weight), rel=1e-3)


def test_the_tables_hold_the_keys_before_the_rows_and_reads_are_apart() -> None:
    made = own_call(call(), {})
    state: Any = state_of(METHOD, made)
    stop = int(METHOD.schedule.stop(torch.tensor(KEYS - ROWS), made.layer))
    assert int(state.tables.stop[0]) == stop > 64
    _, results = measured()
    mine = results["methods"][LABEL]
    assert mine["search"] + mine["attention"] == pytest.approx(mine["reads"]["total"], rel=1e-6)
    assert mine["attention"] > mine["reads"]["values"] * 2
    assert len(mine["sampled_head"][0]) == KV_HEADS and mine["sampled_head"][0][0] < mine["sampled_group"][0][0] < 1
    assert 0.3125 < mine["table_share"] < 0.4 and mine["method"]["bits"] == 4
    bare = results["methods"]["bare"]
    assert bare["reads"]["values"] == mine["reads"]["values"] and bare["mean"] != mine["mean"]


def test_top_k_in_place_of_the_sample() -> None:
    """With the same exact part, and by choice of the best, as many keys hold no less weight: less error in the mean
    than without weights."""
    _, results = measured()
    same, place = (results[name][LABEL]["mean"] for name in ("top_k_same_keys", "top_k_in_place"))
    assert same <= place < results["methods"]["bare"]["mean"]


def test_states_of_other_methods_are_made_of_all_keys_before_the_rows() -> None:
    """As by a prompt that the method observed in chunks."""
    made = own_call(call(), {})
    whole: Any = state_of(Quest(dense_layers=()), made)
    k = made.kv.k[0, :, : KEYS - ROWS]
    blocks = (KEYS - ROWS) // 16
    for name, wanted in (("low", k.unflatten(1, (-1, 1)).squeeze(2)), ("high", k)):
        least = torch.stack([getattr(wanted[:, n * 16 : n * 16 + 16], "amin" if name == "low" else "amax")(1)
                             for n in range(blocks)], 1)  # fmt: skip
        torch.testing.assert_close(whole[name][0, :, :blocks], least)


def test_rows_before_the_measured_ones_are_left_alone() -> None:
    made, probe = call(), SamplingProbe(SHAPE, TRIALS, 0, lambda done: None)
    probe.begin(KEYS - 1, KEYS)
    probe("prefill", made, Outcome(made.attend(Spans.dense())))
    assert probe.tried["top"].errors == [[]]


def test_layers_with_a_window_are_left_out() -> None:
    made, probe = call(), SamplingProbe(SHAPE, TRIALS, 0, lambda done: None)
    probe.begin(KEYS - ROWS, KEYS)
    probe("prefill", made, Outcome(made.attend(Spans.window(32))))
    assert probe.windows == [32] and probe.tried["top"].errors == [[]] and probe.geometry.first == [[]]


def test_soft_caps_and_virtual_sinks() -> None:
    for terms in ({"softcap": 3.0}, {"sink_logit": torch.tensor([1.0, 2.0, 0.0, 3.0])}):
        made = own_call(call(**terms), {})
        for trial in TRIALS:
            tried = Tried(1)
            tried.run(trial, made, Exact.of(made), state_of(trial.method, made))
            assert tried.errors[0][0].isfinite().all() and float(tried.errors[0][0].mean()) < 1
        everything = Trial("all", "magicpig", MagicPIG(bits=0))
        tried = Tried(1)
        tried.run(everything, made, Exact.of(made), state_of(everything.method, made))
        assert float(tried.errors[0][0].max()) < 1e-5


def test_a_method_without_a_plan_is_named() -> None:
    fit, left_out = fitting([*TRIALS, Trial("loki", "loki", Loki())], SHAPE)
    assert [t.label for t in fit] == [t.label for t in TRIALS]
    assert list(left_out) == ["loki"] and "calibrate loki" in left_out["loki"]
