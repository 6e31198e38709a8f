"""How to measure it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from longreach.records.report.blocks import Block, Code, Heading, Text
from longreach.records.report.reading import VERBS, Record


def repeat(records: Sequence[Record]) -> list[Block]:
    """For each record its configuration, and of evaluations the command."""
    blocks: list[Block] = []
    for record in records:
        commit = record["commit"] or "an unknown commit"
        dirty = ", with changes that are in no commit" if record["dirty"] else ""
        model = record["model"]
        blocks.append(Heading(3, record.name))
        blocks.append(Text(
            f"{VERBS[record.kind]} of longreach at {commit}{dirty}, with the versions above and the model "
            f"{model['name']} whose weights hash to {model['sha256']}."
        ))  # fmt: skip
        if record.kind == "eval":
            blocks.append(Code(_command(record)))
        told = {"config": record["config"], "methods": record["methods"]}
        blocks.append(Code(json.dumps(told, indent=1)))
    return blocks


def _command(record: Record) -> str:
    config, model = record["config"], record["model"]
    folder = "mini" if model["name"] == "longreach-mini" else "DIRECTORY"
    tasks = ",".join(dict.fromkeys(_task(name) for name in record["tasks"]))
    words = ["longreach", "eval", "--model", folder, "--device", record["device"]["type"], "--dtype", model["dtype"],
             "--tasks", tasks]  # fmt: skip
    for name in ("length", "samples", "limit", "seed", "temperature", "draws", "batch", "prefill_chunk_size"):
        value = config.get(name)
        default = {"temperature": 0.0, "draws": 1}.get(name)
        if value is not None and value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--no-graph"] if config.get("no_graph") else []
    methods = [w for label in record.labels for w in ("--method", label)]
    lines = [shlex.join(words), shlex.join(methods), "--output record.json"]
    return " \\\n    ".join(lines)


def _task(name: str) -> str:
    """What --tasks takes for a task; data sets take their file."""
    if name in ("qa_1", "qa_2", "longbench_v2"):
        return f"{name}=FILE"
    return "longbench=FILE" if name.startswith("longbench_") else name
