"""What a mac plan shows: each layer's window, band and thresholds, and what they rest on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longreach.cli.show import Column, Table, percent

if TYPE_CHECKING:
    from rich.console import Console

    from longreach.plans import Plan


def about(plan: Plan) -> dict[str, Any]:
    """energy: of a KV head's keys, the sum over channels, layer by layer."""
    from longreach.methods.mac.plan import MACPlan

    return {"energy": MACPlan.of(plan).energy.sum(-1).tolist()}


def show(plan: Plan, out: Console) -> None:
    """A row a layer."""
    from longreach.methods.mac.plan import MACPlan

    view, values = MACPlan.of(plan), plan.values
    made = {"mass", "bands", "accepted", "windows"} <= set(values)
    columns = [Column("layer", 5), Column("window", 6), Column("band", 6), Column("tau", 6), Column("in logits", 9)]
    if made:
        columns += [Column("weight", 7), Column("accepted", 8), Column("in logits", 9)]
    table = Table(out, columns)
    table.header()
    for n in range(plan.model.layers):
        band = view.band[n]
        row = [str(n), str(view.window[n]), "none" if band is None else str(band)]
        row += [f"{view.tau['sqrt2d'][n]:.3f}", f"{view.tau['calibrated'][n]:.3f}"]
        if made:
            at = values["windows"].index(view.window[n]) if view.window[n] in values["windows"] else -1
            row.append(percent(values["mass"][n][values["bands"].index(band)]) if band in values["bands"] else "none")
            row += [percent(values["accepted"][scale][n][at]) for scale in ("sqrt2d", "calibrated")]
        table.row(row)
    out.print(
        "\nband: keys before a row that are always read; none: no band that was tried is wide enough, the layer "
        "reuses nothing. tau: queries match at a distance below sqrt(2 d) (1 - tau); in logits: they match if these "
        "differ by less than 1 - tau"
    )
    if made:
        out.print(
            f"weight: on the band, without the first {values['sinks']} tokens, none where there is no band; accepted: "
            f"rows with a match in the window"
        )
