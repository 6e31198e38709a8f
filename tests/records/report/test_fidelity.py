"""KL, first divergence and layer errors say what the record holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longreach.records.report import fidelity as module
from longreach.records.report.blocks import Figure, Table
from longreach.records.report.fidelity import fidelity
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of

LABEL = "streaming_llm window=0.1"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    monkeypatch.setattr(module, "curves", lambda panels: calls.update(curves=panels) or b"png")
    monkeypatch.setattr(module, "maps", lambda *a: calls.update(maps=a) or b"png")
    return calls


def test_numbers_are_the_records(drawn: dict[str, Any]) -> None:
    content = factory.fidelity(layers=2, heads=2, steps=4)
    content["results"][LABEL].update(kl=0.125, kl_steps=[0.5, 0.0, None, 1e-9], first_divergence=1)
    content["results"][LABEL]["layer_error"] = {"mean": [[0.1, 0.2], [0.3, 0.4]], "max": [[0.5, 0.25], [0.75, 0.5]]}
    found = fidelity(record_of(content), "fid")
    rows = cells(only(found, Table, "Fidelity"))
    assert rows[f"2 {LABEL}"] == ["0.125", "1", "0.25", "0.75", "layer 1, head 0", "100.0%", "25.0%", "1.00 s",
                                "10.00 ms"]  # fmt: skip
    assert rows["1 dense"][:3] == ["0", "none in 4", "0"] and rows["1 dense"][4] == "-"
    assert [b.file for b in found if isinstance(b, Figure)] == ["fid-kl.png", "fid-layer-error.png"]
    ((panel,),) = [drawn["curves"]]
    first = panel.series[0]
    assert (first.label, first.mark, first.x) == (LABEL, 1, (0.0, 1.0, 2.0, 3.0)) and panel.log
    assert first.y[:2] == (0.5, 1e-7) and math.isnan(first.y[2]) and first.y[3] == 1e-7
    assert not any(s.dense for s in panel.series)
    panels, xlabel, ylabel, scale = drawn["maps"]
    assert (xlabel, ylabel) == ("head", "layer") and scale.high == 0.4 and scale.low == 0
    assert panels[0].title == f"2 {LABEL}" and panels[0].values == ((0.1, 0.2), (0.3, 0.4))
    assert len(panels) == 2  # dense is no method to be measured against itself


def test_errors_of_the_prompt_stand_apart(drawn: dict[str, Any]) -> None:
    content = factory.fidelity(layers=2, heads=2)
    error = {"mean": [[0.1, 0.2], [0.3, 0.4]], "max": [[0.5, 0.25], [0.75, 0.5]], "rows": 60}
    for label, result in content["results"].items():
        result["prefill_layer_error"] = error if label == LABEL else None
    found = fidelity(record_of(content), "fid")
    assert cells(only(found, Table, "Errors of the prompt")) == {
        f"2 {LABEL}": ["60", "0.25", "0.75", "layer 1, head 0"]
    }
    assert [b.file for b in found if isinstance(b, Figure)][-1] == "fid-layer-error-prefill.png"
    panels, _, _, scale = drawn["maps"]  # drawn last
    assert [p.title for p in panels] == [f"2 {LABEL}"] and scale.high == 0.4


def test_what_is_not_there_is_left_out(drawn: dict[str, Any]) -> None:
    content = factory.fidelity()
    for result in content["results"].values():
        result.update(layer_error=None, kl=None, kl_steps=[], decode_reads=None)
    found = fidelity(record_of(content), "fid")
    assert cells(only(found, Table))[f"2 {LABEL}"] == ["-", "3", "-", "-", "-", "100.0%", "-", "1.00 s",
                                                                "10.00 ms"]  # fmt: skip
    assert not drawn and not any(isinstance(b, Figure) for b in found)


def test_broken_outputs_are_the_worst_and_leave_gaps(drawn: dict[str, Any]) -> None:
    content = factory.fidelity(layers=2, heads=2)
    error = content["results"][LABEL]["layer_error"]
    error["mean"][1][1] = error["max"][1][1] = math.nan
    rows = cells(only(fidelity(record_of(content), "fid"), Table))
    assert rows[f"2 {LABEL}"][3:5] == ["nan", "layer 1, head 1"]
    assert drawn["maps"][0][0].values[1][1] is None
