"""`longreach plan figures`: the pictures of Kascade's paper (Figures 1 and 3 to 6) of a plan and its model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.calibrate.common import Work, add_prompts
from longreach.cli.common import positive
from longreach.cli.plan.common import add_plan, opened
from longreach.cli.plan.kascade import budgets, picture
from longreach.cli.show import Column, Table, console, emit, percent, place, waiting
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.plans import Plan

RECORD = "kascade.json"
FORMAT = 1
LABELS = {
    "pre": "pre-softmax", "post": "post-softmax", "mapped": "head map", "own": "same head", "all": "all heads pooled",
    "oracle": "own choice (oracle)",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    add_prompts(parser, output=False)
    parser.add_argument("--tiles", type=positive, default=8, metavar="N",
                        help="tiles looked at in each prompt (default 8)")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where the pictures and a record "
                        "go; the same command goes on where an interrupted one stopped")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from longreach.evals.calibration.sharing import SharingGather, shared
    from longreach.methods.kascade.plan import KascadePlan
    from longreach.records import write
    from longreach.records.report.plots import check_installed
    from longreach.records.report.writing import write_all

    check_installed()
    plan = opened(args.plan)
    if plan.kind != "kascade":
        raise InvalidInput(f"{args.plan} is a {plan.kind} plan; these pictures are of kascade plans")
    view = KascadePlan.of(plan)
    work = Work(
        args,
        {"tiles": args.tiles, "plan": {**plan.values, "made": plan.made.sha256}},
        least=lambda shape: SharingGather(shape, view, args.tiles).needed,
        fits=lambda shape: plan.check(shape, f"the plan {args.plan}"),
        record=args.output / RECORD,
    )
    what = SharingGather(work.shape, view, args.tiles)
    found = shared(what, work.gather(what))
    record = {
        "kind": "kascade figures", "format": FORMAT, "model": work.about, "plan": dict(plan.values),
        "data": work.prompts.data, "sha256": work.prompts.sha256, "tokens": work.prompts.tokens,
        "config": work.settings, **work.where, "results": found,
    }  # fmt: skip
    with waiting("drawing"):
        written = write_all(args.output, draw(plan, found))
    write(args.output / RECORD, record)
    work.journal.remove()
    if args.json:
        emit(record)
    else:
        show(found)
        console().print(place(work.where))
        for path in written:
            console().print(str(path), soft_wrap=True)
    return 0


def draw(plan: Plan, found: dict[str, Any]) -> dict[str, bytes]:
    """PNGs by file name."""
    from longreach.methods.kascade.calibrated import Calibrated
    from longreach.records.report.calibration import importance, kept, top_mass, worth

    name, measured, view = plan.model.name, Calibrated.of(plan), plan.values
    rows = budgets(measured, len(view["anchors"]))
    ways = {group: {LABELS[how]: values for how, values in found[group].items()} for group in ("pooling", "mapping")}
    return {
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
    out.print(
        "w: the share of a row's weight on the keys it attends to; e: error of the output, |o' - o| / |o|. pre, post: "
        "a tile of so many query rows chooses 10% of the keys before it by scores pooled before or after the softmax, "
        "in every layer but the first. Layers that reuse an anchor's keys take those of the head they are mapped to "
        "(mapped), of the head of their own number (own), one set of all heads (all), or choose themselves (oracle)."
    )
