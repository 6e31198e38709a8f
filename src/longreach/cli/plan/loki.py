"""What a loki plan shows: how much of the keys' variance lies in few directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longreach.cli.show import Column, Table, percent

if TYPE_CHECKING:
    from rich.console import Console

    from longreach.plans import Plan

SHARES = (0.125, 0.25, 0.5)  # of the directions


def about(plan: Plan) -> dict[str, Any]:
    """explained: {directions: share of the variance in the first of them, layer by layer, of each head}."""
    return {"explained": {str(rank): shares for rank, shares in _explained(plan).items()}}


def show(plan: Plan, out: Console) -> None:
    """A row a layer, the mean over its heads."""
    found = _explained(plan)
    table = Table(out, [Column("layer", 5), *(Column(f"first {rank}", 9) for rank in found)])
    table.header()
    for layer in range(plan.model.layers):
        means = (sum(shares[layer]) / len(shares[layer]) for shares in found.values())
        table.row([str(layer), *(percent(mean) for mean in means)])
    out.print(f"\nshare of the keys' variance in the first of {plan.model.head_dim} directions, mean over KV heads")


def _explained(plan: Plan) -> dict[int, list[list[float]]]:
    from longreach.methods.loki.plan import LokiPlan

    view = LokiPlan.of(plan)
    ranks = sorted({max(1, round(share * plan.model.head_dim)) for share in SHARES})
    return {rank: view.explained(rank).tolist() for rank in ranks}
