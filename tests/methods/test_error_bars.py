"""Error bars and `redo`, of every method that samples keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.methods import error_bars
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.kascade import Kascade
from longreach.methods.loki import Loki
from longreach.methods.magicpig import MagicPIG
from longreach.methods.oracle_sampling import OracleSampling
from longreach.methods.oracle_top_k import OracleTopK
from longreach.ops import Lists, Partial, Spans
from longreach.runtime.counting import Counting
from tests.methods.drive import HEADS, KV_HEADS, Turn, exact, in_phase, new_cache, run, text
from tests.methods.metered import passes_of

PIG: dict[str, Any] = {"bits": 4, "tables": 9, "local": 8, "seal": 8, "centre": 16, "dense_layers": ()}
SAMPLING = [
    MagicPIG(**PIG), MagicPIG(**PIG, share="own"), MagicPIG(**PIG, capacity=12), OracleSampling(k=0.3),
    OracleSampling(k=0.2, draw="systematic"), OracleTopK(k=0.2, choose="sample"),
    OracleTopK(k=0.2, choose="sample", heads="all"), Loki(k=0.2, choose="sample"),
    Kascade(k=0.2, min_keys=4, choose="sample"), Kascade(k=0.2, min_keys=4, choose="sample", heads="all"),
    Kascade(k=0.2, min_keys=4, choose="sample", scoring="int8", dense_layers=(1,)),
]  # fmt: skip
each = pytest.mark.parametrize("method", SAMPLING, ids=repr)
LENGTHS = (90, 3, 70)


def decode(method: Any) -> list[tuple[LayerCall, Outcome]]:
    """The layers of a decode step of sequences of LENGTHS, one of them shorter than any sample."""
    texts = [text(n + 1, seed=n) for n in LENGTHS]
    cache, reader = new_cache(slots=3), in_phase(method, "prefill")
    run(cache, reader, [Turn(x, slot, n) for slot, (x, n) in enumerate(zip(texts, LENGTHS, strict=True))])
    done = run(cache, method, [Turn(x, slot) for slot, x in enumerate(texts)])
    return list(zip(done.calls, done.outcomes, strict=True))


def columns_of(outcome: Outcome) -> dict[str, Tensor]:
    """fp64 [R, G] of each column of `error_bars`."""
    assert outcome.notes is not None
    found = outcome.notes.columns(*(x[None] for x in outcome.notes.tensors))[0]
    return dict(zip(error_bars.COLUMNS, found[..., -len(error_bars.COLUMNS) :].unbind(-1), strict=True))


def same(method: Any, a: Partial, b: Partial) -> bool:
    """Bit by bit, but where another kernel computes a step without error bars."""
    off = 1e-6 if method.name == "magicpig" else 0.0
    return all(torch.allclose(x, y, rtol=0, atol=off) for x, y in ((a.out, b.out), (a.lse, b.lse)))


@each
def test_measuring_changes_nothing(method: Any) -> None:
    """Error bars alone, and a `redo` that no row exceeds, leave outputs as they are."""
    plain = decode(method)
    for how in ({"error_bars": True}, {"redo": 1e9}):
        for (_, want), (call, got) in zip(plain, decode(replace(method, **how)), strict=True):
            assert same(method, got.partial, want.partial) and got.dense_reason == want.dense_reason
            if got.dense_reason is None:
                assert got.notes is not None and not columns_of(got)["redone"].any()
                if "redo" in how:  # the dense pass reads nothing
                    assert not torch.tensor(passes_of(call, "value_bytes")[-1]).any()
            else:
                assert got.notes is None


@each
def test_redo_of_all_errors_is_dense(method: Any) -> None:
    # a few draws of few keys may all hit one of them, which shows no error
    some = [0, 2] if getattr(method, "draw", "") == "iid" else [0, 1, 2]
    for call, outcome in decode(replace(method, redo=0.0)):
        want = exact(call)
        torch.testing.assert_close(outcome.partial.out[some].double(), want.out[some], rtol=0, atol=1e-5)
        torch.testing.assert_close(outcome.partial.lse[some].double(), want.lse[some], rtol=0, atol=1e-5)


@each
def test_redo_of_some(method: Any) -> None:
    """KV heads above the threshold are dense, all others are what they were; both are counted as such."""
    plain, dense = decode(replace(method, error_bars=True)), decode(replace(method, redo=0.0))
    errors = torch.cat(
        [x[x > 0] for _, o in plain if o.dense_reason is None for x in [columns_of(o)["relative_error"]]]
    )
    several = decode(replace(method, redo=float(errors.median())))
    some = all_ = 0
    for (_, before), (_, whole), (call, after) in zip(plain, dense, several, strict=True):
        if after.dense_reason is not None:
            continue
        redone = columns_of(after)["redone"].bool()
        heads = redone.repeat_interleave(HEADS // KV_HEADS, 1)
        for name in ("out", "lse"):
            got, kept, full = (getattr(o.partial, name) for o in (after, before, whole))
            assert torch.equal(got[~heads], kept[~heads])
            torch.testing.assert_close(got[heads], full[heads])
        assert torch.equal(columns_of(after)["relative_error"], columns_of(before)["relative_error"])
        read = torch.tensor(passes_of(call, "value_bytes")[-1])
        assert torch.equal(read, torch.where(redone, call.context[:, None], 0))
        keys = passes_of(call, "key_bytes")
        assert keys[-1] == read.tolist()
        lists = next(x for x in reversed(call.meter.values) if isinstance(x, Lists))
        assert keys[-2] == passes_of(call, "value_bytes")[-2] == lists.keys_read(call.rows, call.kv).tolist()
        values = outcome_values(after, len(LENGTHS))
        assert values["redone"] == redone.double().mean(0).tolist() if method.name != "magicpig" else True
        some, all_ = some + int(redone.sum()), all_ + redone.numel()
    assert 0 < some < all_


@each
def test_a_kv_head_is_redone_for_one_of_its_query_heads(method: Any) -> None:
    """Between the errors of a KV head's two query heads, one exceeds `redo` and the other does not."""
    plain = decode(replace(method, error_bars=True))
    errors = {n: o.relative_error for n, (_, o) in enumerate(plain) if o.relative_error is not None}
    pairs = torch.cat([error.unflatten(1, (KV_HEADS, 2)).flatten(0, 1) for error in errors.values()])
    redo = float(pairs[(pairs[:, 0] - pairs[:, 1]).abs().argmax()].mean())
    mixed = 0
    for n, (_, after) in enumerate(decode(replace(method, redo=redo))):
        assert (after.relative_error is None) == (n not in errors) == (after.dense_reason is not None)
        if after.relative_error is None:
            continue
        assert torch.equal(after.relative_error, errors[n])
        above = (errors[n] > redo).unflatten(1, (KV_HEADS, 2)).sum(2)
        want = [[float(count > 0) for count in row] for row in above.tolist()]
        redone = columns_of(after)["redone"]
        if method.name == "magicpig":  # the short sequence has no keys in the tables and is in no column
            assert not above[1].any() and not redone[1].any()
        assert redone.tolist() == want
        mixed += int((above == 1).sum())
    assert mixed


