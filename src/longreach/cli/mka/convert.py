"""`longreach mka convert`: a model folder with MKA's layers, and its distance from the original."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from longreach.cli.common import add_json
from longreach.cli.mka.common import add_folders, add_prompts, distance_line, layer_numbers, prompts_of, stored_dtype
from longreach.cli.show import console, emit, place, progress, waiting
from longreach.errors import InvalidInput, UnknownName
from longreach.methods.values import value_of

HELP = "write a model with MKA's layers, and measure its distance from the original"
EXAMPLES = (
    "longreach mka convert mini fastmka --out mini-fastmka",
    "longreach mka convert mini fastmka 'tiers=[1,2,3]' --out mini-fastmka-3",
    "longreach mka convert mini block_mka block=32 window=256 recall=index --out mini-block --json",
    "longreach mka convert ./Llama-3.1-8B block_mka --out llama-block --layers 2,3,4,5 --text book.txt --length 8192",
)
FORMAT = 1
ADAPTER = "longreach.adapters.transformers.mka"  # imports transformers, so only when a model is loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "the original")
    parser.add_argument("variant", metavar="VARIANT", help="fastmka, mka, block_mka; to compare with: mha, gqa, mqa, "
                        "mla")  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="OPTION=VALUE", help="options of the variant, such as window=256 "
                        "or tiers=[1,3]; docs/mka.md lists them")  # fmt: skip
    parser.add_argument("--layers", type=layer_numbers, metavar="N,N", help="layers to convert (default: all)")
    add_prompts(parser, "read to measure the distance", 4)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = parsed(args.names)
    check, change = conversion(args.variant, options, args.layers)
    from longreach.train.mka.checkpoint import check_free

    check_free(args.out)
    with waiting("loading the model"):
        import torch

        from longreach.adapters.transformers import device_of, load, save
        from longreach.evals.model_info import model_info
        from longreach.records import environment
        from longreach.train.mka.checkpoint import CONVERSION, free_folder, write_json
        from longreach.train.mka.data import batches_of
        from longreach.train.mka.distance import compare, states_of

        dtype = stored_dtype(args.model)
        model, tokenizer = load(args.model, device=str(device_of(args.device)))
        about = {"original": model_info(model, args.model), **environment(model.device)}
    check(model)  # before the model reads anything
    prompts = prompts_of(args, model, tokenizer)
    batches = batches_of(prompts.prompts)
    with progress("reading with the original", prompts.tokens) as advance:
        before = states_of(model, batches, advance)
    torch.manual_seed(args.seed)
    change(model)
    with progress("measuring", prompts.tokens) as advance:
        found = compare(states_of(model, batches, advance), before)
    added = sum(p.numel() for p in model.parameters()) - about["original"]["parameters"]
    record = {
        "kind": "mka conversion", "format": FORMAT, "variant": args.variant,
        "options": getattr(model.config, "mka", None),
        "given": options, "layers": args.layers,
        "added_parameters": added, "distance": found.to_json(),
        "measured_on": {"data": prompts.data, "sha256": prompts.sha256, "seed": args.seed}, **about,
    }  # fmt: skip
    free_folder(args.out)
    save(model, tokenizer, args.out, dtype=dtype)
    write_json(args.out / CONVERSION, record)
    if args.json:
        emit({**record, "out": str(args.out)})
    else:
        show(record, str(args.out))
    return 0


def conversion(
    variant: str, options: dict[str, Any], layers: tuple[int, ...] | None
) -> tuple[Callable[[Any], None], Callable[[Any], Any]]:
    """Two functions of a model: one checks that it can be converted, the other converts it in place.

    Raises UnknownName and InvalidInput for options that are wrong for any model.
    """
    from longreach.mka.baselines import BASELINES
    from longreach.mka.config import VARIANTS, MKAConfig

    if variant not in (*VARIANTS, *BASELINES):
        raise UnknownName("variant", variant, (*VARIANTS, *BASELINES))
    if layers is not None and "layers" in options:
        raise InvalidInput(f"layers={options['layers']} and --layers: expected one of them")
    chosen = options if layers is None else {**options, "layers": layers}
    if variant in VARIANTS:
        MKAConfig.make(variant, **{name: tuple(x) if isinstance(x, list) else x for name, x in chosen.items()})
    else:
        known = {"gqa": ("kv_heads",), "mla": ("rank", "rotated")}.get(variant, ())
        for name in options:
            if name not in known:
                raise UnknownName(f"option of {variant}", name, known)
        if layers is not None:
            raise InvalidInput(f"--layers: {variant} replaces the attention of all layers; leave it out")
    return (
        lambda model: import_module(ADAPTER).check_convert(model, variant, **chosen),
        lambda model: import_module(ADAPTER).convert(model, variant, **chosen),
    )


def parsed(settings: list[str]) -> dict[str, Any]:
    """["window=256"] -> {"window": 256}. Raises InvalidInput for what is no setting, or set twice."""
    found = dict[str, Any]()
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise InvalidInput(f"{setting!r}: expected OPTION=VALUE, such as window=256")
        if name.strip() in found:
            raise InvalidInput(f"{name.strip()} is set twice; keep one of them")
        found[name.strip()] = value_of(value.strip(), name.strip())
    return found


def show(record: dict[str, Any], folder: str) -> None:
    """What was written, and its distance."""
    out, found = console(), record["distance"]
    name = record["original"]["name"]
    out.print(f"{folder}: {name} as {record['variant']}, {record['added_parameters']:+d} parameters.", soft_wrap=True)
    where = f"{record['measured_on']['data']} ({found['tokens']} tokens)"
    if found["identical"]:
        out.print(f"Equal to the original bit for bit, checked on {where}.", soft_wrap=True)
    else:
        out.print(f"Distance from the original on {where}:\n{distance_line(found)}.", soft_wrap=True)
    out.print(place(record), soft_wrap=True)
