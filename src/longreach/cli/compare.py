"""`longreach compare`: your model, your document, your machine: what each method changes and saves."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import (
    HOST_PASS_TOKENS,
    add_chunk_size,
    add_graph,
    add_host,
    add_json,
    add_model,
    cache_config,
    check_questions,
    load_model,
    parse_settings,
    pass_tokens,
    positive,
    read_document,
    refuse_repeated,
    tell_compiled,
    tell_left_out,
    warn_unapplied,
)
from longreach.cli.compare_documents import compare_documents, refuse_without_documents
from longreach.cli.compare_record import write_record
from longreach.cli.show import (
    Column,
    Table,
    console,
    duration,
    emit,
    percent,
    place,
    progress,
    show_memory,
    show_plans,
    waiting,
)
from longreach.cli.show_sampling import show_error_bars, show_sampling
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.evals.compare import Compare, Comparison

NAME = "compare"
HELP = "compare each method with dense attention on your model and document"
EXAMPLES = (
    "longreach compare --model mini --document notes.txt",
    "longreach compare --model ./Llama-3.1-8B-Instruct --document report.txt --question 'Who wrote it?' --json",
    "longreach compare --model mini --document notes.txt --methods streaming_llm --set streaming_llm.window=0.1",
    "longreach compare --model mini --documents a.txt b.txt --question 'Which of them names a code?' \\",
    "    --system system.txt --method 'dense fuse=a3 fuse.ratio=0.3' --method 'dense fuse=pie evict=snapkv'",
)
QUESTION = "What is this text about?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--document", metavar="FILE", help="UTF-8 text; - for standard input")
    text.add_argument("--documents", nargs="+", metavar="FILE", help="UTF-8 texts, cut into chunks, for fusion: each "
                      "method reads the same tokens")  # fmt: skip
    add_chunk_size(parser, default=None, more=f", with --host {HOST_PASS_TOKENS}; with --documents the whole prompt, "
                   "as fused reads take it")  # fmt: skip
    parser.add_argument("--system", metavar="FILE", help="with --documents: UTF-8 text before them")
    parser.add_argument("--store", metavar="DIR", help="with --documents: the chunk store (default: none)")
    parser.add_argument("--chunk-tokens", type=positive, metavar="N", help="with --documents: of a chunk at most "
                        "(default 512)")  # fmt: skip
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help=f"default: {QUESTION!r}")
    parser.add_argument("--methods", metavar="A,B", help="methods to compare with dense (default: all); "
                        "with --documents fusion methods")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE",
                        help="an option of a method, such as streaming_llm.window=0.1; with --documents of a slot, "
                        "such as fuse.ratio=0.3")  # fmt: skip
    parser.add_argument("--method", action="append", metavar="SPEC", help="instead of --methods and --set: '[PREFILL/]"
                        "DECODE [option=value ...] [prefill.option=value ...] [evict=NAME] [evict.option=value ...]' "
                        "and, with --documents, fuse=NAME and fuse.option=value; may be given often")  # fmt: skip
    parser.add_argument("--layers", action="store_true", help="also measure each layer's and head's error on "
                        "the same hidden states, in decode steps and, if prefill is not dense, on rows of the prompt; "
                        "times include it, and on a GPU steps are then captured piecewise")  # fmt: skip
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write a record for `longreach report` at the end; an interrupted comparison starts again",
    )
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help="decode steps compared (default 32)")
    parser.add_argument("--past-end", action="store_true", help="run all steps even if dense attention's answer "
                        "ends earlier")  # fmt: skip
    add_host(parser)
    add_graph(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.documents:
        return compare_documents(args)
    refuse_without_documents(args)
    args.prefill_chunk_size, cache = pass_tokens(args), cache_config(args)
    if args.method is not None and (args.methods is not None or args.set):
        raise InvalidInput("--method already names methods with their options: leave out --methods and --set")
    chosen = [name.strip() for name in args.methods.split(",") if name.strip()] if args.methods is not None else None
    refuse_repeated("--method", args.method or ())
    refuse_repeated("--methods", chosen or ())
    document = read_document(args.document)
    check_questions([args.question])
    with waiting("loading the model"):
        from longreach.evals.methods import specs as parse_specs
        from longreach.methods.registry import METHODS, method_class
        from longreach.records import check_writable, environment

        options = parse_settings(args.set, "method", METHODS)
        for name in chosen or ():  # unknown names fail before the model is loaded
            method_class(name)
        specs = None if args.method is None else parse_specs(args.method)
        if args.output is not None:
            check_writable(args.output)
        model, tokenizer = load_model(args)
        from longreach.adapters.transformers import prompts
        from longreach.evals.compare import Compare

        shared, (rest,) = prompts(tokenizer, document, [args.question])
        task = Compare(model, tokenizer, shared + rest, steps=args.steps, methods=chosen, options=options,
                       specs=specs, layers=args.layers, graph=args.graph, past_end=args.past_end,
                       cache=cache)  # fmt: skip
        where = environment(model.device)
    warn_unapplied(task.not_applied)
    tell_left_out(task.left_out)
    tell_compiled(cache, model.device, args.steps + 1)
    found = task.run(args.prefill_chunk_size, progress)
    if args.json:
        comparisons = list(found)
        _record(args, model, task, comparisons, where, document)
        emit(
            {
                **where,
                "prompt_tokens": len(task.prompt),
                "not_applied": task.not_applied,
                "comparisons": [asdict(c) for c in comparisons],
            }
        )
        return 0
    out = console()
    out.print(
        f"{len(task.prompt)} tokens of prompt; each method is fed dense attention's own answer, token by token.\n"
    )
    width = max(18, *(min(40, len(_decode_of(spec.label))) for spec in task.specs))
    shares = [Column(title, 7, wide=True) for title in ("K", "V", "meta")]
    table = Table(out, [Column("decode", width, left=True), Column("KL", 9), Column("diverges at", 12),
                        Column("bytes", 7), *shares, Column("1st tok", 7), Column("per tok", 7)])  # fmt: skip
    table.header()
    prefill, steps, comparisons = "", 0, []
    for c in found:
        comparisons.append(c)
        if c.prefill["name"] != prefill:
            prefill, steps = c.prefill["name"], c.steps
            read = percent(c.prefill_reads.total if c.prefill_reads else None)
            out.print(f"-- {prefill} prefill: {duration(c.read_seconds)}, {read} of dense attention's bytes")
        table.row(_cells(c))
    ended = (
        f", where dense attention's answer ended ({args.steps} requested; --past-end continues)"
        if steps < args.steps
        else ""
    )
    out.print(
        f"\nKL: mean of KL(dense || method) of the next-token distributions of {steps} decode steps{ended}, in nats. "
        "diverges at: the first token of the answer, counted from 0, that the method itself would have chosen "
        "differently. bytes: keys (K), values (V) and metadata read while decoding, over dense attention's. 1st tok: "
        "time to the first token, measured once for methods with the same prefill. per tok: time per token after it."
    )
    _show_layers(out, comparisons)
    show_sampling(out, {c.label: [c.sampling] for c in comparisons})
    show_error_bars(out, {c.label: [c.error_bars] for c in comparisons})
    show_memory(out, (c.memory for c in comparisons))
    show_plans(out, (plan for c in comparisons for plan in c.plans))
    out.print(place(where))
    _record(args, model, task, comparisons, where, document)
    return 0


def _show_layers(out: Any, comparisons: list[Comparison]) -> None:
    """For each prefill and each method the layers' errors, mean over heads and the worst head's."""
    prefills = {str(c.prefill): c for c in comparisons if c.prefill_layer_error}
    for c in prefills.values():
        error = c.prefill_layer_error
        assert error is not None
        _show_errors(out, f"{c.prefill['name']} prefill on {error['rows']} rows of the prompt", error)
    for c in comparisons:
        if c.layer_error is not None and any(map(any, c.layer_error["max"])):  # dense has none
            _show_errors(out, f"{c.label} in decode steps", c.layer_error)


def _show_errors(out: Any, what: str, error: dict[str, Any]) -> None:
    out.print(f"\nerror of {what}, |o - o_dense| / |o_dense| on the same hidden states, by layer:", soft_wrap=True)
    table = Table(out, [Column("layer", 6), Column("mean", 10), Column("worst head", 11), Column("its mean", 10),
                        Column("its max", 10)])  # fmt: skip
    table.header()
    for layer, (mean, worst) in enumerate(zip(error["mean"], error["max"], strict=True)):
        head = max(range(len(mean)), key=mean.__getitem__)
        table.row([str(layer), f"{sum(mean) / len(mean):.2e}", str(head), f"{mean[head]:.2e}", f"{worst[head]:.2e}"])


def _record(
    args: argparse.Namespace, model: Any, task: Compare, found: list[Comparison], where: Any, document: str
) -> None:
    if args.output is not None:
        sha256 = hashlib.sha256(document.encode()).hexdigest()
        write_record(args, model, task, found, where, {"document": args.document, "document_sha256": sha256})


def _cells(c: Comparison) -> list[str]:
    diverges = f"none in {c.steps}" if c.first_divergence is None else str(c.first_divergence)
    r = c.decode_reads
    shares = [percent(x) for x in (r.total, r.keys, r.values, r.metadata)] if r else ["-"] * 4
    first, token = duration(c.read_seconds), duration(c.seconds_per_token)
    return [_decode_of(c.label), f"{c.kl:.2g}", diverges, *shares, first, token]


def _decode_of(label: str) -> str:
    """A label without its prefill method, which stands above."""
    return label.rpartition("/")[2]
