"""The pictures of MAC-Attention's paper (Figures 4, 5, 9, 10 and Table 6) of a plan and its model, and more."""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from longreach.cli.calibrate.common import prepared
from longreach.cli.show import Column, Table, console, percent, progress
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from longreach.evals.calibration.run import CalibrationRun
    from longreach.evals.mac_study.drift import Drift
    from longreach.plans import Plan

OPTIONS = {"rows": 32, "window": 2048, "band": 256, "tau": 0.75, "sinks": 0, "steps": 256, "depth": (32,)}
RECORD = "mac.json"
WAYS = {
    "sqrt2d": "L2 before rotation (paper)", "calibrated": "L2 in logits (calibrated)", "post": "L2 after rotation",
    "cosine": "cosine before rotation",
}  # fmt: skip


def measure(args: argparse.Namespace, plan: Plan) -> tuple[CalibrationRun, dict[str, Any]]:
    from longreach.evals.mac_study.gather import ReuseGather, StudySettings, layers_of
    from longreach.evals.mac_study.results import StudyData, results
    from longreach.methods.mac.plan import MACPlan

    if not 0 <= args.tau < 1:
        raise InvalidInput(f"tau: expected a number in [0, 1), got {args.tau}; choose another --tau")
    view, asked = MACPlan.of(plan), StudySettings(args.window, args.band, args.sinks, args.rows)
    gathered = {name: getattr(asked, name) for name in ("window", "band", "sinks", "rows")}
    work = prepared(
        args,
        {**gathered, "plan": {**plan.values, "made": plan.made.sha256}},
        least=lambda shape: asked.needed,
        fits=lambda shape: plan.check(shape, f"the plan {args.plan}"),
        record=args.output / RECORD,
    )
    drift = _drift(args, work)  # refused now, not when prompts are read
    what = ReuseGather(work.shape, view, asked)
    parts = work.gather(what)
    if not layers_of(parts):
        raise InvalidInput("every layer of this model has a sliding window, so MAC cannot reuse anything")
    work.settings |= {"tau": args.tau, "steps": args.steps, "depth": list(args.depth)}
    found = results(StudyData(asked, view, work.shape, parts), args.tau)
    if drift is None:
        return work, {**found, "drift": None}
    with work.journal as journal:
        drifted = drift.run(args.prefill_chunk_size, progress, done=journal.done, keep=journal.add)
    return work, {**found, "drift": drifted}


def _drift(args: argparse.Namespace, work: CalibrationRun) -> Drift | None:
    """The generation after the first prompt, by the method as the paper has it: no guard, chains bounded and not."""
    from longreach.evals.mac_study.drift import Drift
    from longreach.methods.mac import MAC

    if not args.steps:
        return None
    paper = {"window": args.window, "band": args.band, "tau": args.tau, "sinks": args.sinks, "min_context": 0}
    limits = {f"depth {depth}": depth for depth in args.depth} | {"no limit": None}
    methods = {name: MAC(**paper, max_reuse_depth=depth, rest_rows=None) for name, depth in limits.items()}
    tokens = work.prompts.prompts[0].tokens
    return Drift(work.model, work.tokenizer, tokens, methods, steps=args.steps, seed=args.seed)


def draw(plan: Plan, found: dict[str, Any]) -> dict[str, bytes]:
    """PNGs by file name."""
    from longreach.records.report import reuse

    name, layers, bands, windows = plan.model.name, found["layers"], found["bands"], found["windows"]
    band, tau, made = found["band"], found["tau"], dict[str, bytes]()
    for scale, by in found["thresholds"].items():
        shares = {what: [[p[key] for p in row] for row in by["layers"]]
                  for what, key in (("accepted", "accepted"), ("keys not read", "skipped"))}  # fmt: skip
        made[f"mac-threshold-{scale}.png"] = reuse.by_layer(f"{name}, {scale}", "tau", found["taus"], shares)
        of = found["window"][scale]
        shares = {"accepted": of["acceptance"], "keys not read": of["skipped"]}
        made[f"mac-window-{scale}.png"] = reuse.by_layer(f"{name}, {scale}", "window", windows, shares)
    mass = {"weight on the band": [[sum(x) / len(x) for x in zip(*heads, strict=True)]
                                   for heads in found["band_mass"]]}  # fmt: skip
    made["mac-band.png"] = reuse.by_layer(name, "band", bands, mass)
    made["mac-gap.png"] = reuse.by_gap(name, layers, found["gap_band"]["edges"], bands, found["gap_band"]["error"])
    grid = found["window_band"]
    pictures = reuse.by_window_and_band(f"{name}, tau {tau:g}", windows, bands, grid["error"], grid["read"])
    made |= {f"mac-window-band-{what}.png": png for what, png in pictures.items()}
    trade = {WAYS[scale]: by["all"] for scale, by in found["thresholds"].items()}
    made["mac-trade.png"] = reuse.trade(f"{name}, band {band}", found["taus"], trade)
    equal, skipped = found["equal_acceptance"], found["equal_skipped"]
    made["mac-matching.png"] = reuse.ways(
        f"{name}, band {band}", equal["sqrt2d"]["shares"], {WAYS[way]: equal[way]["one"] for way in WAYS},
        skipped["shares"], {WAYS[way]: skipped[way] for way in WAYS},
    )  # fmt: skip
    if found["drift"] is not None:
        made["mac-drift.png"] = reuse.drift(name, found["drift"]["edges"], found["drift"]["methods"])
        made["mac-depths.png"] = reuse.depths(name, found["drift"]["methods"])
    return made


