"""The commands that repeat the measurements."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from longreach.records.report.blocks import Block, Code, Heading, Text
from longreach.records.report.reading import VERBS, Record

OPTIONS = {
    "eval": (
        "length",
        "samples",
        "limit",
        "seed",
        "temperature",
        "draws",
        "batch",
        "prefill_chunk_size",
        "chunk_tokens",
        "chunks",
        "chunk_ends",
        "question",
    ),
    "perplexity": ("length", "decode_tokens", "limit", "prefill_chunk_size"),
    "fidelity": ("question", "steps", "prefill_chunk_size", "chunk_tokens"),
    "attention": ("length", "samples", "rows", "seed", "prefill_chunk_size"),
    "fusion": ("length", "samples", "seed", "chunk_tokens", "chunks", "prefill_chunk_size"),
    "sampling": ("length", "samples", "rows", "seed", "centre", "prefill_chunk_size"),
    "mka routing": ("length", "limit"),
}
PLAIN = ("attention", "sampling", "mka routing")  # kinds whose methods are not chosen by options
DEFAULTS = {"temperature": 0.0, "draws": 1, "chunk_ends": "text", "question": "prefill"}


def repeat(records: Sequence[Record]) -> list[Block]:
    """For each record its command and configuration."""
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
        blocks.append(Code(_command(record)))
        told = {"config": record["config"], **({"methods": record["methods"]} if record.kind not in PLAIN else {})}
        blocks.append(Code(json.dumps(told, indent=1)))
    return blocks


def _command(record: Record) -> str:
    """The command. Paths of the model and of data sets are placeholders."""
    config, model = record["config"], record["model"]
    folder = "mini" if model["name"] == "longreach-mini" else "DIRECTORY"
    named_model = [folder] if record.kind == "mka routing" else ["--model", folder, "--dtype", model["dtype"]]
    words = [*VERBS[record.kind].split(), *named_model, "--device", record["device"]["type"], *_input(record)]
    for name in OPTIONS[record.kind]:
        value = ",".join(map(str, record.lengths)) if name == "length" else config.get(name)
        if value is not None and value != DEFAULTS.get(name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--host"] if config.get("host") else []
    words += ["--device-memory", str(config["device_memory"])] if config.get("device_memory") else []
    words += ["--host-attend", str(config["host_attend"])] if config.get("host_attend") else []
    words += ["--no-ablations"] if config.get("ablations") is False else []
    words += [f"--{name.replace('_', '-')}" for name in ("layers", "past_end", "no_graph") if config.get(name) is True]
    # labels of compare may lack options; those of eval and perplexity are complete method specifications
    exact = record.kind == "fidelity"
    named = record["methods"].items() if record.kind not in PLAIN else ()
    methods = [w for label, m in named for w in ("--method", _spec(m) if exact else label)]
    lines = [shlex.join(words), *([shlex.join(methods)] if methods else []), "--output record.json"]
    return " \\\n    ".join(lines)


def _input(record: Record) -> list[str]:
    if record.kind in ("fusion", "sampling"):
        return ["--tasks", ",".join(dict.fromkeys(map(_task, record["tasks"])))]
    if record.kind == "eval":
        tasks = [entry.get("task", name) for name, entry in record["tasks"].items()]
        return ["--tasks", ",".join(dict.fromkeys(map(_task, tasks)))]
    if record.kind in ("perplexity", "mka routing"):
        return [word for file in record["files"] for word in ("--text", file["name"])]
    if record.kind == "attention":
        return []
    config = record["config"]
    if "documents" in config:
        system = ["--system", config["system"]] if config["system"] else []
        return ["--documents", *(document["name"] for document in config["documents"]), *system]
    return ["--document", str(config.get("document", "FILE"))]


def _spec(method: dict[str, Any]) -> str:
    """A method with all its options, as --method takes it."""
    slots = {slot: dict(method[slot]) for slot in ("prefill", "decode")}
    names = [slots[slot].pop("name") for slot in slots]
    settings = [f"{'prefill.' if slot == 'prefill' else ''}{option}={_value(value)}"
                for slot in ("decode", "prefill") for option, value in slots[slot].items()]  # fmt: skip
    for slot in ("fuse", "evict"):
        settings += [f"{slot}{'=' if option == 'name' else f'.{option}='}{_value(value)}"
                     for option, value in method.get(slot, {}).items()]  # fmt: skip
    return " ".join([names[1] if names[0] == "dense" else "/".join(names), *settings])


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _task(name: str) -> str:
    """The value of --tasks for a task; data sets need their file."""
    if name in ("qa_1", "qa_2", "longbench_v2"):
        return f"{name}=FILE"
    return "longbench=FILE" if name.startswith("longbench_") else name
