"""What an a3_deep plan shows: how good each layer's choice is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longreach.cli.show import Column, Table, percent

if TYPE_CHECKING:
    from rich.console import Console

    from longreach.plans import Plan


def about(plan: Plan) -> dict[str, Any]:
    """Nothing more: the plan's values are all there is."""
    return {}


def show(plan: Plan, out: Console) -> None:
    """A row a layer."""
    from longreach.methods.fusion.plan import A3DeepPlan

    view = A3DeepPlan.of(plan)
    table = Table(out, [Column("layer", 5), Column("KL", 8), Column("of oracle's", 11), Column("", 7, left=True)])
    table.header()
    for layer, kl, hits in zip(view.layers, view.kl, view.hits, strict=True):
        table.row([str(layer), f"{kl:.3g}", percent(hits), "chooses" if layer == view.layer else ""])
    out.print(
        f"\nKL: of the next-token distributions along the correct answer, exact prefill against {view.ratio:.0%} of "
        f"the tokens recomputed, in nats, mean over prompts. of oracle's: share of the tokens that an exact prefill "
        f"changes most that the layer chooses too"
    )
