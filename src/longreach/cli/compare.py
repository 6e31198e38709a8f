"""`longreach compare`: your model, your document, your machine: what each method changes and saves."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from longreach.cli.common import (
    add_document,
    add_graph,
    add_json,
    add_model,
    check_questions,
    load_model,
    parse_settings,
    positive,
    read_document,
)
from longreach.cli.show import Column, Table, console, duration, emit, percent, place, progress, waiting

if TYPE_CHECKING:
    from longreach.evals.compare import Comparison

NAME = "compare"
HELP = "measure each method beside dense attention on your model and document"
EXAMPLES = (
    "longreach compare --model mini --document notes.txt",
    "longreach compare --model ./Llama-3.1-8B-Instruct --document report.txt --question 'Who wrote it?' --json",
    "longreach compare --model mini --document notes.txt --methods streaming_llm --set streaming_llm.window=0.1",
)
QUESTION = "What is this text about?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_document(parser)
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help=f"default: {QUESTION!r}")
    parser.add_argument("--methods", metavar="A,B", help="methods to compare with dense (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE",
                        help="an option of a method, such as streaming_llm.window=0.1")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help="decode steps compared (default 32)")
    add_graph(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    chosen = [name.strip() for name in args.methods.split(",") if name.strip()] if args.methods is not None else None
    document = read_document(args.document)
    check_questions([args.question])
    with waiting("loading the model"):
        from longreach.methods.registry import METHODS, method_class

        options = parse_settings(args.set, "method", METHODS)
        for name in chosen or ():  # told before the model is loaded
            method_class(name)
        model, tokenizer = load_model(args)
        from longreach.adapters.transformers import prompts
        from longreach.evals.compare import Compare
        from longreach.records import environment

        shared, (rest,) = prompts(tokenizer, document, [args.question])
        task = Compare(model, tokenizer, shared + rest, steps=args.steps, methods=chosen, options=options,
                       graph=args.graph)  # fmt: skip
        where = environment(model.device)
    found = task.run(args.prefill_chunk_size, progress)
    if args.json:
        emit({**where, "prompt_tokens": len(task.prompt), "comparisons": [asdict(c) for c in found]})
        return 0
    out = console()
    out.print(
        f"{len(task.prompt)} tokens of prompt; each method is fed dense attention's own answer, token by token.\n"
    )
    shares = [Column(title, 7, wide=True) for title in ("K", "V", "meta")]
    table = Table(out, [Column("decode", 18, left=True), Column("KL", 9), Column("diverges at", 12), Column("bytes", 7),
                        *shares, Column("1st tok", 7), Column("per tok", 7)])  # fmt: skip
    table.header()
    prefill, steps = "", 0
    for c in found:
        if c.prefill["name"] != prefill:
            prefill, steps = c.prefill["name"], c.steps
            read = percent(c.prefill_reads.total if c.prefill_reads else None)
            out.print(f"-- {prefill} prefill: {duration(c.read_seconds)}, {read} of dense attention's bytes")
        table.row(_cells(c))
    ended = f", where dense attention's answer ended ({args.steps} were asked for)" if steps < args.steps else ""
    out.print(
        f"\nKL: mean of KL(dense || method) of the next-token distributions of {steps} decode steps{ended}, in nats. "
        "diverges at: the first token of the answer, counted from 0, that the method itself would have chosen "
        "differently. bytes: keys (K), values (V) and metadata that decoding read, over what dense attention reads. "
        "1st tok: time to the first token, which methods with the same prefill share. per tok: time per token after it."
    )
    out.print(place(where))
    return 0


def _cells(c: Comparison) -> list[str]:
    diverges = f"none in {c.steps}" if c.first_divergence is None else str(c.first_divergence)
    r = c.decode_reads
    shares = [percent(x) for x in (r.total, r.keys, r.values, r.metadata)] if r else ["-"] * 4
    first, token = duration(c.read_seconds), duration(c.seconds_per_token)
    return [c.decode["name"], f"{c.kl:.2g}", diverges, *shares, first, token]
