"""The figures of docs/mka.md and docs/block_mka.md are those of their records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import exp
from typing import Any

from longreach.cli.mka.common import TASKS
from longreach.mka.config import MKAConfig
from longreach.mka.levels import Levels
from tests.doc_tables import ROOT, Row, record, section, tables

MKA, BLOCK = ((ROOT / "docs" / name).read_text() for name in ("mka.md", "block_mka.md"))
MINI = ROOT / "src/longreach/models/longreach-mini"
LABELS = {
    "mha": "`mha`, the control", "fastmka": "`fastmka`", "fastmka-3": "`fastmka tiers=[1,2,3]`",
    "fastmka-fixed": "`fastmka routing=fixed`", "fastmka-top1": "`fastmka routing=top1`",
    "fastmka-top2": "`fastmka tiers=[1,2,3] routing=top2`", "mka": "`mka`", "mka-2": "`mka tiers=[1,2]`",
    "mka-gated": "`mka mode=gated`", "block-bounds": "`block_mka recall=bounds`",
    "block-bounds-long": "the same, healed on 100M tokens",
    "block-index": "`block_mka recall=index`", "block-hash": "`block_mka recall=hash`",
    "block": "`block_mka recall=summary`", "block-local": "`block_mka tiers=[1,2]`", "gqa-2": "`gqa kv_heads=2`",
    "mqa": "`mqa`", "mla": "`mla`",
}  # fmt: skip
ROUTINGS = "fastmka-fixed", "fastmka-top1", "fastmka-top2"
# before healing they are the original, bit for bit or up to rounding
HEALED_ONLY = "mha", "fastmka", "fastmka-3", *ROUTINGS, "mka", "mka-2", "mka-gated"
DRAWN = [(128, 2), (128, 8), (512, 2), (512, 8), (512, 32), (512, 256)]
CACHE = {"mha": 2.0, "gqa-2": 0.5, "mqa": 0.25, "mla": 0.5}  # over the original's cache, which has 4 KV heads
NAMES = {"gqa": "dense", "mla": "MLA", "mka softmaxes": "`mka`", "mka gated": "`mka mode=gated`", "torch_sdpa": "torch"}
LENGTHS, PARTS = (4096, 16384), ("forward_", "backward_", "")
KINDS = "attention", "layer", "scan", "decode", "model"


def percent(x: float) -> str:
    return f"{100 * x:.0f}%"


def test_shares_of_far_mass_that_recall_finds() -> None:
    (_, rows) = next(tables(section(MKA, "What recall finds")))
    found = [record(f"mini-mka-recall-{length}") for length in (2048, 4096)]
    assert [(r["block"], r["window"]) for r in found] == [(32, 128), (64, 512)]
    names = {
        "oracle": ("before", "oracle"),
        "`bounds`": ("before", "bounds"),
        "`index`, trained": ("after", "index"),
        "`summary`": ("before", "summary"),
        "`hash`, 128 bits": ("before", "hash 128"),
        "`hash`, 32 bits": ("before", "hash 32"),
        "`index`, untrained": ("before", "index"),
        "chance": ("before", "chance"),
    }
    assert [row[0] for row in rows] == list(names)
    for name, *cells in rows:
        when, way = names[name]
        assert cells == [percent(r[when]["all"][way][count]) for r in found for count in ("4", "8")], name
    shares = [r["before"]["all"] for r in found]
    assert all(0.64 < x["hash 128"][n] / x["summary"][n] < 0.72 for x in shares for n in ("4", "8"))
    assert all(x["hash 128"][n] - x["chance"][n] < (x["summary"][n] - x["chance"][n]) / 2 for x in shares for n in "48")
    assert all(f"each of {TASKS.replace(',', ', ')};" in r["data"] and r["steps"] == 150 for r in found)
    held_out = [r["held_out"] for r in found]
    trained = [int(r["data"].split()[0]) * len(TASKS.split(",")) - n for r, n in zip(found, held_out, strict=True)]
    for text in ("150 updates on {} or {} prompts".format(*trained), "Rows are of {} or {} other".format(*held_out)):
        assert text in " ".join(MKA.split()), text


def test_parameters_that_conversion_adds() -> None:
    original = record("mini-mac-4096")["model"]["parameters"]
    config = json.loads((MINI / "config.json").read_text())
    sizes = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def added(layers: int, of: float, sizes: tuple[int, ...], variant: str, **options: Any) -> str:
        levels = Levels(MKAConfig.make(variant, **options), 0, *sizes)
        return f"{layers * sum(p.numel() for p in levels.parameters()) / of:.1%}"

    for options, texts in (
        ({}, ("{} of the parameters of an 8B model", "{} of longreach-mini's")),
        ({"recall": "index"}, ("adds an index too: {} and", "and {} in all")),
    ):
        many = added(32, 8.03e9, (32, 8, 128), "block_mka", **options)
        few = added(config["num_hidden_layers"], original, sizes, "block_mka", **options)
        for text, share in zip(texts, (many, few), strict=True):
            assert text.format(share) in " ".join(MKA.split()), (text, share)


def test_scores_of_block_mka() -> None:
    head, rows = next(tables(section(BLOCK, "Answers", "Limits")))
    tasks = record("mini-block-mka-4096")["tasks"]
    methods = ["dense", "block_mka recall=bounds", "block_mka", "block_mka recall=hash"]
    assert head == ("task", "dense", *(f"`block_mka recall={x}`" for x in ("bounds", "summary", "hash")))
    scores = {name: [task["results"][m]["score"] for m in methods] for name, task in tasks.items()}
    scores["mean"] = [sum(column) / len(column) for column in zip(*scores.values(), strict=True)]
    *scored, read = rows
    assert scored == [(name, *map(percent, values)) for name, values in scores.items()]
    bytes_read = [
        sum(share(task["results"][m]["decode_reads"]) for task in tasks.values()) / len(tasks) for m in methods
    ]
    assert read == ("bytes, decode", *map(percent, bytes_read))
    assert all(len(task["samples"]) == 3 for task in tasks.values())


def share(reads: dict[str, float]) -> float:
    return float(reads["total"])


def results(name: str, length: int) -> dict[str, dict[str, Any]]:
    found = record(f"mini-mac-{length}" if name == "original" else f"mini-mka-{name}")
    assert found["config"]["samples"] == 50 and not found["dirty"]
    return {t["task"]: t["results"]["dense"] for t in found["tasks"].values() if t["length"] == length}


def score(name: str, length: int) -> float:
    """Mean over tasks, in percent."""
    found = results(name, length).values()
    return sum(100 * result["score"] for result in found) / len(found)


def bytes_read(name: str, length: int) -> str:
    found = results(f"{name}-healed", length).values()
    return percent(CACHE.get(name, 1.0) * sum(share(result["decode_reads"]) for result in found) / len(found))


def perplexity(name: str, first: int, last: int) -> float:
    """Of positions from first to last, in steps of 1024."""
    parts = record(f"mini-mka-{name}-perplexity")["results"]["dense"]["prefill"]["by_position"][first:last]
    return exp(sum(x["nll"] * x["tokens"] for x in parts) / sum(x["tokens"] for x in parts))


def by_level(name: str, what: str) -> list[list[float]]:
    """The values of all layers, for each level."""
    layers = record(f"mini-mka-{name}-routing")["results"]["layers"].values()
    return [list(level) for level in zip(*(layer[what] for layer in layers), strict=True)]


def answer_rows() -> Iterator[Row]:
    originals = (cell for length in LENGTHS for cell in (f"{score('original', length):.1f}%", "-"))
    yield "original", "100%", "100%", *originals, "-", "-", "-"
    for name, label in LABELS.items():
        both = [None if name in HEALED_ONLY else name.removesuffix("-long"), f"{name}-healed"]
        scores = ("-" if x is None else f"{score(x, length):.1f}%" for length in LENGTHS for x in both)
        perplexities = ("-" if x is None else f"{perplexity(x, 0, 16):.1f}" for x in both)
        trained = "mka" in name or "block" in name
        gate = f"{max(abs(x) for level in by_level(name, 'gate') for x in level):.2f}" if trained else "-"
        yield label, *(bytes_read(name, length) for length in LENGTHS), *scores, *perplexities, gate


def budget_rows() -> Iterator[Row]:
    for window, blocks in DRAWN:
        name = f"block-drawn-healed-{window}-{blocks}"
        reads = (results(name, length).values() for length in LENGTHS)
        yield (
            str(window), str(blocks),
            *(percent(sum(share(x["decode_reads"]) for x in some) / len(some)) for some in reads),
            *(f"{score(name, length):.1f}%" for length in LENGTHS), f"{perplexity(name, 0, 16):.1f}",
        )  # fmt: skip


def position_rows() -> Iterator[Row]:
    for name in (x for x in LABELS if x not in ("fastmka-3", *ROUTINGS, "mka-2", "mka-gated", "block-bounds-long")):
        both = [f"{name}-healed"] if name in HEALED_ONLY else [name, f"{name}-healed"]
        steps = ((0, 1), (1, 4), (4, 8), (8, 16))
        yield LABELS[name], *(", ".join(f"{perplexity(x, *step):.1f}" for x in both) for step in steps)


def cases(kind: str, *, bounds: bool = False) -> dict[str, dict[str, Any]]:
    """Entries by name, by the end of the case's name ("32K", "128K-b8"); those with recall=bounds, or the others."""
    found = {name: case for name, case in record(f"mka-{kind}")["cases"].items() if name.endswith("-bounds") == bounds}
    assert all(case["device"]["name"] == "NVIDIA H200" for case in found.values())
    short = {name: name.removesuffix("-bounds").split("-", 2)[2].replace("k", "K") for name in found}
    return {short[name]: {e["name"]: e for e in case["entries"]} for name, case in found.items()}


