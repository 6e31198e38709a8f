"""The pictures of Kascade's paper (Figures 1 to 6) of a plan and its model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from longreach.cli.calibrate.common import prepared
from longreach.cli.plan.kascade import budgets, picture
from longreach.cli.show import Column, Table, console, percent

if TYPE_CHECKING:
    from longreach.evals.calibration.run import CalibrationRun
    from longreach.plans import Plan

OPTIONS = {"tiles": 8}
RECORD = "kascade.json"
LABELS = {
    "pre": "pre-softmax", "post": "post-softmax", "mapped": "head map", "own": "same head", "all": "all heads pooled",
    "oracle": "own choice (oracle)",
}  # fmt: skip
NAMES, SHORT = ("weight", "error"), ("every", "dense", "first")
ALONE = {"all": "every layer", "first_dense": "first layer dense", "first": "first layer alone"}


def measure(args: argparse.Namespace, plan: Plan) -> tuple[CalibrationRun, dict[str, Any]]:
    from longreach.evals.calibration.sharing import SharingGather, shared
    from longreach.methods.kascade.plan import KascadePlan

    view = KascadePlan.of(plan)
    work = prepared(
        args,
        {"tiles": args.tiles, "plan": {**plan.values, "made": plan.made.sha256}},
        least=lambda shape: SharingGather(shape, view, args.tiles).needed,
        fits=lambda shape: plan.check(shape, f"the plan {args.plan}"),
        record=args.output / RECORD,
    )
    what = SharingGather(work.shape, view, args.tiles)
    return work, shared(what, work.gather(what))


def draw(plan: Plan, found: dict[str, Any]) -> dict[str, bytes]:
    """PNGs by file name."""
    from longreach.methods.kascade.calibration_result import CalibrationResult
    from longreach.records.report.calibration import importance, kept, top_mass, worth

    name, measured, view = plan.model.name, CalibrationResult.of(plan), plan.values
    rows = budgets(measured, len(view["anchors"]))
    ways = {group: {LABELS[how]: values for how, values in found[group].items()} for group in ("pooling", "mapping")}
    oracle = {label: found["oracle"][way] for way, label in ALONE.items()}
    return {
        "kascade-oracle.png": kept(
            f"{name}: each row's own best keys", "keys attended to, %", [100 * s for s in found["oracle"]["shares"]],
            oracle,
        ),
        "kascade-top.png": top_mass(f"{name}: top 256 keys", found["top_256"]),
        "kascade-similarity.png": picture(plan),
        "kascade-importance.png": importance(name, measured.importance.tolist()),
        "kascade-budgets.png": worth(
            name, [r["value"] for r in rows], [r["even_value"] for r in rows], [r["bytes"] for r in rows]
        ),
        "kascade-pooling.png": kept(
            f"{name}: 10% of the keys", "query rows of a tile", found["sizes"], ways["pooling"], doubling=True
        ),
        "kascade-mapping.png": kept(
            f"{name}: tiles of {view['tile']} query rows", "keys chosen, %", [100 * s for s in found["shares"]],
            ways["mapping"],
        ),
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Tables of what pooling and mapping keep."""
    out = console()
    for group, first, title in (("pooling", "sizes", "rows"), ("mapping", "shares", "keys")):
        ways = {how: values for how, values in found[group].items() if values["weight"] is not None}
        if not ways:
            continue
        table = Table(out, [Column(title, 6), *(Column(f"{how} w", 8) for how in ways),
                            *(Column(f"{how} e", 8) for how in ways)])  # fmt: skip
        table.header()
        for place_of, value in enumerate(found[first]):
            label = str(value) if group == "pooling" else percent(value)
            table.row([label, *(percent(ways[how][name][place_of]) for name in ("weight", "error") for how in ways)])
        out.print()
    oracle = found["oracle"]
    table = Table(out, [Column("best keys", 9), *(Column(f"{name} {what[0]}", 8) for what in NAMES for name in SHORT)])
    table.header()
    for place_of, share in enumerate(oracle["shares"]):
        table.row([percent(share), *(percent(oracle[way][what][place_of]) for what in NAMES for way in ALONE)])
    out.print()
    out.print(
        "w: the share of a row's weight on the keys it attends to; e: error of the output, |o' - o| / |o|. pre, post: "
        "a tile of that many query rows chooses 10% of the keys before it by scores pooled before or after the "
        "softmax, in every layer but the first. Layers that reuse an anchor's keys take those of the head they are "
        "mapped to (mapped), of the head of their own number (own), one set of all heads (all), or choose themselves "
        "(oracle). best keys: rows attend to those that weigh most in their own layer: in every layer, with the first "
        "layer dense, and in that alone."
    )
