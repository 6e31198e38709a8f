"""Tables, times and shares, progress."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from longreach.cli import show
from longreach.cli.show import Column, Table, console, duration, fitted, percent, show_plans, size
from longreach.runtime import PlanReport

COLUMNS = [Column("name", 12, left=True), Column("bytes", 7), Column("K", 30, wide=True), Column("time", 8)]


def lines(width: int, *rows: list[str | Text]) -> list[str]:
    stream = io.StringIO()
    table = Table(Console(file=stream, width=width, highlight=False), COLUMNS)
    table.header()
    for row in rows:
        table.row(row)
    return stream.getvalue().splitlines()


def test_columns_line_up_and_wide_ones_give_way() -> None:
    row: list[str | Text] = ["dense", "100.0%", "50%", Text("1.0 s", "red")]
    wide, narrow = lines(80, row), lines(40, row)
    assert wide == [
        "name            bytes                               K      time",
        "dense          100.0%                             50%     1.0 s",
    ]
    assert narrow == ["name            bytes      time", "dense          100.0%     1.0 s"]


def test_the_gap_narrows_before_a_line_breaks_and_cells_are_cut_to_their_column() -> None:
    found = lines(29, ["a_name_much_too_long", "[b]", "", "1.0 s"])
    assert found == ["name           bytes     time", "a_name_muc..     [b]    1.0 s"]


@pytest.mark.parametrize(
    "seconds, text",
    [(None, "-"), (0.00042, "0.4 ms"), (0.0257, "26 ms"), (0.9994, "999 ms"), (4.13, "4.1 s"), (321.4, "321 s")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "text, shown",
    [
        ("4815162", "4815162"),
        ("48 15", "48 15  "),
        ("a\n b", "a b    "),
        ("\x1b[31m\x07", "?[31m? "),
        ("日本語日本語", "日本 .."),  # two columns each
    ],
)
def test_any_text_fits_its_cell(text: str, shown: str) -> None:
    assert fitted(text, 7) == shown and cell_len(shown) == 7


def test_shares() -> None:
    assert [percent(x) for x in (None, 0.0, 0.3014, 1.1)] == ["-", "0.0%", "30.1%", "110.0%"]


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of short work; one every ten seconds over all tasks; the last of a task that had some."""
    now = 100.0
    monkeypatch.setattr(show.time, "monotonic", lambda: now)
    monkeypatch.setattr(show, "log", show.Log())
    for what, steps, seconds in (("short", 3, 1.0), ("reading", 6, 4.0), ("one step", 1, 9.0), ("next", 2, 3.0)):
        with show.progress(what, steps) as advance:
            for _ in range(steps):
                now += seconds
                advance(1)
    with show.waiting("loading"):
        pass
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == ["reading 2/6", "reading 5/6", "reading 6/6", "next 1/2", "next 2/2"]


def test_without_a_standard_error_progress_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2>&- leaves Python none, and what is printed to none goes to standard output."""
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(show, "log", show.Log(every=0.0))
    with show.progress("reading", 1) as advance:
        advance(1)
    assert capsys.readouterr().out == ""


def test_progress_is_shown_on_a_terminal_and_leaves_standard_output_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with show.progress("reading", 3) as advance:
        advance(2)
        advance(1)
    out, err = capsys.readouterr()
    assert out == "" and "reading" in err and "3/3" in err


def test_sizes_fit_eight_characters() -> None:
    shown = {0: "0 B", 999: "999 B", 1000: "1 kB", 12345: "12.3 kB", 999_499: "999 kB", 999_600: "1 MB",
             3_120_000: "3.12 MB", 44_018_040: "44 MB", 16 * 10**12: "16 TB"}  # fmt: skip
    assert {number: size(number) for number in shown} == shown
    assert all(len(size(10**n - 1)) <= 8 for n in range(1, 17))


def test_each_plan_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Sessions that use the same plan differ in the time that hashing the weights took."""
    made = PlanReport("loki", "cache", "64 directions", file="loki.json", hash_seconds=1.0)
    show_plans(console(), [made, replace(made, hash_seconds=2.0), {"text": "kascade plan"}])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        shown.count("64 directions") == 1 and "hashing the weights took 1.00 s." in shown and "Kascade plan." in shown
    )
