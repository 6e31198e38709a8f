"""Small records of every kind, in the format that the commands write."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from longreach.records import wilson
from longreach.records.report.blocks import SIGNS, Block, Figure, Table, Text
from longreach.records.report.fusion_shape import LAYERS
from longreach.records.report.reading import KINDS, Record
from longreach.records.report.schema import check

DENSE = {"prefill": {"name": "dense"}, "decode": {"name": "dense"}}
METHODS: dict[str, Any] = {
    "dense": DENSE,
    "streaming_llm window=0.1": {"prefill": {"name": "dense"}, "decode": {"name": "streaming_llm", "window": 0.1}},
    "oracle_top_k k=0.025": {"prefill": {"name": "dense"}, "decode": {"name": "oracle_top_k", "k": 0.025}},
}
READS = {"dense": 1.0, "streaming_llm window=0.1": 0.104, "oracle_top_k k=0.025": 1.026}


def about(kind: str, methods: Mapping[str, Any] = METHODS, **changes: Any) -> dict[str, Any]:
    """What all records say."""
    return {
        "kind": kind, "format": 1,
        "model": {"name": "small-model", "sha256": "ab" * 32, "dtype": "float32", "parameters": 1234, "context": 8192},
        "config": {"length": 4096, "samples": 4, "seed": 0, "batch": 1, "prefill_chunk_size": 512, "draws": 1,
                   "temperature": 0.0},
        "commit": "c0ffee" + "0" * 34, "dirty": False, "python": "3.11.9",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "device": {"type": "cpu", "name": "A processor", "threads": 2},
        "methods": dict(methods), **changes,
    }  # fmt: skip


def reads(total: float) -> dict[str, float]:
    return {"total": total, "keys": total * 0.5, "values": total * 0.5, "metadata": 0.0}


def answer(number: int, score: float, text: str = "", **changes: Any) -> dict[str, Any]:
    return {"number": number, "draw": 0, "text": text or f"said {number}", "score": score, "tokens": 5,
            "stopped": True, "diverges_at": None, "error": None, **changes}  # fmt: skip


def result(label: str, answers: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
    """Score and interval as the answers give them."""
    score = sum(a["score"] for a in answers) / len(answers)
    return {
        "score": score, "interval_95": list(wilson(score * len(answers), len(answers))),
        "failed": sum(a["error"] is not None for a in answers), "answers": list(answers),
        "length_over_dense": None if label == "dense" else 1.5, "prefill_reads": reads(1.0),
        "decode_reads": reads(READS.get(label, 0.5)), "seconds": {"read": 2.5, "first_token": 2.5, "per_token": 0.0125},
        **changes,
    }  # fmt: skip


def task(results: Mapping[str, Any], depths: Sequence[float] = (), **changes: Any) -> dict[str, Any]:
    count = len(next(iter(results.values()))["answers"])
    samples = [{"number": n, "tokens": 4000 + n, "characters": 16000, "expected": [f"right {n}"],
                "facts": {"depth": depths[n]} if depths else {}} for n in range(count)]  # fmt: skip
    return {"source": "a source", "max_new_tokens": 16, "characters_per_token": 4.25, "samples": samples,
            "results": dict(results), **changes}  # fmt: skip


def evaluation(tasks: Mapping[str, Any], length: int = 4096, **changes: Any) -> dict[str, Any]:
    record = about("eval", **changes)
    return {**record, "config": {**record["config"], "length": length}, "tasks": dict(tasks)}


def scored(right: Mapping[str, int], of: int = 4, **changes: Any) -> dict[str, Any]:
    """A task that each method does so many times right."""
    return task({x: result(x, [answer(i, float(i < n)) for i in range(of)]) for x, n in right.items()}, **changes)


def sweep(length: int, of: int = 5) -> dict[str, Any]:
    """The oracle finds all needles, streaming_llm those in the last tenth."""
    depths = [n / (of - 1) for n in range(of)]
    rights = {"dense": 0.0, "streaming_llm window=0.1": 0.9, "oracle_top_k k=0.025": 0.0}
    return evaluation({"needle_sweep": task(
        {x: result(x, [answer(i, float(d >= least)) for i, d in enumerate(depths)]) for x, least in rights.items()},
        depths=depths,
    )}, length)  # fmt: skip


def small() -> dict[str, Any]:
    """Two tasks, three methods; streaming_llm significantly below dense in one."""
    return evaluation({
        "niah_single_1": scored({"dense": 20, "streaming_llm window=0.1": 3, "oracle_top_k k=0.025": 19}, of=20),
        "vt": scored({"dense": 2, "streaming_llm window=0.1": 1, "oracle_top_k k=0.025": 2}),
    })  # fmt: skip


def perplexity(methods: Mapping[str, Any] = METHODS, decode: bool = True) -> dict[str, Any]:
    def part(nll: float) -> dict[str, Any]:
        curve = [{"start": s, "stop": s + 512, "nll": nll + 0.5 * math.exp(-s / 800), "tokens": 512}
                 for s in range(0, 4096, 512)]  # fmt: skip
        return {"perplexity": math.exp(nll), "nll": nll, "tokens": 4096, "by_position": curve}

    results = {
        label: {"prefill": part(2.0 + n / 8), "decode": part(2.25 + n / 8) if decode else None,
                "prefill_reads": reads(1.0), "decode_reads": reads(0.25) if decode else None,
                "seconds": {"read": 1.0, "per_token": 0.01}}
        for n, label in enumerate(methods)
    }  # fmt: skip
    files = [{"name": "book.txt", "sha256": "cd" * 32, "tokens": 4096, "characters": 16000}]
    return {**about("perplexity", methods), "files": files, "results": results}


FUSED: dict[str, Any] = {
    "dense": DENSE,
    "dense fuse=full_reuse": {**DENSE, "fuse": {"name": "full_reuse"}},
    "dense fuse=a3 fuse.ratio=0.3": {**DENSE, "fuse": {"name": "a3", "ratio": 0.3, "heads": "each"}},
    "dense fuse=a3 fuse.ratio=0.15": {**DENSE, "fuse": {"name": "a3", "ratio": 0.15, "heads": "each"}},
    "dense fuse=a3 evict=snapkv": {**DENSE, "fuse": {"name": "a3", "ratio": 0.15, "heads": "each"},
                                   "evict": {"name": "snapkv", "capacity": 1024}},
    "dense evict=snapkv": {**DENSE, "evict": {"name": "snapkv", "capacity": 1024}},
}  # fmt: skip


def fused(length: int = 4096, **config: Any) -> dict[str, Any]:
    """Two tasks; of "vt" dense gets 4 right, full_reuse 0, a3 1 and 3, evicted ones 1."""
    rights = dict(zip(FUSED, (4, 0, 3, 1, 1, 1), strict=True))

    def one(label: str, right: int) -> dict[str, Any]:
        ratio = FUSED[label].get("fuse", {}).get("ratio", 0.0)
        counts = {"tokens": 4000.0, "exact": 500.0, "recomputed": 4000 * ratio, "reused": 3400 - 4000 * ratio,
                  "computed": 100.0}  # fmt: skip
        kept = None if label == "dense" else {"right": 4, "kept": right}
        became = {"fusion": {**counts, "key_error": [None], "value_error": [0.1]}} if "fuse" in FUSED[label] else {}
        return result(label, [answer(n, float(n < right)) for n in range(4)], kept=kept, **became)

    tasks = {"vt": task({x: one(x, n) for x, n in rights.items()}), "qa_1": task({x: one(x, 4) for x in rights})}
    record = evaluation(tasks, length, methods=deepcopy(FUSED))
    record["config"] |= {"chunks": "system", "chunk_tokens": 512, **config}
    return record


def fusion(layers: int = 4) -> dict[str, Any]:
    """Two prompts of two tasks, 1000 tokens each; full_reuse chooses nothing."""
    methods = {x: deepcopy(m) for x, m in FUSED.items() if "fuse" in m and "evict" not in m}

    def one(ratio: float) -> dict[str, Any]:
        choice = {"chosen": 1000 * ratio, "hits_change": ratio or None, "hits_attention": 2 * ratio,
                  "attention_chosen": 1.5 * ratio}  # fmt: skip
        errors = {name: [None, *(n * (1 - ratio) / 10 for n in range(1, layers))] for name in LAYERS}
        tasks = {t: {**choice, "hits_attention": ratio * n} for n, t in enumerate(("vt", "qa_1"))}
        return {**choice, "layers": errors, "tasks": tasks}

    config = {"length": 1024, "samples": 1, "seed": 0, "chunk_tokens": 256, "chunks": "bos", "prefill_chunk_size": 512,
              "top": 64, "layers": {"change": [1, 2], "attention": [3]}}  # fmt: skip
    samples = [{"task": t, "number": 0, "tokens": 1000, "question_tokens": 40} for t in ("vt", "qa_1")]
    results = {x: one(m["fuse"].get("ratio", 0.0)) for x, m in methods.items()}
    return {**about("fusion", methods), "config": config, "tasks": {"vt": "RULER", "qa_1": "RULER"},
            "samples": samples, "results": results}  # fmt: skip


def fidelity(layers: int = 4, heads: int = 6, steps: int = 32) -> dict[str, Any]:
    draw = random.Random(0)

    def one(scale: float, first: int | None) -> dict[str, Any]:
        mean = [[scale * draw.random() for _ in range(heads)] for _ in range(layers)]
        kl = [scale * draw.random() ** 4 for _ in range(steps)]
        return {"kl": sum(kl) / steps, "kl_steps": kl, "first_divergence": first, "steps": steps,
                "prefill_reads": reads(1.0), "decode_reads": reads(0.25), "seconds": {"read": 1.0, "per_token": 0.01},
                "layer_error": {"mean": mean, "max": [[2 * v for v in row] for row in mean]}}  # fmt: skip

    scales = {"dense": (0.0, None), "streaming_llm window=0.1": (0.8, 3), "oracle_top_k k=0.025": (0.05, None)}
    return {**about("fidelity"), "results": {x: one(*how) for x, how in scales.items()}}


def attention(layers: int = 3, heads: int = 2, window: int | None = 128) -> dict[str, Any]:
    """Layer 1 slides where there is a window, layer 2's queries are unknown, head 1 of layer 0 retrieves."""
    draw = random.Random(0)

    def matrix(several: int | None = None, known: int = layers) -> list[Any]:
        one = [[[draw.random() for _ in range(several or 1)] for _ in range(heads)] for _ in range(layers)]
        found = [[v if several else v[0] for v in row] for row in one]
        return [row if n < known else None for n, row in enumerate(found)]

    def rows() -> dict[str, Any]:
        both = {name: [[draw.random() if j >= i or name == "recall" else None for j in range(layers)]
                       for i in range(layers)] for name in ("recall", "mass")}  # fmt: skip
        return {
            "count": 9, "sinks": matrix(), "windows": matrix(2), "distance": matrix(4), "tops": matrix(3),
            "cover": matrix(), "virtual_sink": [[0.0] * heads] * layers, "previous": matrix(known=2),
            "best": matrix(known=2), "match": matrix(2, known=2), "agreement": both,
        }  # fmt: skip

    score = [[0.75 * (n == 0 and h == 1) for h in range(heads)] for n in range(layers)]
    samples = [{"task": t, "number": n, "tokens": 4000, "answer_tokens": 3, "right": 2, "facts": {}}
               for t in ("single", "several") for n in range(2)]  # fmt: skip
    results = {
        "windows": [None, window, *[None] * layers][:layers], "sink_keys": 4, "last_keys": [64, 256],
        "top_keys": [16, 256, 1024], "cover": 0.95, "distance_edges": [0, 1, 2, 4, 8], "recent_queries": 1024,
        "taus": [0.45, 0.75], "agreement_keys": 256, "queries_unknown": {"2": "it does not rotate"},
        "rows": {"text": rows(), "answer": rows()},
        "retrieval": {t: {"score": score, "needle": matrix()} for t in ("single", "several")},
    }  # fmt: skip
    config = {"length": 4096, "samples": 2, "rows": 9, "seed": 0, "prefill_chunk_size": 512}
    content = {**about("attention"), "config": config, "samples": samples, "results": results}
    del content["methods"]
    return content


