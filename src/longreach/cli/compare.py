"""`longreach compare`: your model, your document, your machine: what each method changes and saves."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from longreach.cli.common import (
    add_json,
    add_model,
    emit,
    load_model,
    milliseconds,
    percent,
    progress,
    read_document,
)

NAME = "compare"
HELP = "measure each method beside dense attention on your model and document"
EXAMPLES = (
    "longreach compare --model mini --document notes.txt",
    "longreach compare --model ./Llama-3.1-8B-Instruct --document report.txt --question 'Who wrote it?' --json",
)
QUESTION = "What is this text about?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    parser.add_argument("--document", required=True, metavar="FILE", help="UTF-8 text; - for standard input")
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help=f"default: {QUESTION!r}")
    parser.add_argument("--methods", metavar="A,B", help="methods to compare (default: all)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps compared (default 32)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import prompts
    from longreach.errors import UnknownName
    from longreach.evals.compare import combinations, compare
    from longreach.methods.registry import METHODS
    from longreach.records import environment

    chosen = args.methods.split(",") if args.methods else None
    for name in chosen or ():
        if name not in METHODS:
            raise UnknownName("method", name, METHODS)
    document = read_document(args.document)
    model, tokenizer = load_model(args)
    shared, (rest,) = prompts(tokenizer, document, [args.question])
    prompt = shared + rest
    with progress("reading", (len(prompt) - 1) * len(combinations(chosen))) as advance:
        found = compare(model, tokenizer, prompt, steps=args.steps, methods=chosen, progress=advance)
    where = environment(model.device)
    if args.json:
        emit({**where, "prompt_tokens": len(prompt), "comparisons": [asdict(c) for c in found]})
        return 0
    from rich.console import Console

    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{len(prompt)} tokens of prompt, {found[0].steps} decode steps on dense attention's own answer\n")
    out.print(
        f"[bold]{'prefill':14}{'decode':14}{'KL':>9}{'diverges':>9}{'prefill':>9}{'decode':>8}{'first':>9}{'token':>8}[/]"
    )
    for c in found:
        step = "never" if c.first_divergence is None else str(c.first_divergence)
        out.print(
            f"{c.prefill:14}{c.decode:14}{c.kl:>9.2g}{step:>9}{percent(c.prefill_fraction):>9}"
            f"{percent(c.decode_fraction):>8}{milliseconds(c.first_token_seconds):>9}{milliseconds(c.seconds_per_token):>8}"
        )
    out.print(
        "\nKL: mean KL(dense || method) of next-token distributions, nats. diverges: first step whose most likely "
        "token differs. prefill, decode: bytes read over dense attention's. first: time to first token. token: "
        "time per token.\n"
        f"Measured just now on {where['device']['name']}, {where['device']['threads']} threads."
    )
    return 0