def outcome_values(outcome: Outcome, rows: int) -> dict[str, Any]:
    """The report's values of one layer and step."""
    assert outcome.notes is not None
    return outcome.notes.summary(outcome.notes.columns(*(x[None] for x in outcome.notes.tensors)).sum(1)[0], rows)


@each
def test_the_report_of_a_layer(method: Any) -> None:
    for call, outcome in decode(replace(method, redo=0.3)):
        if outcome.dense_reason is not None:
            continue
        values, found = outcome_values(outcome, 3), columns_of(outcome)
        counts = found["rows"].sum(0)
        assert values["redone"] == pytest.approx((found["redone"].sum(0) / counts).tolist())
        assert values["relative_error"] == pytest.approx((found["relative_error"].sum(0) / counts).tolist())
        assert f"relative error {sum(values['relative_error']) / 2:.1%}" in values["note"]
        if method.name == "magicpig":
            assert counts.tolist() == [2, 2]  # the short sequence has no keys in the tables
            keys = sum(sum(sum(x) for x in passes_of(call, name)[-2]) for name in ("key_bytes", "value_bytes"))
            assert values["error_bar_bytes"] >= keys * 16 * 4
        else:
            assert counts.tolist() == [3, 3]


def test_an_overflow_has_no_error() -> None:
    method = MagicPIG(bits=1, tables=30, local=8, seal=8, centre=16, capacity=5, dense_layers=(), redo=0.0)
    for call, outcome in decode(method):
        assert not columns_of(outcome)["relative_error"].any() and not columns_of(outcome)["redone"].any()
        assert not torch.tensor(passes_of(call, "value_bytes")[-1]).any()


