"""`longreach generation`: text that each method draws by itself, judged by dense attention."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from longreach.cli.common import (
    add_host,
    add_model,
    add_texts,
    cache_config,
    host_config,
    load_model,
    positive,
    seed,
    tell_compiled,
)
from longreach.cli.results import add_resumable, finish
from longreach.cli.show import Column, Table, console, duration, percent, place, progress, waiting

NAME = "generation"
HELP = "let each method generate thousands of tokens and measure how likely dense attention finds the text"
EXAMPLES = (
    "longreach generation --model mini --text book.txt --method 'mac tau=0.75' --method quest",
    "longreach generation --model ./Llama-3.1-8B --text book.txt --length 32768 --steps 8192 --limit 8 --method mac \\",
    "    --output generation.json",
)
FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_texts(parser)
    parser.add_argument("--length", type=positive, default=4096, metavar="N", help="tokens of a window (default 4096)")
    parser.add_argument("--steps", type=positive, default=2048, metavar="N", help="tokens that each method draws after "
                        "a window (default 2048); stop tokens are left out")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="of the draws (default 1, the "
                        "model's own distribution; 0 for the likeliest token)")  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N windows")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the draws, the same for all methods "
                        "(default 0)")  # fmt: skip
    add_host(parser)
    add_resumable(parser, "window")


def run(args: argparse.Namespace) -> int:
    from longreach.evals.methods import specs as parse_specs
    from longreach.records import Journal, check_writable

    specs, cache = parse_specs(args.method), cache_config(args)
    if args.output is not None:
        check_writable(args.output)
    with waiting("loading the model"):
        model, tokenizer = load_model(args)
        from longreach.evals.generation import Generation
        from longreach.evals.model_info import model_info
        from longreach.evals.perplexity import read_text
        from longreach.records import environment

        texts = [read_text(path, tokenizer) for path in args.text]
        task = Generation(model, tokenizer, texts, specs, length=args.length, steps=args.steps,
                          temperature=args.temperature, limit=args.limit, seed=args.seed, graph=args.graph,
                          cache=cache)  # fmt: skip
        where, about = environment(model.device), model_info(model, args.model)
    options = ("length", "steps", "temperature", "limit", "seed", "prefill_chunk_size")
    said = {
        "model": about,
        "config": {**{name: getattr(args, name) for name in options}, "windows": len(task.windows),
                   **host_config(args)},
        **where, "files": [text.to_json() for text in texts],
        "methods": {spec.label: spec.to_json() for spec in specs},
    }  # fmt: skip
    tell_compiled(cache, model.device, args.steps)
    with Journal(args.output, said) as journal:
        found = task.run(args.prefill_chunk_size, progress, done=journal.done, keep=journal.add)
    record = {"kind": "generation", "format": FORMAT, **said, "results": found}
    finish(args, record, show, journal=journal)
    return 0


def show(record: dict[str, Any]) -> None:
    """A row a method."""
    from longreach.evals.progress import counted

    out, config = console(), record["config"]
    table = Table(out, [Column("method", 21, left=True), Column("nll", 6), Column("over", 7), Column("last 4th", 8),
                        Column("repeats", 7), Column("diverges", 8), Column("keys", 6), Column("bytes", 6),
                        Column("per tok", 7, wide=True)])  # fmt: skip
    table.header()
    for label, x in record["results"].items():
        read, samples = x["decode_reads"], x["samples"]
        ways = [one["first_divergence"] for one in samples]
        at = median(config["steps"] if way is None else way for way in ways)
        times = [one["seconds_per_token"] for one in samples if one["seconds_per_token"] is not None]
        table.row([
            label, f"{x['nll']:.4f}", f"{x['over_dense']:+.4f}", f"{x['by_position'][-1]['nll']:.4f}",
            percent(x["repeated"]), "-" if set(ways) == {None} else f"{at:.0f}",
            percent(2 * read["keys"] if read else None), percent(read["total"] if read else None),
            duration(sum(times) / len(times) if times else None),
        ])  # fmt: skip
    out.print(
        f"\n{config['steps']} tokens drawn by each method after {counted(config['windows'], 'window')} of "
        f"{config['length']} tokens, at temperature {config['temperature']:g}. nll: nats a token of its own text "
        "under dense attention; over: difference to dense attention's own text; last 4th: nll of the last quarter. "
        "repeats: share of tokens completing an 8-gram already in the text. diverges: the first token unlike "
        "dense attention's, median of windows. keys, bytes: read while decoding, over dense attention's.",
        soft_wrap=True,
    )  # fmt: skip
    out.print(place(record))
