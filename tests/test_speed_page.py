"""What docs/speed.md says outside its tables is in the records."""

from __future__ import annotations

from statistics import median

from tests.doc_tables import ROOT, record

WORDS = " ".join((ROOT / "docs" / "speed.md").read_text().split())


def test_what_attaching_costs_on_a_cpu() -> None:
    found = record("cpu-attached")
    short, long = found["cases"]
    assert (short["length"], long["length"]) == (2048, 4096) and not found["dirty"]
    assert found["device"]["name"].startswith("AMD EPYC") and found["device"]["threads"] == 2
    for text in (
        f"first token takes {short['ratios']['prefill']:.2f}x at 2K tokens and {long['ratios']['prefill']:.2f}x at 4K",
        "takes {:.1f} ms instead of {:.1f} at 2K ({:.2f}x".format(*step(short)),
        "{:.1f} instead of {:.1f} at 4K ({:.2f}x)".format(*step(long)),
    ):
        assert text in WORDS, text


def step(case: dict) -> tuple[float, float, float]:  # type: ignore[type-arg]
    """Milliseconds of a token attached and plain, and the ratio."""
    mine, plain = (1e3 * median(case["seconds"]["step"][way]) for way in ("attached", "plain"))
    return mine, plain, case["ratios"]["step"]