def ms(entry: dict[str, Any], part: str = "") -> float:
    return float(entry[f"{part}microseconds"]["median"]) / 1e3


def gib(entry: dict[str, Any]) -> str:
    return f"{entry['memory']['peak'] / 2**30:.1f} GiB"


def attention_rows() -> Iterator[Row]:
    for name, entries in cases("attention").items():
        mine, torch = entries["block_mka"], entries["torch cuDNN"]
        assert ms(torch) == min(ms(entry) for entry in entries.values() if entry is not mine)
        times = (f"{ms(mine, part):.1f} ms, {ms(torch, part) / ms(mine, part):.2f}x" for part in PARTS)
        yield name, *times, f"{ms(torch):.1f} ms", gib(mine), gib(torch), str(mine["launched"]["kernels"])


def layer_rows() -> Iterator[Row]:
    for kind in cases("layer")["4K"]:
        pairs = [(entries.get(kind), entries["gqa"]) for entries in cases("layer").values()]
        cells = (f"{ms(x):.1f} ms, {ms(dense) / ms(x):.2f}x, {gib(x)}" if x else "-" for x, dense in pairs)
        yield NAMES.get(kind, f"`{kind}`"), *cells


def bounds_rows() -> Iterator[Row]:
    """Block-MKA with recall=bounds beside recall=summary: milliseconds, or microseconds of decode."""
    for kind, dense, unit in (
        ("attention", "torch cuDNN", "ms"),
        ("layer", "gqa", "ms"),
        ("decode", "torch SDPA cudnn", "us"),
    ):
        for name, entries in cases(kind, bounds=True).items():
            cells = list[str]()
            for some in (cases(kind)[name], entries):
                mine, over = ms(some["block_mka"]), ms(some[dense]) / ms(some["block_mka"])
                cells.append(f"{mine if unit == 'ms' else 1e3 * mine:.1f} {unit}, {over:.2f}x")
            yield f"{kind}, {name}", *cells


