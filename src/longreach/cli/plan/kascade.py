"""What a kascade plan shows: layers and their heads, similarity of layers, the value of other budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longreach.cli.show import Column, Table, percent

if TYPE_CHECKING:
    from rich.console import Console

    from longreach.methods.kascade.calibration_result import CalibrationResult
    from longreach.methods.kascade.plan import KascadePlan
    from longreach.plans import Plan

SHARE = 0.1  # of the keys: what the bytes read are stated for
MOST = 8  # anchors whose worth is shown


def about(plan: Plan) -> dict[str, Any]:
    """layers: `rows` and their heads. similarity: unweighted, of the layers that take part. budgets: their worth."""
    chosen, found = _views(plan)
    return {
        "layers": [row | {"heads": list(chosen.head_map[row["layer"]])} for row in rows(chosen, found)],
        "similarity": {"layers": list(found.layers), "served": found.plain.tolist()},
        "budgets": budgets(found, len(chosen.anchors)),
    }


def rows(chosen: KascadePlan, found: CalibrationResult) -> list[dict[str, Any]]:
    """For each layer: its anchor (None where it takes no part), importance, and `served`: the share of its best
    weight that it finds on the keys of the heads that the plan maps its heads to."""
    made = []
    for layer, importance in enumerate(found.importance.tolist()):
        anchor = chosen.anchor_of(layer) if layer in chosen.layers else None
        served = None
        if anchor is not None:
            given = found.heads[found.layers.index(anchor), :, found.layers.index(layer)]
            mapped = chosen.head_map[layer]
            served = float(given[list(mapped), range(len(mapped))].mean())
        made.append({"layer": layer, "anchor": anchor, "importance": importance, "served": served})
    return made


def budgets(found: CalibrationResult, mine: int) -> list[dict[str, Any]]:
    """Of 1 to MOST anchors (or as many as the plan has): the best ones, their value over all, evenly spaced ones', and
    the bytes that decoding reads."""
    from longreach.methods.kascade.anchors import choose, evenly, share_read, value

    n, total = len(found.layers), float(found.weights.sum())
    made = []
    for budget in range(1, min(n, max(MOST, mine)) + 1):
        best, even = choose(found.similarity, budget), evenly(n, budget)
        made.append({
            "anchors": [found.layers[a] for a in best.anchors], "value": best.value / total,
            "even": [found.layers[a] for a in even], "even_value": value(found.similarity, even) / total,
            "bytes": share_read(n, budget, SHARE),
        })  # fmt: skip
    return made


def show(plan: Plan, out: Console) -> None:
    """Tables."""
    chosen, found = _views(plan)
    heads = max(9, 3 * plan.model.kv_heads)
    table = Table(out, [Column("layer", 5), Column("role", 12, left=True), Column("importance", 10),
                        Column("served", 7), Column("heads", heads, left=True)])  # fmt: skip
    table.header()
    for row in rows(chosen, found):
        layer, anchor = row["layer"], row["anchor"]
        role = "window" if anchor is None else "anchor" if anchor == layer else f"reuses {anchor}"
        mapped = " ".join(f"{h:2}" for h in chosen.head_map[layer]) if anchor not in (None, layer) else "-"
        table.row([str(layer), role, f"{row['importance']:.4f}", percent(row["served"]), mapped])
    out.print()
    _show_similarity(found, out)
    out.print()
    table = Table(out, [Column("value", 7), Column("bytes", 6), Column("even", 7),
                        Column("best anchors", 30, left=True)])  # fmt: skip
    table.header()
    for row in budgets(found, len(chosen.anchors)):
        mark = " <" if row["anchors"] == list(chosen.anchors) else ""
        anchors = " ".join(map(str, row["anchors"]))
        table.row([percent(row["value"]), percent(row["bytes"]), percent(row["even_value"]), f"{anchors}{mark}"])
    for device, phases in chosen.dense_below.items():
        out.print()
        for phase, tokens in phases.items():
            out.print(f"{phase} on {device}: dense attention below {tokens} tokens, where it is faster")
    counted = "weighted by importance, over all layers" if found.weighted else "mean over layers, equal weights"
    out.print(
        "\nserved: weight that a head finds on the keys chosen by the head that it is mapped to, over that on its own "
        f"best keys ({tile_of(chosen)}, the least over the tiles of a prompt, mean "
        "over heads and prompts). importance: 1 - cos of the residual stream before and after attention. value: "
        f"served, each head by the one that serves it best, {counted}; even: of as many evenly spaced anchors; bytes: "
        f"that decoding reads of dense attention's at {SHARE:.0%} of the keys."
    )


def _show_similarity(found: CalibrationResult, out: Console) -> None:
    """Percentages where the terminal is wide enough, else tenths."""
    n = len(found.layers)
    wide = 4 * (n + 1) <= out.width
    cell = 4 if wide else 1
    unit = "%" if wide else "in tenths"
    out.print(f"served at best, {unit}, by the layer that chooses (row) and the layer that takes (column):")
    names = "".join(f"{layer:{cell}}" if wide else str(layer % 10) for layer in found.layers)
    out.print(f"{'':4}{'' if wide else ' '}{names}", soft_wrap=True)
    for place, line in enumerate(found.plain.tolist()):
        text = "".join(
            " " * cell if column < place else f"{100 * value:{cell}.0f}" if wide else "*" if value >= 0.995 else
            str(int(10 * value)) for column, value in enumerate(line)
        )  # fmt: skip
        out.print(f"{found.layers[place]:4}{'' if wide else ' '}{text}", soft_wrap=True)


def tile_of(plan: KascadePlan) -> str:
    return f"{plan.k} keys a tile" + ("" if plan.tile is None else f" of {plan.tile} query rows")


def picture(plan: Plan) -> bytes:
    """The similarity of layers, as Fig. 3 of the paper shows it; anchors are marked."""
    from longreach.records.report.calibration import similarity

    chosen, found = _views(plan)
    title = f"{plan.model.name}: {tile_of(chosen)}"
    return similarity(title, found.layers, found.plain.tolist(), chosen.anchors)


def _views(plan: Plan) -> tuple[KascadePlan, CalibrationResult]:
    from longreach.methods.kascade.calibration_result import CalibrationResult
    from longreach.methods.kascade.plan import KascadePlan

    return KascadePlan.of(plan), CalibrationResult.of(plan)
