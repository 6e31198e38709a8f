"""The picture of a training: losses over tokens seen, the lengths of sequences behind them, accuracy below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from longreach.records.report.plots.style import figure, legend, look, name, png, style
from longreach.train.mini.card.inputs import TrainingRun

BANDS = ("#ffffff", "#eef2f6")
RUN = "#B22222"
POINTS = 120  # a curve of more is drawn as medians of neighbours, its points faint behind it
NARROW = 0.025  # of the picture's width: a band narrower than that holds no words


def loss_png(runs: Sequence[TrainingRun]) -> bytes:
    """PNG: answer and text loss of all runs, on a log scale; below, accuracy by length or task, where logs have any."""
    points = [point for run in runs for point in run.curve]
    last = max(points[-1]["tokens"], runs[-1].ended.tokens)
    unit, scale = ("G", 1e9) if last >= 1e9 else ("M", 1e6)
    lines = accuracies(runs)
    with style():
        made = figure(8.6, 5.9 + 0.22 * (len(lines) // 4) if lines else 3.4)
        grid = made.subplots(2 if lines else 1, 1, squeeze=False, sharex=True, height_ratios=[3, 2] if lines else [1])
        top = grid[0, 0]
        top.set(yscale="log", ylabel="loss (nats a token)")
        top.set_title("Loss of training batches; above it, tokens of the longest sequences", pad=17)
        top.yaxis.set_major_formatter(lambda value, _: f"{value:.10f}".rstrip("0").rstrip("."))  # no formula
        top.yaxis.set_minor_formatter(lambda value, _: "")
        for number, (field, label) in enumerate((("answer", "answer tokens"), ("text", "tokens of plain text")), 1):
            there = [point for point in points if field in point]
            x, y = [p["tokens"] / scale for p in there], [p[field] for p in there]
            color = look(number, False)["color"]
            if len(there) > POINTS:
                top.plot(x, y, color=color, linewidth=0.5, alpha=0.25)
                y = medians(y, len(y) // POINTS * 2 + 1)
            top.plot(x, y, color=color, linewidth=1.5, label=label)
        top.legend(loc="upper right", framealpha=0.9, frameon=True, edgecolor="none")
        handles = []
        for number, (_, xs, ys) in enumerate(lines, 1):
            drawn = look(number, False)
            few = {"marker": drawn["marker"], "markersize": 3.5} if len(xs) <= POINTS // 2 else {}
            drawn = {"color": drawn["color"], "linestyle": drawn["linestyle"], "linewidth": 1.3, **few}
            handles += grid[1, 0].plot([x / scale for x in xs], ys, alpha=0.9, clip_on=False, **drawn)
        if lines:
            grid[1, 0].set(ylim=(-0.03, 1.03), ylabel=_measure(runs))
            grid[1, 0].set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
            legend(made, handles, [name(label) for label, _, _ in lines])
        for axes in grid.flat:
            _bands(axes, points, scale, last, told=axes is top)
            for number, run in enumerate(runs[1:], 2):
                axes.axvline(run.begun.tokens / scale, color=RUN, linewidth=1, linestyle="--")
                if axes is top:
                    axes.annotate(f"run {number}", (run.begun.tokens / scale, 0.02), (3, 0), color=RUN, size=8,
                                  xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
            axes.set_xlim(0, last / scale)
        grid[-1, 0].set_xlabel(f"tokens seen ({unit})")
        return png(made)


def medians(values: Sequence[float], width: int) -> list[float]:
    """Of up to `width` neighbours around each value."""
    half = width // 2
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def accuracies(runs: Sequence[TrainingRun]) -> list[tuple[str, list[int], list[float]]]:
    """(what, tokens, shares) of each line: exact answers by length or by task (mean over lengths), else right answer
    tokens by task of the batches trained with."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    exact = any(run.content.get("dev") for run in runs)
    for run in runs:
        for point in run.content.get("dev", []) if exact else run.curve:
            for what, share in _shares(point["exact"] if exact else point.get("forms", {})):
                xs, ys = lines.setdefault(what, ([], []))
                xs.append(point["tokens"])
                ys.append(share)
    return [(what, xs, ys) for what, (xs, ys) in lines.items()]


def _shares(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for what, share in found.items():
        if isinstance(share, dict):
            if share:
                yield what, sum(share.values()) / len(share)
        else:
            yield f"{what} tokens" if what.isdecimal() else what, share


def _measure(runs: Sequence[TrainingRun]) -> str:
    return "exact answers" if any(run.content.get("dev") for run in runs) else "right answer tokens"


def bands(points: Sequence[dict[str, Any]], last: int) -> list[tuple[int, int, int]]:
    """(from, to, length): stretches of tokens seen in which the longest sequences had one length."""
    found: list[tuple[int, int, int]] = []
    begun = 0
    for point in points:
        length = max(point["lengths"])
        if found and found[-1][2] == length:
            found[-1] = (found[-1][0], point["tokens"], length)
        else:
            found.append((begun, point["tokens"], length))
        begun = point["tokens"]
    return [*found[:-1], (found[-1][0], last, found[-1][2])]


def _bands(axes: Any, points: Sequence[dict[str, Any]], scale: float, last: int, told: bool) -> None:
    stretches = bands(points, last)
    for number, (start, stop, length) in enumerate(stretches):
        axes.axvspan(start / scale, stop / scale, color=BANDS[number % 2], zorder=0, linewidth=0)
        if told and stop - start > NARROW * last:
            text = f"{length // 1024}K" if length % 1024 == 0 else f"{length}"
            axes.annotate(text, ((start + stop) / 2 / scale, 1.0), (0, 2), size=8, color="#555555", ha="center",
                          xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
