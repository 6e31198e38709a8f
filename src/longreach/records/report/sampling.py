"""How well attention can be sampled in a model: presets, methods at equal bytes, and what sampling relies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.records.report.blocks import Block, Cell, Text, table
from longreach.records.report.format import mean, number, percent
from longreach.records.report.reading import Record
from longreach.records.report.sampling_figures import figures
from longreach.records.report.sampling_lines import (
    BITS,
    CONTROLS,
    GROUP,
    OWN,
    TABLES,
    at_bytes,
    bytes_read,
    label_of,
    lines,
    method_of,
    pair,
    presets,
)

Rows = list[list[str | Cell]]


def sampling(record: Record, file: str) -> list[Block]:
    """A description, tables of presets, of methods at equal bytes, of tops and samples, of geometry, and pictures."""
    results = record["results"]
    blocks: list[Block] = [Text(_about(record)), _presets(results), _sampled(results), Text(_explained(record))]
    blocks += [_equal(results), _choices(results)]
    if results["fitted"]["pairs"]:
        blocks += [_pairs(results), _bits(results)]
    blocks += [_estimators(results), _mass(results), _geometry(results), Text(_words())]
    for name, reason in results["left_out"].items():
        blocks.append(Text(f"{name} was left out: {reason}"))
    blocks.append(_everything(results))
    return [*blocks, *figures(record, file)]


def eq_21(bits: int, tables: int) -> float:
    """The paper's estimate of the share of keys that a query head samples (MagicPIG, Eq. 21)."""
    x = 0.5**bits
    return 1 - (1 - x) ** tables - tables * x * (1 - x) ** (tables - 1)


def _mean_of(layers: Sequence[Sequence[float] | None]) -> float | None:
    """Over layers and heads."""
    return mean([value for layer in layers if layer is not None for value in layer])


def change(new: float, old: float) -> str:
    """A change, with its sign: "-18.0%"."""
    return f"{new / old - 1:+.1%}" if old else "-"


def _presets(results: dict[str, Any]) -> Block:
    rows: Rows = []
    for bits, tables in presets(results):
        own, group, plain, bare = (method_of(results, x, bits, tables) for x in (OWN, GROUP, *CONTROLS))
        label = label_of(results, GROUP, bits, tables)
        top, place = (results[name][label]["mean"] for name in ("top_k_same_keys", "top_k_in_place"))
        rows.append([
            pair(bits, tables), percent(bytes_read(group)), percent(2 * group["reads"]["values"]),
            number(own["mean"], 3), number(group["mean"], 3), change(group["mean"], own["mean"]), number(top, 3),
            number(place, 3), number(bare["mean"], 3), f"{number(plain['mean'], 3)} ({percent(bytes_read(plain))})",
        ])  # fmt: skip
    head = ("bits, tables", "bytes read", "keys attended to", "own", "group", "change", "top-k, as many keys",
            "top-k in place", "no weights", "not centred (bytes)")  # fmt: skip
    return table("Error of magicpig's presets", head, rows)


def _sampled(results: dict[str, Any]) -> Block:
    rows: Rows = []
    for bits, tables in presets(results):
        mine = method_of(results, GROUP, bits, tables)
        rows.append([
            pair(bits, tables), percent(eq_21(bits, tables)), percent(_mean_of(mine["sampled_head"])),
            percent(_mean_of(mine["sampled_group"])), percent(mine["search"]), percent(mine["attention"]),
            percent(mine["table_share"]),
        ])  # fmt: skip
    head = ("bits, tables", "Eq. 21", "sampled by a query head", "by a group", "search bytes", "attention bytes",
            "tables over KV memory")  # fmt: skip
    return table("Keys sampled and bytes read, of dense attention's", head, rows)


def _equal(results: dict[str, Any]) -> Block:
    known = [name for name in lines(results) if name not in (GROUP, OWN, *CONTROLS)]
    rows: Rows = []
    for bits, tables in presets(results):
        bytes_ = bytes_read(method_of(results, GROUP, bits, tables))
        found = (at_bytes(lines(results)[name], bytes_) for name in known)
        mine = number(method_of(results, GROUP, bits, tables)["mean"], 3)
        rows.append([pair(bits, tables), percent(bytes_), mine, *(number(value, 3) for value in found)])
    head = ("bits, tables", "bytes read", GROUP, *known)
    return table("Error of methods at the bytes of magicpig's presets", head, rows)


def _choices(results: dict[str, Any]) -> Block:
    """choose=sample over top-k."""
    names = [name for name in ("oracle_top_k", "loki", "kascade") if name in lines(results)]
    found = {line: _budgets(results, line) for name in names for line in (name, f"{name} choose=sample")}
    rows: Rows = []
    for k in sorted({k for some in found.values() for k in some}):
        row: list[str | Cell] = [percent(k)]
        for name in names:
            top, some = (found[line].get(k) for line in (name, f"{name} choose=sample"))
            row += [number(top, 3), number(some, 3), f"{some / top:.2f}x" if top and some is not None else "-"]
        rows.append(row)
    head = ("keys", *(f"{name}: {x}" for name in names for x in ("top-k", "sampled", "ratio")))
    return table("Top-k and samples of as many keys", head, rows)


def _budgets(results: dict[str, Any], line: str) -> dict[float, float]:
    """Mean errors of a line by its budget of keys."""
    return {mine["method"].get("k", 0): mine["mean"] for mine in results["methods"].values() if mine["line"] == line}