@pytest.mark.parametrize(
    "method",
    [
        MagicPIG(**{**PIG, "bits": 16, "tables": 2}), Loki(k=1, choose="sample"),
        Kascade(k=1, choose="sample", heads="all"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_sample_of_nothing_is_no_certainty(method: Any) -> None:
    """Where none of many keys is sampled the estimate would be 0; the error is unknown, and counts as 1."""
    unknown = 0
    for how, redone in (({"error_bars": True}, 0), ({"redo": 1.0}, 0), ({"redo": 0.99}, 1)):
        for call, outcome in decode(replace(method, **how)):
            if outcome.dense_reason is None:
                found = columns_of(outcome)
                whole = found["relative_error"] == 1.0  # of both query heads
                assert torch.equal(found["redone"][whole], torch.full_like(found["redone"][whole], redone))
                assert method.name != "magicpig" or not whole[1].any(), "it attends to all of a short sequence"
                unknown += int(whole.sum())
                if redone:
                    want = exact(call).out.unflatten(1, (KV_HEADS, -1))[whole]
                    got = outcome.partial.out.double().unflatten(1, (KV_HEADS, -1))[whole]
                    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert unknown > 10


def test_bad_values_stay_in_their_rows() -> None:
    """NaN in the values of one sequence: its error is not a number and left out of the mean; others are as before."""
    method = MagicPIG(**PIG, redo=0.3)
    texts = [text(71, seed=n) for n in (1, 2)]

    def step(bad: bool) -> list[Outcome]:
        cache = new_cache(slots=2)
        run(cache, in_phase(method, "prefill"), [Turn(x, slot, 70) for slot, x in enumerate(texts)])

        def spoil(call: LayerCall) -> None:
            if bad:
                call.kv.v[1] = torch.nan

        return run(cache, method, [Turn(x, slot) for slot, x in enumerate(texts)], before=spoil).outcomes

    for good, spoilt in zip(step(False), step(True), strict=True):
        assert torch.equal(spoilt.partial.out[0], good.partial.out[0])
        assert spoilt.partial.out[1].isnan().all()
        found, want = columns_of(spoilt), columns_of(good)
        assert torch.equal(found["relative_error"][0], want["relative_error"][0])
        assert not found["finite"][1].any() and not found["redone"][1].any()
        values = outcome_values(spoilt, 2)
        assert values["relative_error"] == pytest.approx(want["relative_error"][0].tolist())


def test_reads_that_follow_lengths() -> None:
    """How many rows are redone depends on keys, so no dry run can count them."""
    for method in SAMPLING:
        assert not replace(method, redo=0.1).reads_follow_lengths
        assert replace(method, error_bars=True).reads_follow_lengths == method.reads_follow_lengths


def test_bytes_of_a_step() -> None:
    """What the ledger adds up is what the passes read: with redo=0, all keys in addition to the sampled ones twice."""
    for call, outcome in decode(OracleTopK(k=0.2, choose="sample", redo=0.0)):
        counting = Counting()
        counting.add("layer", call.meter.noted, call, Spans.dense())
        (found,) = counting.columns({})[1].tolist()
        lists = torch.tensor(passes_of(call, "value_bytes")).sum()
        redone = columns_of(outcome)["redone"]
        assert found[1] == int(lists) * 16 * 4
        assert torch.equal(torch.tensor(passes_of(call, "value_bytes")[-1]), (redone * call.context[:, None]).long())