def routing(layers: Sequence[int] = (1, 2), levels: Sequence[int] = (1, 3)) -> dict[str, Any]:
    """Of converted layers. lambda is 0.75 at level 1 but in the first of two parts, which has no other level."""
    first, then = [1.0, *[0.0] * (len(levels) - 1)], [0.75, *[0.25 / (len(levels) - 1)] * (len(levels) - 1)]
    parts = {"lambda": [first, then], "weight": [first, [2 * x for x in then]]}
    whole = {name: [sum(column) / 2 for column in zip(*means, strict=True)] for name, means in parts.items()}
    one = {"gate": [2.0] * len(levels), **whole, "by_position": parts}
    content = {
        **about("mka routing"),
        "config": {"length": 16, "windows": 3, "limit": 3},
        "files": [{"name": "book.txt", "sha256": "cd" * 32, "tokens": 100, "characters": 400}],
        "options": {"variant": "block_mka", "routing": "learned"},
        "results": {"levels": list(levels), "tokens": 48,
                    "positions": [{"start": 0, "stop": 8}, {"start": 8, "stop": 16}],
                    "layers": {str(layer): deepcopy(one) for layer in layers}},
    }  # fmt: skip
    del content["methods"]
    return content


def sampling(layers: int = 3, heads: int = 2, window: int | None = 128) -> dict[str, Any]:
    """Of three presets and a few methods. Errors of a preset: 10 / (bits tables), of a group 0.8 of that, plus a tenth
    for each layer. Layer 1 has a window, unless it is None."""
    windows = [window if n == 1 else None for n in range(layers)]

    def each(value: Any) -> list[Any]:
        return [None if w is not None else [value] * heads for w in windows]

    def errors(value: float) -> dict[str, Any]:
        return {"errors": [None if w is not None else [value * (1 + n / 10)] * heads for n, w in enumerate(windows)],
                "mean": value, "median": value / 2}  # fmt: skip

    def one(line: str, error: float, total: float, values: float, **method: Any) -> dict[str, Any]:
        return {"method": method, "line": line, "weights": "no weights" not in line, **errors(error),
                "reads": {"total": total, "keys": total - values, "values": values, "metadata": 0.0},
                "layer_reads": [None if w is not None else total for w in windows]}  # fmt: skip

    def pig(line: str, bits: int, tables: int, scale: float) -> dict[str, Any]:
        read = tables / 2**bits
        mine = one(line, scale * 10 / (bits * tables), read, read / 3, name="magicpig", bits=bits, tables=tables)
        return {**mine, "sampled_head": each(read / 4), "sampled_group": each(read / 3), "search": read / 4,
                "attention": read * 3 / 4, "table_share": tables / 256}  # fmt: skip

    presets, more = [(8, 75), (10, 75), (10, 150)], [(7, 20), *((bits, 120) for bits in (7, 8, 9, 10, 11))]
    ways = {" share=own": ("magicpig share=own", 1.0), " share=group": ("magicpig share=group", 0.8)}
    controls = {" share=group centre=0": ("magicpig centre=0", 1.5),
                " share=group, no weights": ("magicpig, no weights", 2.0)}  # fmt: skip
    methods = {f"magicpig bits={bits} tables={tables}{name}": pig(line, bits, tables, scale)
               for pairs, kinds in ((presets, ways | controls), (more, ways)) for bits, tables in pairs
               for name, (line, scale) in kinds.items()}  # fmt: skip
    for k in (0.05, 0.2):
        methods |= {
            f"quest k={k}": one("quest", 0.02 / k, k + 0.06, k / 2, name="quest", k=k),
            f"oracle_top_k k={k}": one("oracle_top_k", 0.01 / k, 1 + k, k / 2, name="oracle_top_k", k=k),
            f"oracle_top_k k={k} choose=sample": one(
                "oracle_top_k choose=sample", 0.004 / k, 1 + k, k / 2, name="oracle_top_k", k=k
            ),
        }  # fmt: skip
    groups = [label for label in methods if label.endswith("share=group")]
    budgets = [0.05, 0.2]

    def estimates(scale: float) -> dict[str, Any]:
        found = [scale * 0.2, scale * 0.1]
        return {"budgets": budgets, "read": list(budgets), "errors": each(found), "mean": list(found),
                "median": [x / 2 for x in found]}  # fmt: skip

    cosines = {"min": each(0.5), "mean": each(0.75)}
    results = {
        "windows": windows, "shares": [0.1, 0.4],
        "mass": {"all": each([0.8, 0.95]), "without_first": each([0.7, 0.9])},
        "estimators": {"top_k": estimates(1.0), "iid": estimates(0.5), "systematic": estimates(0.25)},
        "ranges": {"value_distance": each(0.5), "logits": each(6.0)},
        "geometry": {"first_keys": {"min": each(1.0), "mean": each(1.0)}, "first_keys_other": cosines,
                     "mean_keys": cosines, "first_to_mean": each(-0.25), "first_value_norm": each(0.125)},
        "methods": methods, "top_k_same_keys": {x: errors(methods[x]["mean"] * 1.25) for x in groups},
        "top_k_in_place": {x: errors(methods[x]["mean"] * 1.5) for x in groups},
        "left_out": {"kascade": "no plan"}, "fitted": {"share": 0.04, "pairs": [[7, 20]]},
    }  # fmt: skip
    record = about("sampling")
    del record["methods"]
    config = {"length": 4096, "samples": 1, "rows": 4, "seed": 0, "centre": 1024, "ablations": True,
              "prefill_chunk_size": 512}  # fmt: skip
    samples = [{"task": name, "number": 0, "tokens": 4000, "first_token": 1} for name in ("vt", "cwe")]
    return {**record, "config": config, "tasks": {"vt": "RULER", "cwe": "RULER"}, "samples": samples,
            "results": results}  # fmt: skip


def save(folder: Path, record: Mapping[str, Any], name: str = "record.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(record))
    return path


def record_of(content: Mapping[str, Any], name: str = "record.json") -> Record:
    """As the report reads it."""
    check(content, KINDS[content["kind"]])
    return Record(name, content["kind"], json.loads(json.dumps(content)))


def cells(table: Table) -> dict[str, list[str]]:
    """Rows by their first cell: what the others say, with note and sign."""
    return {row[0].text: [" ".join(filter(None, (c.text, c.note, SIGNS[c.mark]))) for c in row[1:]]
            for row in table.rows}  # fmt: skip


def only(blocks: Iterable[Block], kind: type[Any], title: str = "") -> Any:
    """The one block of a kind (whose title, file name or text begins so)."""
    names = {Table: "title", Figure: "file", Text: "text"}
    (found,) = [b for b in blocks if isinstance(b, kind) and getattr(b, names[kind]).startswith(title)]
    return found
