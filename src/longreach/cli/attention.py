"""`longreach attention`: what sparse attention depends on, measured on a model: sinks, recency, heavy keys, reuse."""

from __future__ import annotations

import argparse
from typing import Any

from longreach.cli.common import add_length, add_model, load_model, positive
from longreach.cli.results import add_results, check_figures, finish
from longreach.cli.show import Column, Table, console, percent, place, progress, waiting

NAME = "attention"
HELP = "show what sparse attention depends on in a model: sinks, recency, heavy keys, retrieval heads, reuse"
EXAMPLES = (
    "longreach attention --model mini --length 4096 --samples 8 --figures attention",
    "longreach attention --model ./Llama-3.1-8B --length 32768 --output attention.json",
)
FORMAT = 1
BEST = 5  # retrieval heads that are named below the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_length(parser)
    parser.add_argument("--samples", type=positive, default=8, metavar="N",
                        help="prompts of each of two needle tasks (default 8)")  # fmt: skip
    parser.add_argument("--rows", type=positive, default=64, metavar="N", help="positions measured in the last "
                        "quarter of each prompt's text, with all those of its answer (default 64)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and positions (default 0)")
    add_results(parser, figures=True)


def run(args: argparse.Namespace) -> int:
    from longreach.records import check_writable
    from longreach.records.report.attention import attention

    if args.output is not None:
        check_writable(args.output)
    check_figures(args.figures)
    with waiting("loading the model"):
        model, tokenizer = load_model(args)
    with waiting("making prompts"):
        from longreach.evals.attention import Attention
        from longreach.evals.model_info import model_info
        from longreach.records import environment

        task = Attention(model, tokenizer, length=args.length, samples=args.samples, rows=args.rows, seed=args.seed)
        where = environment(model.device)
        about = model_info(model, args.model)
    found = task.run(args.prefill_chunk_size, progress)
    config = {"length": args.length, "samples": args.samples, "rows": args.rows, "seed": args.seed,
              "prefill_chunk_size": args.prefill_chunk_size}  # fmt: skip
    record = {"kind": NAME, "format": FORMAT, "model": about, "config": config, **where, **found}
    finish(args, record, show, blocks=attention)
    return 0


def show(record: dict[str, Any]) -> None:
    """A table by layer for each kind of rows, the best retrieval heads, and what the words mean."""
    from longreach.records.report.attention import mean, retrieval_heads
    from longreach.records.report.attention_figures import part

    out, results = console(), record["results"]
    heads = retrieval_heads(results)
    first, last, top = results["sink_keys"], results["last_keys"][-1], results["top_keys"].index(256)
    sunk = any(any(map(any, rows["virtual_sink"])) for rows in results["rows"].values())
    columns = [Column("layer", 5), *([Column("window", 6)] if any(results["windows"]) else []),
               Column(f"first {first}", 7), *([Column("v. sink", 7)] if sunk else []), Column(f"last {last}", 8),
               Column("top 256", 7), Column("95% in", 6), Column("q prev", 6), Column("q best", 6),
               Column("match", 6, wide=True)]  # fmt: skip
    for kind, what in (("text", "text, the last quarter before the question"), ("answer", "answer, as it is written")):
        rows = results["rows"][kind]
        out.print(f"-- {rows['count']} rows of the {what}")
        table = Table(out, [*columns, *([Column("retrieves", 10)] if kind == "answer" else [])])
        table.header()
        for n, window in enumerate(results["windows"]):
            table.row([
                str(n), *([str(window or "-")] if any(results["windows"]) else []), percent(mean(rows["sinks"][n])),
                *([percent(mean(rows["virtual_sink"][n]))] if sunk else []),
                percent(mean(part(rows["windows"], -1)[n])), percent(mean(part(rows["tops"], top)[n])),
                _number(mean(rows["cover"][n]), 0),
                *(_number(mean(rows[name][n]), 2) for name in ("previous", "best")),
                percent(mean(part(rows["match"], 0)[n])), *([_best(heads, n)] if kind == "answer" else []),
            ])  # fmt: skip
        out.print()
    named = [f"layer {n} head {h} {score:.0%}" for score, n, h in heads[:BEST] if score > 0]
    samples = record["samples"]
    right, tokens = (sum(s[name] for s in samples) for name in ("right", "answer_tokens"))
    out.print(f"Retrieval heads: {', '.join(named) or 'none'} of the answer's tokens (the heaviest key is the needle's "
              f"token that comes next). The model would have chosen {right} of {tokens} of them itself.")  # fmt: skip
    for layer, why in results["queries_unknown"].items():
        out.print(f"Layer {layer} has no similarities of queries: {why}.")
    sink = ", v. sink: the virtual sink's share of the whole" if sunk else ""
    out.print(
        f"\nMeans over query heads; shares are of the attention on keys{sink}. first: positions of the text; last: "
        f"keys before the row; top: the heaviest; 95% in: number of heaviest keys with 95% of it. q: cosine similarity "
        f"of queries before rotation to the previous one and to the best of the last {results['recent_queries']}; "
        f"match: rows with a match for MAC-Attention (tau {results['taus'][0]:g}). retrieves: the "
        f"layer's best retrieval head, and its score. {len(samples)} prompts; heads one by one, curves and agreement "
        f"of layers are in the record and the pictures."
    )
    out.print(place(record))


def _best(heads: list[tuple[float, int, int]], layer: int) -> str:
    """Of heads in falling order: "3: 100%"."""
    score, head = next(((score, h) for score, n, h in heads if n == layer), (None, 0))
    return "-" if not score else f"{head}: {score:.0%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
