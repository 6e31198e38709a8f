"""What MAC says of itself in a report, against what it is spelled out to do."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.methods.mac import MAC
from longreach.methods.mac.diagnostics import AT, columns, summary
from longreach.ops import Spans
from longreach.ops.match import NOTES
from longreach.runtime import Ledger
from tests.methods.drive import HEADS, KV_HEADS, LAYERS, Turn, exact, in_phase, new_cache, run, shares, text
from tests.methods.mac.spelled_out import SpelledOut
from tests.methods.metered import passes_of

DENSE = Spans.dense()
METHOD = MAC(window=12, band=3, tau=0.1, min_context=0, max_reuse_depth=4, rest_rows=None, sinks=2, probe_every=3)


def reported(method: MAC, steps: int = 30, first: int = 25) -> tuple[list[dict[str, Any]], list[Any]]:
    """What the report says of each layer, and the passes."""
    cache, whole, ledger, passes = new_cache(), text(first + steps, seed=1).to(torch.float64), Ledger(), []
    run(cache, in_phase(method, "prefill"), [Turn(whole, 0, first)])
    for _ in range(steps):
        turn = run(cache, method, [Turn(whole, 0)])
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            ledger.add("decode", call, method.name, outcome, DENSE)
        ledger.commit()
        passes.append(turn)
    found = [layer.notes for layer in ledger.report().layers]
    assert all(found)
    json.dumps(found)
    return found, passes  # type: ignore[return-value]


def test_the_report_is_what_happened() -> None:
    """Every number of each layer and head, counted again by hand over 30 steps."""
    steps, first = 30, 25
    found, _ = reported(METHOD, steps, first)
    spelled, whole = SpelledOut(METHOD, 8), text(first + steps, seed=1).to(torch.float64)
    spelled.read(0, whole, 0, first)
    rows: list[list[dict[str, Any]]] = [[] for _ in range(LAYERS)]
    for number, brute in enumerate(spelled.layers):
        plain = brute.row

        def note(*given: Any, number: int = number, plain: Any = plain) -> dict[str, Any]:
            rows[number].append(plain(*given))
            return rows[number][-1]

        brute.row = note  # type: ignore[method-assign]
    for pos in range(first, first + steps):
        spelled.decode(0, whole, pos)
    for layer, said in enumerate(found):
        mine = rows[layer]
        for h in range(HEADS):
            g, group = h // 2, slice(h // 2 * 2, h // 2 * 2 + 2)
            accepted = [r["found"][h] is not None for r in mine]
            reused = [r["take"][h] is not None for r in mine]
            gaps = [first + i - r["found"][h] for i, r in enumerate(mine) if accepted[i]]
            starts = [r["start"] for r in mine]
            context = range(first + 1, first + steps + 1)
            skipped = [(s[h] - 2) / n if ok else 0.0 for s, n, ok in zip(starts, context, reused, strict=True)]
            want = {
                "searched": sum(r["searched"][g] for r in mine) / steps,
                "acceptance": sum(accepted) / steps,
                "reuse": sum(reused) / steps,
                "skipped": sum(skipped) / steps,
                "gap": sum(gaps) / len(gaps),
                "head_keys": sum(n - s[h] + 2 for s, n in zip(starts, context, strict=True)) / steps,
                "stream_keys": sum(n - min(s[group]) + 2 for s, n in zip(starts, context, strict=True)) / steps,
                "resting": 0.0,
            }
            for name, value in want.items():
                assert said[name][h] == pytest.approx(value, rel=1e-6, abs=1e-7), (layer, h, name)
            depths = [r["depth"][h] for r in mine]
            assert said["depths"][h] == pytest.approx(
                [sum(low <= d < high for d in depths) / steps
                 for low, high in zip(said["depth_bins"], [*said["depth_bins"][1:], 99], strict=True)]
            )  # fmt: skip
            spread = [abs(r["found"][group][0] - r["found"][group][1]) / 2 for i, r in enumerate(mine) if reused[i]]
            if spread:
                assert said["gap_spread"][h] == pytest.approx(sum(spread) / len(spread), rel=1e-5)
    assert 0.1 < found[0]["reuse"][0] < 1 and found[0]["note"].startswith("reused ")


def test_band_mass_and_error_are_measured_where_they_can_be() -> None:
    """The weight on the band of rows that attend exactly; the distance from dense attention, every third token."""
    found, passes = reported(METHOD)
    for layer, said in enumerate(found):
        masses: list[list[float]] = [[] for _ in range(HEADS)]
        errors: list[list[float]] = [[] for _ in range(HEADS)]
        for turn in passes:
            call, outcome = turn.calls[layer], turn.outcomes[layer]
            pos, dense = int(call.rows.pos[0]), exact(call)
            reused = outcome.notes.tensors[1][0, :, 2]
            for h in range(HEADS):
                if not reused[h]:
                    masses[h].append(float(shares(call)[0, h, max(2, pos - 2) : pos + 1].sum()))
                if (pos + 1) % 3 == 0:
                    apart = outcome.partial.out[0, h].double() - dense.out[0, h]
                    errors[h].append(float(apart.norm() / dense.out[0, h].norm()))
        for h in range(HEADS):
            assert said["error"][h] == pytest.approx(sum(errors[h]) / len(errors[h]), rel=1e-5, abs=1e-12)
            if masses[h]:
                assert said["band_mass"][h] == pytest.approx(sum(masses[h]) / len(masses[h]), rel=1e-5)
        assert max(said["error"]) > 1e-3


def test_a_row_whose_query_was_nan_has_no_part_in_the_mass() -> None:
    whole = torch.tensor([[[0.0, 0.0], [torch.nan, 0.0], [0.0, 0.0]]])  # three rows, two heads
    before = torch.tensor([[[-1.0, -torch.inf], [-1.0, -2.0], [-3.0, -1.0]]])
    notes = torch.zeros(1, 3, 2, len(NOTES))
    notes[0, 2, 1, AT["reused"]] = 1.0
    found = columns(notes, whole, before).sum(1, dtype=torch.float64)[0]
    said = summary(found, 3, ring_bytes=1, band=3)
    one, other = ((1 - math.exp(-1)) + (1 - math.exp(-3))) / 2, (1.0 + (1 - math.exp(-2))) / 2
    assert said["band_mass"] == [pytest.approx(one), pytest.approx(other)]
    assert said["error"] == [None, None] and "NaN" not in json.dumps(said)


def test_nothing_to_measure_is_none() -> None:
    found, _ = reported(replace(METHOD, tau=0.999, probe_every=0), steps=2)
    for said in found:
        assert said["reuse"] == [0.0] * HEADS and said["acceptance"] == [0.0] * HEADS
        assert said["gap"] == said["gap_spread"] == said["error"] == [None] * HEADS
        assert said["band"] == 3 and all(0 < x < 1 for x in said["band_mass"])
    found, _ = reported(replace(METHOD, min_context=1000), steps=2)
    assert found[0]["searched"] == [0.0] * HEADS and found[0]["acceptance"] == [None] * HEADS


def test_a_guard_that_keeps_rows_from_searching_is_told() -> None:
    found, passes = reported(replace(METHOD, tau=0.9, rest_rows=5, sinks=0, probe_every=0), steps=40)
    for said in found:
        # 17 searches in vain, then one in six
        assert (
            said["resting"] == [pytest.approx(20 / 40)] * HEADS and said["searched"] == [pytest.approx(20 / 40)] * HEADS
        )
        assert "rested 50.0%" in said["note"]
    streams = [passes_of(turn.calls[0], "key_bytes") for turn in passes]
    assert streams == [[[[26 + n] * KV_HEADS]] for n in range(40)]
    counted = [turn.calls[0].meter.noted[-1].read.counted for turn in passes]
    assert [None if x is None else x.tolist() for x in counted] == [[[26 + n] * KV_HEADS] for n in range(40)]


def test_bytes_of_a_ring() -> None:
    found, _ = reported(METHOD, steps=1)
    rows = 12 + 8  # fp64: query, entry, lse; stamp; depth; account
    want = rows * (HEADS * (16 * 8 + 16 * 8 + 8 + 2) + 4 + KV_HEADS * 8) + KV_HEADS * 4
    assert found[0]["ring_bytes_per_sequence"] == want
