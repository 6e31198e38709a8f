"""`longreach mka index`: the index of blocks, distilled from the model's own dense attention."""

from __future__ import annotations

import argparse
from typing import Any

from longreach.cli.common import add_json, positive
from longreach.cli.mka.common import add_folders, add_prompts, prompts_of, stored_dtype, write_conversion
from longreach.cli.show import Column, Table, console, duration, emit, percent, place, progress, waiting
from longreach.errors import InvalidInput

HELP = "train the index by which a converted model recalls blocks (recall=index)"
EXAMPLES = (
    "longreach mka index mini-block --out mini-indexed",
    "longreach mka index llama-block --out llama-indexed --text book.txt --length 8192 --prompts 64 --steps 400",
)
FORMAT = 1
RECORD = "index.json"
HELD_OUT = 4  # one of 4 prompts is measured on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "a model converted with recall=index")
    add_prompts(parser, "read densely, for the index to learn from", 8)
    parser.add_argument("--steps", type=positive, default=150, metavar="N",
                        help="updates of each layer's index (default 150)")  # fmt: skip
    parser.add_argument("--rows", type=positive, default=128, metavar="N",
                        help="rows of a prompt, half of them its last ones (default 128)")  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=4e-3, metavar="X", help="the first one (default 0.004)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.train.mka.checkpoint import check_free

    check_free(args.out)
    with waiting("loading the model"):
        import time

        import torch

        from longreach.adapters.transformers import device_of, load, save
        from longreach.evals.model_info import model_info
        from longreach.records import environment
        from longreach.train.mka.budgets import levels_of
        from longreach.train.mka.checkpoint import free_folder, write_json
        from longreach.train.mka.dense_rows import Cut
        from longreach.train.mka.index import check_index, distil
        from longreach.train.mka.shares import COUNTS

        model, tokenizer = load(args.model, device=str(device_of(args.device)))
        check_index(model)
        config = next(iter(levels_of(model).values())).config
        about = {"model": model_info(model, args.model), **environment(model.device)}
    counts = sorted({*COUNTS, config.blocks})
    prompts = prompts_of(args, model, tokenizer, Cut(config.block, config.window, args.rows, max(counts)).least)
    held_out = prompts.prompts[HELD_OUT - 1 :: HELD_OUT] or prompts.prompts[1:]
    if not held_out:
        raise InvalidInput("one prompt is too few: some are measured on, and not trained on; raise --prompts")
    names = {prompt.name for prompt in held_out}
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    found = distil(model, [p for p in prompts.prompts if p.name not in names], held_out, steps=args.steps,
                   learning_rate=args.learning_rate, rows=args.rows, counts=counts, seed=args.seed,
                   progress=progress)  # fmt: skip
    record = {
        "kind": "mka index", "format": FORMAT, **found, "seconds": time.perf_counter() - started,
        "data": prompts.data, "sha256": prompts.sha256, "seed": args.seed, **about,
    }  # fmt: skip
    free_folder(args.out)
    save(model, tokenizer, args.out, dtype=stored_dtype(args.model))
    write_conversion(args.model, args.out)
    write_json(args.out / RECORD, record)
    if args.json:
        emit({**record, "out": str(args.out)})
    else:
        show(record, config.blocks)
        console().print(f"{args.out}: written in {duration(record['seconds'])}.", soft_wrap=True)
    return 0


def show(record: dict[str, Any], blocks: int) -> None:
    """Shares of far mass that ways of recall find, a row a layer."""
    out, before, after = console(), record["before"], record["after"]
    others = [name for name in before["all"] if name not in ("far", "index")]
    columns = [Column("before", 6), Column("after", 6), *(Column(name, max(6, len(name))) for name in others)]
    table = Table(out, [Column("layer", 5, left=True), Column("far", 6), *columns])
    table.header()
    rows = [*((n, before["layers"][n], after["layers"][n]) for n in before["layers"])]
    for name, first, last in [*rows, ("all", before["all"], after["all"])]:
        shares = [first["index"], last["index"], *(first[other] for other in others)]
        table.row([name, percent(first["far"]), *(percent(share[str(blocks)]) for share in shares)])
    out.print(
        f"\nfar: share of dense attention's weights beyond the window of {record['window']} keys. Other columns: share "
        f"of it in the {blocks} recalled blocks of {record['block']} keys, by the index before and after "
        f"{record['steps']} steps, by the best blocks (oracle), by other ways of recall and by chance; "
        f"{before['rows']} rows a layer of {record['held_out']} prompts that were not trained on.",
        soft_wrap=True,
    )
    out.print(place(record), soft_wrap=True)
