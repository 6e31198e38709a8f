"""The JSON shape of a record of `longreach fusion`."""

from __future__ import annotations

from typing import Any

from longreach.records.report.schema import Each, Items, Maybe, Mismatch, Number, check

SHARE, SIZE = Number(0, 1), Number(0, 1 << 62)
LAYERS = ("attention", "key", "value")  # whose errors a report shows
CHOICE = {"chosen": SIZE, "hits_change": Maybe(SHARE), "hits_attention": Maybe(SHARE), "attention_chosen": Maybe(SHARE)}
RESULT = {**CHOICE, "layers": {name: Items(Maybe(SIZE), least=1) for name in LAYERS}, "tasks": Each(CHOICE, least=1)}
FUSION = {
    "samples": Items({"task": str, "number": int, "tokens": int, "question_tokens": int}, least=1),
    "tasks": Each(str, least=1),
    "results": Each(RESULT, least=1),
}
FUSION_CONFIG = {"length": int, "top": int, "chunk_tokens": int, "chunks": str,
                 "layers": {name: Items(int, least=1) for name in ("change", "attention")}}  # fmt: skip


def check_fusion(content: dict[str, Any]) -> None:
    """Raise Mismatch unless each method has a result, with the same layers and tasks; FUSION is checked before."""
    results, tasks = content["results"], content["tasks"]
    layers = len(next(iter(results.values()))["layers"]["attention"])
    for label, method in content["methods"].items():
        if label not in results:
            raise Mismatch(f"results.{label} is missing")
        if "fuse" not in method:
            raise Mismatch(f"methods.{label}.fuse is missing")
    if min(sample["tokens"] for sample in content["samples"]) < 1:
        raise Mismatch("samples: expected at least 1 token each")
    for label, mine in results.items():
        if label not in content["methods"]:
            raise Mismatch(f"methods.{label} is missing, of which there are results")
        for name in LAYERS:
            check(mine["layers"][name], Items(Maybe(SIZE), exactly=layers), f"results.{label}.layers.{name}")
        for task in tasks:
            if task not in mine["tasks"]:
                raise Mismatch(f"results.{label}.tasks.{task} is missing")