def target_rows(*, bounds: bool = False) -> Iterator[Row]:
    found = dict[str, list[Row]]()
    for kind in KINDS:
        measured = record(f"mka-{kind}")["cases"]
        for name in cases(kind, bounds=bounds):
            case = measured[f"mka-{kind if kind != 'model' else '8b'}-{name.lower()}{'-bounds' if bounds else ''}"]
            for x in case["targets"]:
                of = f"{x['of']} with `bounds`" if bounds else x["of"]
                what = f"{kind}, {of}: {x['quantity']} {NAMES.get(x['over'], '')}".strip()
                cells = name, f"{x['bound']:g}", f"{x['got']:.2f}", "yes" if x["reached"] else "no"
                found.setdefault(what, []).append(cells)
    for what, rows in found.items():
        yield what, *(" / ".join(x if len(set(x)) > 1 else x[:1]) for x in zip(*rows, strict=True))


def all_targets() -> Iterator[Row]:
    yield from target_rows()
    yield from target_rows(bounds=True)


def test_answers_speed_and_targets() -> None:
    found = [rows for _, rows in tables(section(MKA, "Answers after training", "A layer for your own model"))]
    kinds = answer_rows, budget_rows, position_rows, attention_rows, layer_rows, bounds_rows, all_targets
    assert found == [list(rows()) for rows in kinds]


