"""`longreach perplexity`: language modelling over long texts with every method, in prefill and while decoding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from longreach.cli.common import (
    HOST_PASS_TOKENS,
    add_chunk_size,
    add_graph,
    add_host,
    add_json,
    add_methods,
    add_model,
    add_texts,
    cache_config,
    exit_code,
    host_config,
    load_model,
    pass_tokens,
    positive,
)
from longreach.cli.show import Column, Table, console, duration, emit, percent, place, progress, waiting

NAME = "perplexity"
HELP = "measure how well each method predicts long texts, in prefill and while decoding"
EXAMPLES = (
    "longreach perplexity --model mini --text book.txt --method streaming_llm",
    "longreach perplexity --model ./Llama-3.1-8B --text a.txt --text b.txt --length 32768 --decode-tokens 1024 \\",
    "    --method 'oracle_top_k k=0.025' --output perplexity.json",
)
FAILURES = 10  # windows that failed and are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_texts(parser)
    parser.add_argument("--length", type=positive, default=4096, metavar="N", help="tokens of a window (default 4096)")
    parser.add_argument("--decode-tokens", type=int, default=256, metavar="N", help="tokens at a window's end that are "
                        "decoded one by one (default 256; 0 for none)")  # fmt: skip
    add_methods(parser)
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N windows")
    add_chunk_size(parser, default=None, more=f", with --host {HOST_PASS_TOKENS}")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write a record for `longreach report`; the same command continues an interrupted run",
    )
    add_host(parser)
    add_graph(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.evals.methods import specs as parse_specs
    from longreach.records import check_writable

    specs, cache, chunk = parse_specs(args.method), cache_config(args), pass_tokens(args)
    if args.output is not None:
        check_writable(args.output)
    with waiting("loading the model"):
        model, tokenizer = load_model(args)
        from longreach.evals.model_info import model_info
        from longreach.evals.on_text import measured
        from longreach.evals.perplexity import Perplexity, read_text
        from longreach.records import environment

        texts = [read_text(path, tokenizer) for path in args.text]
        task = Perplexity(model, tokenizer, texts, specs, length=args.length, decode_tokens=args.decode_tokens,
                          limit=args.limit, graph=args.graph, cache=cache)  # fmt: skip
        where = environment(model.device)
        about = model_info(model, args.model)
    said = {
        "model": about,
        "config": {"length": args.length, "decode_tokens": args.decode_tokens, "windows": len(task.windows),
                   "limit": args.limit, "prefill_chunk_size": chunk, **host_config(args)},
        **where, "files": [text.to_json() for text in texts],
    }  # fmt: skip
    record = measured(task, said, chunk, args.output, progress)
    emit(record) if args.json else show(record)
    failed = record["failed"]
    return exit_code(len({one["window"] for one in failed}), "windows", args.output)


def show(record: dict[str, Any]) -> None:
    """A row a method, then perplexity by position."""
    out = console()
    columns = [Column("prefill", 9), Column("decode", 9), Column("over dense", 10), Column("bytes", 7),
               Column("per tok", 7)]  # fmt: skip
    table = Table(out, [Column("method", 32, left=True), *columns])
    table.header()
    results = record["results"]
    dense = results["dense"]["decode"] if "dense" in results else None
    for label, result in results.items():
        name = f"[{list(record['methods']).index(label) + 1}] {label}"
        read, decoded = result["prefill"], result["decode"]
        bytes_read = result["decode_reads"]
        table.row([
            name, f"{read['perplexity']:.4g}", f"{decoded['perplexity']:.4g}" if decoded else "-",
            f"{decoded['nll'] - dense['nll']:+.4f}" if decoded and dense else "-",
            percent(bytes_read["total"] if bytes_read else None), duration(result["seconds"]["per_token"]),
        ])  # fmt: skip
    for phase in ("prefill", "decode"):
        _show_positions(out, record, phase)
    config, files = record["config"], record["files"]
    characters = sum(f["characters"] for f in files) / sum(f["tokens"] for f in files)
    out.print(
        f"\n{config['windows']} windows of {config['length']} tokens ({characters:.2f} characters a token). prefill: "
        f"perplexity of all tokens read with the prefill method. decode: of the last {config['decode_tokens']} of each "
        f"window, fed one by one; over dense: mean nats a token above dense attention's for the same tokens. bytes: "
        f"read in decoding, over what dense attention reads. Perplexities of other tokenizers do not compare.",
        soft_wrap=True,
    )
    for one in record["failed"][:FAILURES]:
        out.print("window {window}, {method}: {error}".format(**one), soft_wrap=True)
    if record["failed"]:
        out.print("Windows that failed with a method are left out for all; the record names every one.")
    out.print(place(record))


def _show_positions(out: Any, record: dict[str, Any], phase: str) -> None:
    """Perplexity in stretches of the window, a column a method; those that read with one prefill have one column."""
    from longreach.evals.perplexity import perplexity

    columns: dict[str, list[str]] = {}
    stretches: list[str] = []
    methods = record["methods"]
    measured = [label for label in methods if record["results"].get(label, {}).get(phase)]
    alike = {json.dumps(methods[x]["prefill"]) if phase == "prefill" else x: x for x in reversed(measured)}
    for number, label in enumerate(methods, 1):
        if label in alike.values():
            parts = record["results"][label][phase]["by_position"]
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            stretches = [f"{pair[0]['start']}-{pair[-1]['stop'] - 1}" for pair in pairs]
            means = [sum(p["nll"] * p["tokens"] for p in pair) / sum(p["tokens"] for p in pair) for pair in pairs]
            columns[f"[{number}]"] = [f"{perplexity(mean):.4g}" for mean in means]
    if columns:
        out.print(f"\nperplexity by position in the window, {phase}:")
        table = Table(out, [Column("tokens", 15, left=True), *(Column(title, 9) for title in columns)])
        table.header()
        for stretch, *cells in zip(stretches, *columns.values(), strict=True):
            table.row([stretch, *cells])
