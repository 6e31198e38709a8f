"""`longreach dialogue`: questions for needles over thousands of decoded tokens, with every method."""

from __future__ import annotations

import argparse
from typing import Any

from longreach.cli.common import add_model, count, load_model, positive
from longreach.cli.results import add_resumable, finish
from longreach.cli.show import Column, Table, console, duration, percent, place, progress, waiting

NAME = "dialogue"
HELP = "ask for needles one after another while decoding: does a method hold out over thousands of tokens?"
EXAMPLES = (
    "longreach dialogue --model mini --method 'mac tau=0.75' --method quest",
    "longreach dialogue --model ./Llama-3.1-8B --length 32768 --questions 100 --samples 4 --method mac \\",
    "    --output dialogue.json",
)
FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--length", type=positive, default=4096, metavar="N", help="tokens of the text with the "
                        "needles (default 4096); questions and answers are added to it")  # fmt: skip
    parser.add_argument("--questions", type=positive, default=50, metavar="N", help="needles, one question for each "
                        "(default 50: some 2000 tokens)")  # fmt: skip
    parser.add_argument("--own-answers", action="store_true", help="feed each method its own answers; by default "
                        "all are fed the right ones")  # fmt: skip
    parser.add_argument("--samples", type=positive, default=1, metavar="N", help="dialogues (default 1)")
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="which texts and needles (default 0)")
    add_resumable(parser, "dialogue")


def run(args: argparse.Namespace) -> int:
    from longreach.evals.methods import specs as parse_specs
    from longreach.records import Journal, check_writable

    specs = parse_specs(args.method)
    if args.output is not None:
        check_writable(args.output)
    with waiting("loading the model"):
        model, tokenizer = load_model(args)
        from longreach.evals.dialogue import Dialogue
        from longreach.evals.model_info import model_info
        from longreach.records import environment

        task = Dialogue(model, tokenizer, specs, length=args.length, questions=args.questions, samples=args.samples,
                        seed=args.seed, own=args.own_answers, graph=args.graph)  # fmt: skip
        where, about = environment(model.device), model_info(model, args.model)
    said = {
        "model": about,
        "config": {name: getattr(args, name) for name in ("length", "questions", "samples", "seed", "own_answers",
                                                          "prefill_chunk_size")},
        **where, "methods": {spec.label: spec.to_json() for spec in specs},
        "tokens": [{"prompt": len(one.prompt), "decoded": len(one.fed)} for one in task.scripts],
    }  # fmt: skip
    with Journal(args.output, said) as journal:
        found = task.run(args.prefill_chunk_size, progress, done=journal.done, keep=journal.add)
    record = {"kind": "dialogue", "format": FORMAT, **said, "results": {k: summary(v) for k, v in found.items()}}
    finish(args, record, show, journal=journal)
    return 0


def summary(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A method over all dialogues: score, the share of right answers, with its interval, and in each quarter of a
    dialogue; means of the rest; `samples` as they were measured."""
    from longreach.evals.read_shares import shares
    from longreach.records import wilson

    right = [x for part in parts for x in part["right"]]
    means = {name: sum(part[name] for part in parts) / len(parts) for name in ("nll", "nll_answers", "kl", "agree")}
    quarters = [_share([x for part in parts for x in _quarter(part["right"], n)]) for n in range(4)]
    return {
        "score": sum(right) / len(right), "interval_95": list(wilson(sum(right), len(right))), "by_quarter": quarters,
        **means, "decode_reads": shares([part["bytes"] for part in parts]), "samples": parts,
    }  # fmt: skip


def _quarter(values: list[bool], number: int) -> list[bool]:
    return values[len(values) * number // 4 : len(values) * (number + 1) // 4]


def _share(values: list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def show(record: dict[str, Any]) -> None:
    """A row a method."""
    out = console()
    table = Table(out, [Column("method", 28, left=True), Column("right", 7), Column("last 4th", 8), Column("KL", 8),
                        Column("agree", 7), Column("keys", 7), Column("bytes", 7), Column("per tok", 7)])  # fmt: skip
    table.header()
    for label, x in record["results"].items():
        read = x["decode_reads"]
        steps = [part["seconds_per_token"] for part in x["samples"] if part["seconds_per_token"] is not None]
        table.row([
            label, percent(x["score"]), percent(x["by_quarter"][3]), f"{x['kl']:.4f}", percent(x["agree"]),
            percent(2 * read["keys"] if read else None), percent(read["total"] if read else None),
            duration(sum(steps) / len(steps) if steps else None),
        ])  # fmt: skip
    config, tokens = record["config"], record["tokens"]
    decoded = sum(x["decoded"] for x in tokens) / len(tokens)
    out.print(
        f"\n{several(config['samples'], 'dialogue')} of {several(config['questions'], 'question')} after "
        f"{config['length']} tokens of text, "
        f"{decoded:.0f} tokens decoded in each. right: answers in which every token was the likeliest; last 4th: of "
        "the last quarter of a dialogue. KL: of next-token distributions, dense attention's first, in nats a decoded "
        "token; agree: the same likeliest token. keys, bytes: read while decoding, over dense attention's.",
        soft_wrap=True,
    )  # fmt: skip
    out.print(place(record))
