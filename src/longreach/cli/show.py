"""What verbs show: tables that grow row by row, progress on stderr, times and shares, JSON on stdout."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from longreach.cache import MemoryUse


def emit(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, indent=1))


def console() -> Console:
    """Standard output, as wide as the terminal; text is shown as it is."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))  # rich would exit with 1; main handles it

    return Output(highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class Column:
    """A column of fixed width. wide: left out where the terminal is too narrow for all columns."""

    title: str
    width: int
    left: bool = False
    wide: bool = False


class Table:
    """A table whose rows are printed one by one as results come, so all widths are fixed beforehand."""

    def __init__(self, out: Console, columns: Sequence[Column]):
        self.out, self.columns = out, tuple(columns)
        gap, everything = 2, sum(c.width for c in columns) + 2 * (len(columns) - 1)
        self.shown = [everything <= out.width or not c.wide for c in columns]
        needed = sum(c.width + gap for c, shown in zip(columns, self.shown, strict=True) if shown) - gap
        self.gap = " " * (gap if needed <= out.width else 1)

    def header(self) -> None:
        """The line of titles."""
        self.row([c.title for c in self.columns], style="bold")

    def row(self, cells: Sequence[str | Text], style: str = "") -> None:
        """One line; a cell that is too long loses its end."""
        from rich.text import Text

        parts = []
        for column, cell, shown in zip(self.columns, cells, self.shown, strict=True):
            if not shown:
                continue
            text = Text(cell, style) if isinstance(cell, str) else cell.copy()
            if text.cell_len > column.width:
                text.truncate(column.width - 2)
                text.append("..")
            text.align("left" if column.left else "right", column.width)
            parts.append(text)
        line = Text(self.gap).join(parts)
        line.rstrip()
        self.out.print(line, soft_wrap=True)


class Log:
    """Progress in plain lines on stderr, for logs: one every `every` seconds, over all tasks, so short work has none.

    A task that has had a line has another when it is done.
    """

    def __init__(self, every: float = 10.0):
        self.every, self.told = every, time.monotonic()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """As the function of this name."""
        done, shown = 0, 0

        def advance(more: int) -> None:
            nonlocal done, shown
            done += more
            now = time.monotonic()
            due = now - self.told >= self.every or (shown and done >= total > shown)
            if due and sys.stderr is not None:  # closed it is None, which print takes for standard output
                print(f"{what} {done}/{total}", file=sys.stderr, flush=True)
                shown, self.told = done, now

        yield advance


log = Log()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress on stderr; yields advance(n). On a terminal a bar, gone when done, elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    if not errors.is_terminal:
        with log.progress(what, total) as advance:
            yield advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr for work whose length is not known, nothing where stderr is no terminal."""
    from rich.console import Console

    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield
        return
    with errors.status(what):
        yield


def fitted(text: str, width: int) -> str:
    """Text of any kind in exactly `width` columns: one line, nothing that a terminal would obey."""
    from rich.cells import cell_len, set_cell_size

    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return set_cell_size(line, width) if cell_len(line) <= width else set_cell_size(line, width - 2) + ".."


def duration(seconds: float | None) -> str:
    """A time in at most seven characters; "-" where there is none."""
    if seconds is None:
        return "-"
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def after_first_token(seconds: float | None, setup: float) -> str:
    """The end of a sentence about the first token: the time of a later one if one was timed, and of the setup."""
    text = "."
    if seconds is not None:
        text = f", then {duration(seconds)} a token."
    if setup:
        text += f" Setting up the decode step took {duration(setup)}."
    return text


def size(number: int) -> str:
    """Bytes in at most eight characters, in units of 1000."""
    if number < 1000:
        return f"{number} B"
    value, units = float(number), iter(("kB", "MB", "GB", "TB", "PB"))
    unit = ""
    while value >= 999.5:
        value, unit = value / 1000, next(units)
    return f"{value:.3g} {unit}"


def percent(share: float | None) -> str:
    """A share; "-" where there is none."""
    return "-" if share is None else f"{share:.1%}"


def show_shares(report: Any, methods: dict[str, str]) -> str:
    """A sentence: what was read over what dense attention reads; empty if nothing was. methods: phase -> its method."""
    fractions = {phase: report.fraction(phase) for phase in methods}
    observed = {name for layer in report.layers if layer.phase == "prefill" for name in layer.method.split("+")[1:]}
    readers = ["a plan" if name == "plan" else name for name in sorted(observed)]
    also = f", and what {' and '.join(readers)} needs of the prompt" if readers else ""
    named = {
        phase: name + _all_dense(report, phase) + (also if phase == "prefill" else "")
        for phase, name in methods.items()
    }
    shares = [f"{percent(x)} in {phase} ({named[phase]})" for phase, x in fractions.items() if x is not None]
    return f"Read {' and '.join(shares)} of the bytes that dense attention reads. " if shares else ""


def _all_dense(report: Any, phase: str) -> str:
    """Why a phase attended densely, if all its layers did, for the same reasons."""
    found = {" ".join(layer.dense_notes) for layer in report.layers if layer.phase == phase}
    note = found.pop() if len(found) == 1 else ""
    return f", {note}" if note.startswith("dense: ") else ""


def show_memory(out: Console, found: Iterable[MemoryUse | None]) -> None:
    """Where keys and values lay, a paragraph for each way; nothing if none were in host memory."""
    for text in dict.fromkeys(str(memory) for memory in found if memory is not None):
        out.print(f"\n{text[0].upper()}{text[1:]}.")


def show_plans(out: Console, plans: Iterable[Any]) -> None:
    """The plans that sessions found or made themselves, a line each: reports, or a record's entries."""
    shown: dict[str, str] = {}
    for plan in plans:
        text, same = (
            (plan["text"],) * 2 if isinstance(plan, dict) else (str(plan), str(replace(plan, hash_seconds=None)))
        )
        shown.setdefault(same, text)  # sessions that use the same plan differ in the time of hashing
    for text in shown.values():
        out.print(f"\n{text[0].upper()}{text[1:]}.")


def place(where: dict[str, Any]) -> str:
    """Where numbers come from, in a sentence. where: what `records.environment` found."""
    device, versions = where["device"], where["versions"]
    threads = f" ({device['threads']} threads)" if device["type"] == "cpu" else ""
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    return f"Measured just now on this machine: {device['name']}{threads}, {packages}."
