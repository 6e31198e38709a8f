"""What a layer's report holds about sampling: shares of the context, search bytes, memory of the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from longreach.methods import error_bars
from longreach.methods.base import Notes
from longreach.methods.call import LayerCall, Noted
from longreach.methods.error_bars import ErrorBars
from longreach.ops import Lists
from longreach.ops.doors import Later
from longreach.ops.simhash import NUMBERS

COLUMNS = ("sampled_head", "sampled_group", "overflowed", "search", "attention", "rows", "fitted")
AT = {name: number for number, name in enumerate(COLUMNS)}
UNHASHED = -1  # the end of the tables, in numbers of rows whose queries were not hashed
Summary = Callable[[Tensor, int], dict[str, Any]]


def notes(
    call: LayerCall, met: Tensor, union: Tensor, over: Tensor, sampled: Tensor, reads: Sequence[Sequence[Noted]],
    summary: Summary, bars: ErrorBars | None = None,
) -> Notes:  # fmt: skip
    """Notes of a layer's rows.

    met: int [R, lists], over a list's keys the sum of its query heads that sampled each. union: int [R, G], keys that
    any query head of a KV head sampled. over: bool [R, lists], lists that overflowed. sampled: bool [R, 1], rows of
    sequences with keys in the tables; of others only bytes count. reads: those of search, attention and error bars.
    bars: if the options ask for them.
    """
    heads = call.kv.heads
    group = call.rows.q.shape[1] // heads
    context = call.context[:, None].double()
    head = met.double().unflatten(1, (heads, -1)).sum(2) / group
    over = over.double().unflatten(1, (heads, -1)).mean(2)
    fitted = over == 0
    columns = [torch.where(fitted, x / context, 0.0) for x in (head, union)]
    search, attention, more = (_bytes(call, some)[:, None].expand(-1, heads) / heads for some in reads)
    shares = [torch.where(sampled, x, 0) for x in (*columns, over)]
    rows = [sampled.double().expand_as(over), (sampled & fitted).double()]
    found_of = torch.stack([*shares, search, attention, *rows], -1)
    as_columns = _plain
    if bars is not None:
        found_of = torch.cat(
            [found_of, more[..., None], torch.where(sampled[..., None], error_bars.columns(bars), 0)], -1
        )
        as_columns = _with_bars
    return Notes((found_of,), as_columns, summary)


def notes_of_numbers(
    call: LayerCall, numbers: Tensor, sealed: Later, projection_bytes: int, share: str, sinks: int, summary: Summary, *,
    lists: bool,
) -> Notes:  # fmt: skip
    """Notes of a layer's rows, by the numbers of the op. Layers are computed together, at the end of a pass.

    numbers: those of `SampledAttention`, or of `numbers_of_dense`. sealed: bytes of rows that sealing has read. lists:
    whether the implementation makes lists, which are read.
    """
    kv, heads = call.kv, call.rows.q.shape[1]
    columns = _of_numbers(
        heads // kv.heads, share == "own", sinks, kv.k.shape[3] * kv.k.element_size(), 4 * kv.k.shape[3],
        projection_bytes, lists, sealed.of, len(sealed.numbers),
    )  # fmt: skip
    return Notes((numbers, call.context, *sealed.numbers, *sealed.shared), columns, summary)


def numbers_of_dense(context: Tensor, heads: int) -> Tensor:
    """int64 [R, G, NUMBERS] of rows that attend to their whole context, and read neither projections nor tables."""
    values = {"attended": context, "end": torch.full_like(context, UNHASHED)}
    none = torch.zeros_like(context)
    return torch.stack([values.get(name, none) for name in NUMBERS], -1)[:, None].expand(-1, heads, -1)


@cache
def _of_numbers(
    group: int, own: bool, sinks: int, vector: int, centre: int, projections: int, lists: bool,
    sealed: Callable[..., Tensor], own_numbers: int,
) -> Callable[..., Tensor]:  # fmt: skip
    """Columns [L, R, G, C] from numbers [L, R, G, NUMBERS] and contexts [L, R]; one function for equal arguments, as
    layers with the same function are computed together. vector, centre: bytes of a key and of a centre. projections:
    bytes of all. lists: whether there are some to be read. sealed, own_numbers: a `Later`'s function, and how many of
    its tensors are the layers' own.
    """

    def columns(numbers: Tensor, context: Tensor, *of_sealing: Tensor) -> Tensor:
        mine, shared = of_sealing[:own_numbers], (x[0] for x in of_sealing[own_numbers:])
        n = dict(zip(NUMBERS, numbers.double().unbind(-1), strict=True))
        context = context.double()[..., None]
        fitted = n["overflowed"] == 0
        head, union = (torch.where(fitted, x / context, 0.0) for x in (n["met"] / group, n["union"]))
        over, sampled = n["overflowed"] / (group if own else 1), (n["end"] > sinks).double()
        rows, heads = numbers.shape[1:3]
        entries = (n["met"] if own else n["weighed"]) * (4 if lists else 0)  # of slots; weights are as large
        hashed = (n["end"] != UNHASHED).double() * (centre + projections / (rows * heads))
        search = n["searched"] + n["weighed"] * vector + entries + hashed
        search = search + sealed(*mine, *shared).double()[..., None] / heads
        shares = (torch.where(sampled > 0, x, 0.0) for x in (head, union, over))
        return torch.stack([*shares, search, 2 * vector * n["attended"] + 2 * entries, sampled, sampled * fitted], -1)

    return columns


def _plain(x: Tensor) -> Tensor:
    return x


def _with_bars(x: Tensor) -> Tensor:
    """A function of its own: the ledger keeps one sum for each, and these have more columns."""
    return x


def _bytes(call: LayerCall, noted: Sequence[Noted]) -> Tensor:
    """fp64 [R]: bytes of keys, values and metadata of these reads; those of all rows together in equal parts."""
    rows = call.rows.pos.shape[0]
    total = torch.zeros(rows, dtype=torch.float64, device=call.rows.pos.device)
    for _, kv, _, read in noted:
        other = read.other.now() if isinstance(read.other, Later) else read.other
        total += other.double().view(rows, -1).sum(1) if isinstance(other, Tensor) else other / max(1, rows)
        if read.selection is not None:
            each = read.key_bytes + read.value_bytes + read.metadata_bytes
            total += each * read.selection.keys_read(call.rows, kv).double().sum(1)
        if isinstance(read.selection, Lists):
            lists = read.selection
            weight = 0 if lists.log_weight is None else lists.log_weight.element_size()
            used = lists.count.masked_fill(lists.overflowed, 0).double().sum(1)
            total += used * (lists.index.element_size() + weight)
    return total


def summary_of(bits: int, tables: int, table_bytes: int, key_value_bytes: int) -> Summary:
    """table_bytes, key_value_bytes: memory of one sequence at the capacity of the tables, in one layer."""
    return partial(_summary, bits=bits, tables=tables, table_bytes=table_bytes, key_value_bytes=key_value_bytes)


def _summary(
    sums: Tensor, rows: int, *, bits: int, tables: int, table_bytes: int, key_value_bytes: int
) -> dict[str, Any]:
    """The report's values for one layer. sums: fp64 [G, C] of COLUMNS; lists are by KV head. rows: of the layer. Those
    of sequences without keys in the tables are in no value but bytes; sampled_rows is the number of the others.

    bits, tables: of the layer. sampled_head, sampled_group: mean share of the context that a query head sampled, and
    that any query head of the KV head did. Rows with a list that overflowed are left out; 1 if all rows of a KV head
    have one. overflowed: share of lists that could not hold their sample, so that the row attended densely.
    search_bytes: look-ups and weights, with keys read again for the weights and to be hashed; attention_bytes: the
    rest; both over all rows and KV heads. table_bytes_per_sequence: memory of the tables and of the centre;
    kv_bytes_per_sequence: of keys and values; table_share: the first over the second. With error bars also those of
    `error_bars.summary`, and error_bar_bytes: read to estimate them.
    """
    rows_of, fitted = (sums[:, AT[name]] for name in ("rows", "fitted"))
    all_full = (rows_of > 0) & (fitted == 0)
    sampled_head, sampled_group = (
        torch.where(all_full, 1.0, sums[:, AT[name]] / fitted.clamp(min=1))
        for name in ("sampled_head", "sampled_group")
    )
    overflowed = sums[:, AT["overflowed"]] / rows_of.clamp(min=1)
    head, group, full = (float(x.mean()) for x in (sampled_head, sampled_group, overflowed))
    share = table_bytes / key_value_bytes
    bars = dict[str, Any]()
    if sums.shape[1] > len(COLUMNS):
        bars = {"error_bar_bytes": round(float(sums[:, len(COLUMNS)].sum()))}
        bars |= error_bars.summary(sums[:, len(COLUMNS) + 1 :])
    bars_note = f"; {error_bars.note(bars)}" if bars else ""
    rows_sampled = round(float(sums[0, AT["rows"]]))
    sampled = (
        f"sampled {head:.2%} a head, {group:.2%} a group" if rows_sampled else "no key in the tables, all are read"
    )
    if full:
        sampled += f", {full:.2%} of lists overflowed"
    return {
        "note": f"({bits}, {tables}): {sampled}; tables {share:.0%} of KV{bars_note}",
        "bits": bits,
        "tables": tables,
        "sampled_rows": rows_sampled,
        "sampled_head": sampled_head.tolist(),
        "sampled_group": sampled_group.tolist(),
        "overflowed": overflowed.tolist(),
        "search_bytes": round(float(sums[:, AT["search"]].sum())),
        "attention_bytes": round(float(sums[:, AT["attention"]].sum())),
        "table_bytes_per_sequence": table_bytes,
        "kv_bytes_per_sequence": key_value_bytes,
        "table_share": share,
        **bars,
    }
