"""`longreach check`: whether longreach works with a model, from its configuration alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from longreach.cli.common import add_json
from longreach.cli.show import console, emit

if TYPE_CHECKING:
    from longreach.adapters.transformers import ModelFit
    from longreach.methods.call import ModelShape

NAME = "check"
HELP = "tell whether longreach works with a model, with which methods, and what memory a context takes"
EXAMPLES = ("longreach check ./Llama-3.1-8B-Instruct", "longreach check config.json --json", "longreach check mini")
CONTEXTS = (8192, 32_768, 131_072)  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model directory in transformers' format, a config.json, or "
                        "'mini'; no weights are read")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import inspect_model

    found = inspect_model(args.model)
    if args.json:
        kv_bytes = {} if found.shape is None else {str(n): found.kv_bytes(n) for n in CONTEXTS}
        emit({**asdict(found), "kv_bytes": kv_bytes})
    else:
        _show(found)
    return 0 if found.refused is None else 1


def _show(found: ModelFit) -> None:
    from rich.table import Table

    out = console()
    if found.refused is not None or found.shape is None:
        out.print(f"longreach does not work with {found.name}: {found.refused}")
        return
    shape, kinds = found.shape, list[str]()
    if full := shape.layers - len(found.windows):
        kinds.append(f"{full} layers of full attention")
    if found.windows:
        sizes = ", ".join(str(size) for size in sorted(set(found.windows.values())))
        kinds.append(
            f"{len(found.windows)} layers with a sliding window of {sizes} tokens, which is attended to exactly"
        )
    if found.recurrent:
        kinds.append(f"{found.recurrent} layers with a recurrent state, which transformers computes")
    out.print(f"longreach works with {found.name} ({_count(found.parameters)} parameters).")
    out.print(f"{'; '.join(kinds)}; {_heads(shape)}")
    if found.gpu is not None:
        out.print(f"On a GPU: {found.gpu}.")
    out.print()
    methods = Table("method", "with its default options", box=None, pad_edge=False)
    for method, reason in found.methods.items():
        plan = f"yes, with the plan {found.plans[method]}" if method in found.plans else "yes"
        plan = "yes, with a plan made of the first prompt" if method in found.automatic else plan
        methods.add_row(method, plan if reason is None else reason)
    out.print(methods)
    out.print()
    memory = Table("context", "keys and values in 16 bits, one sequence", box=None, pad_edge=False)
    for tokens in CONTEXTS:
        beyond = " (beyond the model's context)" if found.limit is not None and tokens > found.limit else ""
        memory.add_row(f"{tokens // 1024}K", f"{_size(found.kv_bytes(tokens))}{beyond}")
    out.print(memory)
    more = " and of recurrent layers" if found.recurrent else ""
    out.print(f"State of methods{more} takes memory in addition.")


def _heads(shape: ModelShape) -> str:
    if shape.values_in_keys:
        return (
            f"{shape.query_heads} query heads, and one latent vector of {shape.head_dim} channels a token for keys and "
            f"values (MLA)"
        )
    kinds = shape.by_layer or ((shape.kv_heads, shape.head_dim),)
    each = [f"{heads} KV heads of {dim}" for heads, dim in dict.fromkeys(kinds)]
    return f"{shape.query_heads} query and {' or '.join(each)}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit}"
    return str(parameters)