def show(found: dict[str, Any]) -> None:
    """Tables: layers, thresholds, ways of matching, drift."""
    out = console()
    _show_layers(out, found)
    _show_thresholds(out, found)
    _show_ways(out, found)
    if found["drift"] is not None:
        _show_drift(out, found["drift"])
    out.print(
        f"{found['rows']} rows; the nearest of the {found['windows'][-1]} rows before each, a band of {found['band']} "
        "keys. accepted: rows and heads with a match; reused: those with a match in all query heads of the KV head; "
        "skipped: keys not read, misses counted as 0, (p - r)+ / m; error: |o' - o| / |o| of reused outputs, or, in "
        "comparisons by keys read, of all outputs, misses being exact. gap, spread: Table 6 of the paper, p - m. "
        "tau: sqrt(2 d) (1 - tau) (sqrt2d), 1 - tau in logits (calibrated); plan: its own thresholds, by layer."
    )


def _show_layers(out: Console, found: dict[str, Any]) -> None:
    out.print(f"by layer at tau {found['tau']:g} (sqrt2d), and in logits by the plan's own:")
    table = Table(out, [Column("layer", 5), Column("accepted", 8), Column("reused", 6), Column("skipped", 7),
                        Column("gap", 6), Column("spread", 6), Column("logits", 8), Column("skipped", 7),
                        Column("gap", 6), Column("spread", 6)])  # fmt: skip
    table.header()
    for n, layer in enumerate(found["layers"]):
        row = [str(layer)]
        for scale in ("sqrt2d", "calibrated"):
            of, skew = found["window"][scale], found["skew"][scale][n]
            row.append(percent(of["acceptance"][n][-1]))
            if scale == "sqrt2d":
                row.append(percent(of["reused"][n]))
            row += [percent(of["skipped"][n][-1]), _whole(skew["average"]), _whole(skew["spread"])]
        table.row(row)
    out.print()


def _show_thresholds(out: Console, found: dict[str, Any]) -> None:
    scales = ("sqrt2d", "calibrated")
    table = Table(out, [Column("tau", 5), *(Column(t, 9) for _ in scales for t in ("accepted", "skipped", "error"))])
    out.print("all layers, by tau: in sqrt(2 d) (left), in logits (right)")
    table.header()
    rows = [(f"{tau:g}", [found["thresholds"][s]["all"][n] for s in scales]) for n, tau in enumerate(found["taus"])]
    for name, points in [*rows, ("plan", [found["plan"][s] for s in scales])]:
        cells = [percent(p[key]) for p in points for key in ("accepted", "skipped", "error_reused")]
        table.row([name, *cells])
    out.print()


def _show_ways(out: Console, found: dict[str, Any]) -> None:
    names = {"sqrt2d": "L2 pre", "calibrated": "in logits", "post": "L2 post", "cosine": "cosine"}
    for title, shares, points, key in (
        ("accepted", found["equal_acceptance"]["sqrt2d"]["shares"],
         {w: found["equal_acceptance"][w]["one"] for w in names}, "error_reused"),
        ("skipped", found["equal_skipped"]["shares"], found["equal_skipped"], "error"),
    ):  # fmt: skip
        out.print(f"error by way of matching, one threshold for all layers, at equal share {title}:")
        table = Table(out, [Column(title, 8), *(Column(name, 9) for name in names.values())])
        table.header()
        for n, share in enumerate(shares):
            cells = [None if points[way][n] is None else points[way][n][key] for way in names]
            table.row([percent(share), *map(percent, cells)])
        out.print()


def _show_drift(out: Console, drift: dict[str, Any]) -> None:
    methods = drift["methods"]
    out.print(f"generated after {drift['prompt_tokens']} tokens, by step: {'; '.join(methods)}")
    table = Table(out, [Column("steps", 11), *(Column(t, 8) for _ in methods for t in ("error", "KL", "agree"))])
    table.header()
    for n, (a, b) in enumerate(pairwise(drift["edges"])):
        row = [f"{a}-{b - 1}"]
        for m in methods.values():
            row += [percent(sum(m["error"][n]) / len(m["error"][n])), f"{m['kl'][n]:.4f}", percent(m["agree"][n])]
        table.row(row)
    for name, m in methods.items():
        layers = [row for row in m["depths"] if row is not None]
        if not layers:
            continue
        means = [sum(x) / len(layers) for x in zip(*layers, strict=True)]
        told = ", ".join(f"{low}+ {percent(x)}" for low, x in zip(m["depth_bins"], means, strict=True))
        read, more = m["reads"], sum(a - b for a, b in zip(m["nll"], m["nll_dense"], strict=True)) / len(m["nll"])
        out.print(f"{name}: {more:+.4f} nats a token over dense; keys read {percent(2 * read['keys'])}, with the ring "
                  f"{percent(read['total'])} of dense attention's bytes; entries by how many reuses they descend from: "
                  f"{told}")  # fmt: skip
    out.print("KL: of next-token distributions, dense attention's first, in nats. agree: the same likeliest token.\n")


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