def _pairs(results: dict[str, Any]) -> Block:
    """Table 11 of the paper."""
    share = results["fitted"]["share"]
    fitted = [tuple(pair) for pair in results["fitted"]["pairs"]]
    rows = [_pair_row(results, bits, tables) for bits, tables in fitted]
    return table(f"Error where a query head samples about {share:.0%} of the keys", PAIR_HEAD, rows)


def _bits(results: dict[str, Any]) -> Block:
    """Table 12 of the paper."""
    rows = [_pair_row(results, bits, TABLES) for bits in BITS]
    return table(f"Error by the number of bits, with {TABLES} tables", PAIR_HEAD, rows)


PAIR_HEAD = ("bits, tables", "sampled by a query head", "Eq. 21", "bytes read", "own", "group", "tables over KV memory")


def _pair_row(results: dict[str, Any], bits: int, tables: int) -> list[str | Cell]:
    own, group = (method_of(results, line, bits, tables) for line in (OWN, GROUP))
    return [pair(bits, tables), percent(_mean_of(group["sampled_head"])), percent(eq_21(bits, tables)),
            percent(bytes_read(group)), number(own["mean"], 3), number(group["mean"], 3),
            percent(group["table_share"])]  # fmt: skip


def _estimators(results: dict[str, Any]) -> Block:
    titles = {"top_k": "top-k", "iid": "iid draws", "systematic": "systematic"}
    rows: Rows = []
    for name, title in titles.items():
        mine = results["estimators"][name]
        for read, error, median in zip(mine["read"], mine["mean"], mine["median"], strict=True):
            rows.append([title, percent(read), number(error, 3), number(median, 3)])
    head = ("estimate", "keys read", "error", "median error")
    return table("Estimates with exact scores, each query head its own keys", head, rows)


def _mass(results: dict[str, Any]) -> Block:
    rows: Rows = []
    for place, share in enumerate(results["shares"]):
        found = [mean([head[place] for layer in results["mass"][name] if layer is not None for head in layer])
                 for name in ("all", "without_first")]  # fmt: skip
        rows.append([percent(share), *map(percent, found)])
    return table("Attention on the best keys of a query head", ("best keys", "of all", "first 4 left out"), rows)


def _geometry(results: dict[str, Any]) -> Block:
    found, ranges = results["geometry"], results["ranges"]
    rows: Rows = []
    for n, window in enumerate(results["windows"]):
        if window is not None:
            continue
        row: list[str | Cell] = [str(n)]
        row += [number(min(layer[n], default=None) if layer[n] else None, 3) for layer in
                (found["first_keys"]["min"], found["first_keys_other"]["min"], found["mean_keys"]["min"])]  # fmt: skip
        row += [number(mean(found["mean_keys"]["mean"][n] or []), 3), number(mean(found["first_to_mean"][n] or []), 3)]
        row += [number(mean(found["first_value_norm"][n] or []), 3)]
        row += [number(mean(ranges[name][n]), 3) for name in ("value_distance", "logits")]
        rows.append(row)
    head = ("layer", "first keys, least", "first keys of other tokens, least", "mean keys, least", "mean keys",
            "first and mean key", "first value's norm", "range of log distance", "range of logits")  # fmt: skip
    return table("Geometry by layer", head, rows)


def _everything(results: dict[str, Any]) -> Block:
    rows = [[label, number(mine["mean"], 3), number(mine["median"], 3), percent(bytes_read(mine)),
             percent(2 * mine["reads"]["values"])] for label, mine in results["methods"].items()]  # fmt: skip
    return table("All methods", ("method", "error", "median error", "bytes read", "values read"), rows, folded=True)


def _about(record: Record) -> str:
    samples, config = record["samples"], record["config"]
    tasks = list(dict.fromkeys(s["task"] for s in samples))
    tokens = round(sum(s["tokens"] for s in samples) / len(samples))
    return (
        f"{len(samples)} prompts of {', '.join(tasks)}, {tokens} tokens on average, read densely. The last "
        f"{config['rows']} rows of each were attended to by every method, in every layer, from the same queries, keys "
        f"and values. error: norm of the difference from exact attention over its norm, mean over rows, layers and "
        f"query heads. Bytes are over dense attention's."
    )


def _explained(record: Record) -> str:
    return (
        f"own, group: a sample for each query head, or the union of a group's. As many keys: the exact best keys of a "
        f"group, as many as magicpig attends to, sampled or not. in place: magicpig's exact part, and the best other "
        f"keys, as many as it sampled. no weights: sampled keys are not weighted. Exact part: the first 4 keys, the "
        f"last 64, and those that wait for a block of 256. Keys are centred by the mean of {record['config']['centre']}"
        f" keys. Bytes of oracles, and of the exact top-k, leave their scores out. Methods without a number cannot "
        f"read so few bytes, or so many with the budgets that were tried; numbers between two budgets are "
        f"interpolated."
    )


def _words() -> str:
    return (
        "Cosines between first keys of prompts, first keys after other first tokens, and mean keys of prompts, least "
        "over KV heads and pairs. first and mean key: their cosine in a prompt. first value's norm: over the median "
        "norm. Ranges from 5% to 95% over the keys of a row, of log |v - o| and of logits."
    )