def test_sentences() -> None:
    control, bounds, tasks = "mha-healed", "block-bounds-healed", ("niah_multikey_2", "niah_multikey_3", "cwe")

    def above(a: str, b: str) -> str:
        return " and ".join(f"{score(a, length) - score(b, length):.1f}" for length in LENGTHS)

    scores = (f"{score(name, length):.1f}%" for length in LENGTHS for name in (bounds, control))
    a, b, c = ([percent(results(x, n)[task]["score"]) for n in LENGTHS for x in (control, bounds)] for task in tasks)
    local = [percent(results("block-local-healed", 16384)[task]["score"]) for task in tasks]
    rest = [results(control, n)[x]["score"] - y["score"] for n in LENGTHS for x, y in results(bounds, n).items()
            if x not in tasks]  # fmt: skip
    assert round(max(rest), 6) == 0.04
    assert all(abs(score(f"{x}-healed", n) - score(control, n)) < 0.4 for x in HEALED_ONLY for n in LENGTHS)
    learned = ((x, "fastmka-3" if x == "fastmka-top2" else "fastmka") for x in ROUTINGS)
    assert all(abs(score(f"{a}-healed", n) - score(f"{b}-healed", n)) < 0.4 for a, b in learned for n in LENGTHS)
    gates = (abs(x) for name in ("fastmka", "fastmka-3", *ROUTINGS) for level in by_level(name, "gate") for x in level)
    assert max(gates) < 0.045
    longer, drawn = "block-bounds-long", "block-drawn-healed-512-8"
    assert all(abs(score("mka-healed", n) - score("mka-2-healed", n)) < 0.2 for n in LENGTHS)
    levels, moved = (by_level(name, "weight") for name in ("fastmka-3", "block-bounds"))
    lambdas = by_level("fastmka-3", "lambda")[0]
    assert all(abs(x - start) < 0.01 for level, start in zip(levels, (1, 0, 0), strict=True) for x in level)
    for name in ("fastmka-3", "block-bounds"):
        layers = record(f"mini-mka-{name}-routing")["results"]["layers"].values()
        for level in range(3):
            means = [sum(x["by_position"]["lambda"][at][level] for x in layers) / len(layers) for at in range(1, 8)]
            assert max(means) - min(means) < 0.01
    for name in (x for x in LABELS if x.startswith("block") and x != longer):
        before, after = (perplexity(x, 8, 16) - perplexity(control, 8, 16) for x in (name, f"{name}-healed"))
        assert after < before / 2
    attention, layer = cases("attention"), cases("layer")["4K"]
    kernels = [x["launched"]["kernels"] for x in (attention["4K"]["block_mka"], attention["8K"]["block_mka"],
                                                  layer["fastmka"], layer["gqa"])]  # fmt: skip
    decode = [(x["block_mka"], x["torch SDPA cudnn"]) for x in cases("decode").values()]
    one, model = decode[0][0], cases("model")["32K-b1"]
    rates = (x["tb_per_s"] for x in cases("scan")["128K"].values())
    default = [x["block_mka"] for x in cases("decode", bounds=True).values()]
    for entries in (*cases("decode").values(), *cases("decode", bounds=True).values()):
        assert ms(entries["torch SDPA cudnn"]) == min(ms(e) for name, e in entries.items() if name != "block_mka")
    for text in (
        "{} of {} at 4K, and {} of {} at 16K".format(*scores),
        f"`bounds` is {above(control, bounds)} points below the control",
        f"`niah_multikey_2` falls from {a[0]} to {a[1]} at 4K, and from {a[2]} to {a[3]} at 16K",
        f"`niah_multikey_3` falls from {b[0]} to {b[1]} and {b[3]}",
        f"`cwe` from {c[0]} to {c[1]} and from {c[2]} to {c[3]}",
        f"window and summaries alone reach {local[0]} and {local[1]} there",
        f"Healing regains only {above(bounds, 'block-bounds')} points",
        f"20M it gains {above(f'{longer}-healed', bounds)} points",
        f"is {perplexity(f'{longer}-healed', 0, 16):.1f} instead of {perplexity(bounds, 0, 16):.1f}",
        f"mean weight of {sum(by_level(longer, 'weight')[2]) / 12:.2f} and the window "
        f"{sum(by_level(longer, 'weight')[0]) / 12:.2f}",
        f"it scores {above(bounds, drawn)} points less than the checkpoint",
        f"With all blocks it is {above(control, 'block-drawn-healed-512-256')} points below the control",
        f"With 32 it is {above(control, 'block-drawn-healed-512-32')} points below",
        f"hash is {above(control, 'block-hash-healed')} points below the control",
        f"`summary` {above(control, 'block-healed')}, `index` {above(control, 'block-index-healed')}",
        f"Healing helps the hash by {above('block-hash-healed', 'block-hash')} points",
        f"local level is {percent(min(lambdas))} to {percent(max(lambdas))}",
        f"layer 9 the window has weight {moved[0][9]:.2f} and a recalled block {moved[2][9]:.2f}",
        f"Summaries get {min(moved[1]):.2f} to {max(moved[1]):.2f}",
        f"level 2 has {sum(by_level('fastmka', 'weight')[1]) / 12:.1%} of the weight",
        "for {} and {} kernels".format(*kernels[:2]), "{} kernels instead of {}".format(*kernels[2:]),
        "moves {:.2f} and {:.2f} TB/s".format(*rates),
        "batches of 1, 8 and 32 take {:.1f}, {:.1f} and {:.1f} us".format(*(1e3 * ms(mine) for mine, _ in decode)),
        "dense kernel {:.1f}, {:.1f} and {:.1f} us".format(*(1e3 * ms(dense) for _, dense in decode)),
        f"{one['launched']['kernels']} kernels in turn, at {one['tb_per_s']:.2f} TB/s for batch 1",
        "{:.1f}, {:.0f} and {:.0f} times as fast".format(*(ms(dense) / ms(mine) for mine, dense in decode)),
        f"{default[0]['launched']['kernels']} kernels and {default[0]['percent_of_dense']:.2f}% of dense attention's",
        f"{ms(model['fastmka']):.2f} ms with `fastmka`, {ms(model['gqa']):.2f} dense",
        "for {} kernels instead of {}".format(*(model[x]["launched"]["kernels"] for x in ("fastmka", "gqa"))),
        f"reads {one['percent_of_dense']:.2f}% of dense attention's bytes",
    ):  # fmt: skip
        assert text in " ".join(MKA.split()), text
    whole = f"{ms(attention['128K']['torch cuDNN']) / ms(attention['128K']['block_mka']):.1f} times as fast at 128K"
    now = attention["32K"]["block_mka"]
    kept = (f"{score(name, n):.1f}%" for n in LENGTHS for name in ("block-bounds", "original"))
    for page, text in {
        "docs/mka.md": whole,
        "docs/block_mka.md": "it keeps {} of {} at 4K, and {} of {} at 16K".format(*kept),
        "docs/performance.md": f"now take {ms(now):.1f} ms in {now['launched']['kernels']} kernels",
        "README.md": "Block-MKA loses answers",
    }.items():
        assert text in " ".join((ROOT / page).read_text().split()), text
