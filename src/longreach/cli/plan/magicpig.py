"""What a magicpig plan shows: each layer's bits and tables, the pairs that were measured, and other budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longreach.cli.show import Column, Table, percent
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from longreach.methods.magicpig.plan import MagicPIGPlan
    from longreach.plans import Plan

BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)


def about(plan: Plan) -> dict[str, Any]:
    """layers: pair, error, reads and memory of each. expected: of all. tried: `pairs_of`. budgets: `budgets_of`."""
    view = _view(plan)
    rows = _layers(view)
    return {"layers": rows, "expected": _over(view, view.chosen), "tried": pairs_of(view), "budgets": budgets_of(view)}


def pairs_of(view: MagicPIGPlan) -> list[dict[str, Any]]:
    """Each pair in all layers of full attention: mean error, search and attention over dense attention's bytes, memory
    of the tables over that of keys and values, and the number of layers that take the pair."""
    layers = list(view.layers)
    search, attention = (x[layers].mean(0).tolist() for x in view.reads())
    error, memory = view.layer_error[layers].mean(0).tolist(), view.table_memory().tolist()
    return [
        {"bits": pair[0], "tables": pair[1], "error": error[n], "search": search[n], "attention": attention[n],
         "memory": memory[n], "layers": view.chosen.count(pair)}
        for n, pair in enumerate(view.pairs)
    ]  # fmt: skip


def budgets_of(view: MagicPIGPlan) -> list[dict[str, Any]]:
    """The best choices for BUDGETS and the plan's own; a budget that no choice meets is left out."""
    found = []
    for budget in sorted({*BUDGETS, view.budget}):
        try:
            chosen = view.choose(budget, view.memory)
        except InvalidInput:
            continue
        dense = [n for n in view.layers if chosen[n] == (0, 0)]
        found.append({"budget": budget, **_over(view, chosen), "dense_layers": dense})
    return found


def show(plan: Plan, out: Console) -> None:
    """Tables."""
    view = _view(plan)
    columns = (Column("search", 7), Column("attention", 9), Column("memory", 7))
    table = Table(out, [Column("layer", 5), Column("bits", 6), Column("tables", 6), Column("error", 6), *columns])
    table.header()
    for row in _layers(view):
        if row["role"] != "tables":
            table.row([str(row["layer"]), row["role"], "-", *["-"] * 4])
            continue
        shares = (percent(row[name]) for name in ("search", "attention", "memory"))
        table.row([str(row["layer"]), str(row["bits"]), str(row["tables"]), _error(row["error"]), *shares])
    whole = _over(view, view.chosen)
    shares = (percent(whole[name]) for name in ("search", "attention", "memory"))
    table.row(["all", "", "", _error(whole["error"]), *shares])
    out.print()
    table = Table(out, [Column("bits", 5), Column("tables", 6), Column("error", 6), *columns, Column("layers", 6)])
    table.header()
    for row in pairs_of(view):
        shares = (percent(row[name]) for name in ("search", "attention", "memory"))
        table.row([str(row["bits"]), str(row["tables"]), _error(row["error"]), *shares, str(row["layers"])])
    out.print()
    table = Table(out, [Column("budget", 7), Column("read", 7), Column("error", 6), Column("memory", 7),
                        Column("dense layers", 30, left=True)])  # fmt: skip
    table.header()
    for row in budgets_of(view):
        dense = " ".join(map(str, row["dense_layers"])) or "none"
        mark = " <" if row["budget"] == view.budget else ""
        read = percent(row["search"] + row["attention"])
        table.row([percent(row["budget"]), read, _error(row["error"]), percent(row["memory"]), dense + mark])
    options = ", ".join(f"{name} {value}" for name, value in view.values().items() if name in OPTIONS)
    out.print(
        f"\n{options}. error: expected error of the output of attention over its norm, mean over KV heads; dense "
        f"layers have none. search, attention: bytes over dense attention's after {view.length} tokens, in a cache of "
        f"{8 * view.element} bits. memory: of the tables, over keys and values. Errors are for keys that are "
        f"sampled independently; keys that lie close together are not, so measured errors are larger."
    )


def _error(error: float) -> str:
    """In six characters; errors are large if hardly a key is sampled, as with a large `least`."""
    return f"{error:.3f}" if error < 99 else f"{error:.0f}" if error < 99_999 else f"{error:.0e}"


OPTIONS = ("seed", "least", "share", "sinks", "local", "seal", "centre")


def picture(plan: Plan) -> bytes:
    """Expected error by layer and KV head, and error against bytes for the pairs."""
    from longreach.records.report.calibration import sampling

    view = _view(plan)
    pairs = [view.pairs.index(pair) if pair in view.pairs else None for pair in view.chosen]
    heads = [[0.0] * view.heads[1] if at is None else view.error[n, :, at].tolist() for n, at in enumerate(pairs)]
    tried = [(f"{r['bits']}, {r['tables']}", r["search"] + r["attention"], r["error"]) for r in pairs_of(view)]
    chosen = [(r["search"] + r["attention"], r["error"]) for r in budgets_of(view)]
    return sampling(f"{plan.model.name}, {view.length} tokens", heads, tried, chosen)


def _layers(view: MagicPIGPlan) -> list[dict[str, Any]]:
    expected = view.expected(view.chosen)
    found = []
    for n, (bits, tables) in enumerate(view.chosen):
        role = "tables" if bits else "dense" if n in view.layers else "window"
        numbers = {name: values[n] for name, values in expected.items()}
        found.append({"layer": n, "role": role, "bits": bits, "tables": tables, **numbers})
    return found


def _over(view: MagicPIGPlan, chosen: Any) -> dict[str, float]:
    """Means over the layers of full attention."""
    expected = view.expected(chosen)
    return {name: sum(values[n] for n in view.layers) / len(view.layers) for name, values in expected.items()}


def _view(plan: Plan) -> MagicPIGPlan:
    from longreach.methods.magicpig.plan import MagicPIGPlan

    return MagicPIGPlan.of(plan)
