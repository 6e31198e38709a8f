"""`longreach eval`: tasks at a length, asked of a model with every method, in one record."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from longreach.cli.common import (
    HOST_PASS_TOKENS,
    add_chunk_size,
    add_graph,
    add_host,
    add_json,
    add_model,
    add_slot_settings,
    cache_config,
    count,
    exit_code,
    host_config,
    load_model,
    parse_settings,
    pass_tokens,
    positive,
    tell_left_out,
    warn_unapplied,
)
from longreach.cli.show import Column, Table, console, duration, emit, percent, place, progress, show_plans, waiting
from longreach.cli.show_sampling import show_error_bars, show_sampling
from longreach.errors import InvalidInput

NAME = "eval"
HELP = "ask a model long-context tasks with every method, and keep the answers in a record"
EXAMPLES = (
    "longreach eval --model mini --tasks needles --length 4096 --samples 20 --output needles.json",
    "longreach eval --model ./Llama-3.1-8B-Instruct --tasks all --length 32768 --output all.json \\",
    "    --method streaming_llm --method 'oracle_top_k k=0.025 dense_layers=[0]'",
    "longreach eval --model mini --tasks needle_sweep --length 2048,4096,8192 --samples 11 --output sweep.json",
    "longreach eval --model mini --tasks vt,qa_synthetic_1 --method 'dense fuse=a3 fuse.ratio=0.3' \\",
    "    --method 'dense fuse=a3 evict=snapkv' --method 'dense fuse=random' --chunks bos --output fused.json",
    "longreach eval --list    (the tasks)",
    "longreach report all.json --output report",
)
CHUNK_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=False)
    parser.add_argument("--tasks", default="all", metavar="A,B", help="names, 'needles', 'ruler', 'ruler_official' "
                        "or 'all' (default); a data set with its file, such as qa_1=squad.json or "
                        "longbench=qasper.jsonl")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the tasks and stop")
    parser.add_argument("--length", type=_lengths, default=(4096,), metavar="N[,N...]",
                        help="tokens of prompt and answer together (default 4096); each task at each")  # fmt: skip
    parser.add_argument("--samples", type=positive, metavar="N",
                        help="prompts a task and length (default 20, of a data set all)")  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N prompts a task, for a quick look")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which texts and facts (default 0)")
    parser.add_argument("--method", action="append", metavar="SPEC", help="'[PREFILL/]DECODE [option=value ...] "
                        "[prefill.option=value ...] [fuse=NAME] [evict=NAME] [fuse.option=value ...] "
                        "[evict.option=value ...]', may be given several times; dense is always there (default: every "
                        "decode method that needs no option for this model). fuse also takes the controls random, "
                        "oracle and row_order. Where a method fuses, prompts are cut into instructions, chunks of the "
                        "documents, and question, and all methods read the same tokens")  # fmt: skip
    add_slot_settings(parser)
    parser.add_argument("--chunk-tokens", type=positive, metavar="N", help="tokens of a chunk at most (default 512); "
                        "without a fuse method: cut prompts as well, to compare with a record of one")  # fmt: skip
    parser.add_argument("--chunks", choices=("alone", "bos", "system"), help="prefix that chunks are computed behind: "
                        "nothing, the tokenizer's first token, or the instructions (default system)")  # fmt: skip
    parser.add_argument("--chunk-ends", choices=("text", "tokens"), default="text", help="where chunks end: text "
                        "(default): with a paragraph or sentence if possible; tokens: where they are full")  # fmt: skip
    parser.add_argument("--question", choices=("prefill", "decode"), default="prefill", help="how questions are read: "
                        "prefill (default): with the prompt; decode: token by token by each decode method, so that "
                        "what it leaves out of the context cannot help the question either")  # fmt: skip
    parser.add_argument("--equal-bytes", metavar="LABEL", help="give the other methods budgets with which they read as "
                        "many bytes while decoding as the method of this label (its --method text). Budgets are found "
                        "before the first prompt, for answers of half the longest length. Budgets in a --method and "
                        "options of kascade's variants stay. A method that reads too much with its least budget is "
                        "left out: on shallow models compare kascade with 'quest dense_layers=[0]' and "
                        "'omnikv layers=[0,4]', or other layers")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="draw answers (default 0: greedy)")
    parser.add_argument("--draws", type=positive, default=1, metavar="N",
                        help="answers drawn to each prompt; the score is their mean (default 1)")  # fmt: skip
    parser.add_argument(
        "--batch", type=positive, metavar="N", help="prompts at a time (default: as many as GPU memory holds)"
    )
    add_chunk_size(parser, default=None, more=f", with --host {HOST_PASS_TOKENS}")
    parser.add_argument("--workers", type=count, default=0, metavar="N", help="processes that make prompts while the "
                        "model answers, for a fast GPU (default 0: all are made before it does)")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="the record, compressed if it ends in .gz; the "
                        "same command continues an interrupted run")  # fmt: skip
    add_host(parser)
    add_graph(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.tasks import registry

    if args.list:
        return _list(args)
    if args.model is None:
        raise InvalidInput("which model? give --model DIR, or --model mini for the one shipped")
    from longreach.evals.fusion.controls import CONTROLS
    from longreach.evals.methods import NAMED, refuse_slots
    from longreach.evals.methods import specs as parse_specs
    from longreach.records import check_writable

    cache, pass_size = cache_config(args), pass_tokens(args)
    tasks = registry.choose(args.tasks)
    given = parse_settings(args.set, "slot", NAMED)
    specs = None  # errors there come before the model is loaded
    if args.method is not None or given:
        specs = parse_specs(args.method or (), settings=given, controls=CONTROLS)
    chunk_tokens = _chunk_tokens(args, specs or ())
    if args.equal_bytes is not None:
        refuse_slots(specs or (), NAMED, "--equal-bytes finds budgets over all keys of a prompt; leave it out")
    if args.output is not None:
        check_writable(args.output)
    with waiting("loading the model"):
        model, tokenizer = load_model(args)
        left_out = dict[str, str]()
        if specs is None:
            decodes, left_out = _decode_methods(model)
            specs = parse_specs(decodes)
        from longreach.evals.batching import fitting_batch
        from longreach.evals.evaluate import Evaluation, Settings
        from longreach.evals.measured import failed_answers, measured
        from longreach.evals.model_info import model_info
        from longreach.records import environment

        batch = args.batch or fitting_batch(model, max(args.length), pass_size)
        settings = Settings(args.length, args.samples, args.limit, args.seed, args.draws, args.temperature, batch,
                            pass_size, args.graph, chunk_tokens, args.chunks or "system",
                            args.chunk_ends, args.question)  # fmt: skip
        evaluation = Evaluation(model, tokenizer, tasks, specs, settings, args.workers, cache)
        config = {**evaluation.config(), **host_config(args)}
        about = {"model": model_info(model, args.model), "config": config, **environment(model.device)}
    warn_unapplied(evaluation.not_applied)
    record = measured(evaluation, about, args.output, progress, partial(_equal, evaluation, args.equal_bytes))
    tell_left_out({**left_out, **record.get("equal_bytes", {}).get("unreachable", {})})
    _tell_unequal(record)
    if args.json:
        emit(record)
    else:
        show(record, place(about))
    return exit_code(failed_answers(record), "answers", args.output)


def _equal(evaluation: Any, to: str | None) -> dict[str, Any]:
    """The record's entry on equal budgets; sets them. to: the label of the method whose bytes others are to equal."""
    if to is None:
        return {}
    from longreach.evals.budgets import equal_bytes

    with waiting("finding equal budgets"):
        equal = equal_bytes(evaluation, to)
    evaluation.specs = list(equal.specs)
    return {"equal_bytes": equal.to_json()}


def _chunk_tokens(args: argparse.Namespace, specs: Any) -> int | None:
    """Tokens of a chunk; None if prompts are not cut. Raises InvalidInput for --chunks without a fuse method."""
    if any(spec.fuse for spec in specs):
        return args.chunk_tokens or CHUNK_TOKENS
    if args.chunks is not None:
        raise InvalidInput("--chunks is for methods that fuse chunks; give one, such as --method 'dense fuse=a3'")
    if args.chunk_ends != "text" and args.chunk_tokens is None:
        raise InvalidInput("--chunk-ends is for prompts that are cut into chunks; give --chunk-tokens or a fuse method")
    chunk_tokens: int | None = args.chunk_tokens
    return chunk_tokens


def show(record: dict[str, Any], where: str) -> None:
    """Scores, a row a task and a column a method."""
    out = console()
    labels = list(record["methods"])
    for number, label in enumerate(labels, 1):
        out.print(f"[{number}] {label}", soft_wrap=True)
    table = Table(out, [Column("task", 18, left=True), Column("tokens", 7),
                        *(Column(f"[{n}]", 6) for n in range(1, len(labels) + 1))])  # fmt: skip
    out.print()
    table.header()
    tasks, lengths = record["tasks"].values(), record["config"]["lengths"]
    for length in lengths:
        if len(lengths) > 1:
            out.print(f"-- {length} tokens")
        _show_scores(table, [task for task in tasks if task["length"] == length], labels)
    if len(lengths) > 1:
        out.print("-- all")
    table.row(["bytes, prefill", "", *(_share(tasks, label, "prefill_reads") for label in labels)])
    table.row(["bytes, decode", "", *(_share(tasks, label, "decode_reads") for label in labels)])
    table.row(["per token", "", *(_time(tasks, label) for label in labels)])
    from longreach.evals.measured import failed_answers

    if failed := failed_answers(record):
        out.print(
            f"\n{failed} answers failed with an error and count as wrong; the record lists them with their errors."
        )
    alone = sum(result["alone"] for task in tasks for result in task["results"].values())
    if alone:
        out.print(
            f"\n{alone} answers were computed prompt by prompt, as their batch of {record['config']['batch']} failed."
        )
    _show_equal(record, out)
    results = {label: [task["results"][label] for task in tasks] for label in labels}
    show_sampling(out, {label: [r.get("sampling") for r in some] for label, some in results.items()})
    show_error_bars(out, {label: [r.get("error_bars") for r in some] for label, some in results.items()})
    show_plans(out, (plan for some in results.values() for r in some for plan in r.get("plans", ())))
    prompts = sum(len(task["samples"]) for task in tasks)
    characters = [task["characters_per_token"] for task in tasks]
    out.print(
        f"\n{prompts} prompts of at most {', '.join(map(str, lengths))} tokens with their answers "
        f"({sum(characters) / len(characters):.1f} characters a token). bytes: keys, values and metadata read, over "
        f"dense attention's; mean over tasks. per token: mean time of a decode step, over tasks.",
        soft_wrap=True,
    )
    if "bytes_compared_with" in record:
        out.print(record["bytes_compared_with"], soft_wrap=True)
    out.print(where)


def _tell_unequal(record: dict[str, Any]) -> None:
    """A line on stderr for each method that was to read as many bytes as another, and did not."""
    if equal := record.get("equal_bytes"):
        from longreach.evals.budgets import COUNTED, NEAR

        labels = [n for n in equal["found"] if record["methods"][n]["decode"]["name"] not in COUNTED]
        for length in record["config"]["lengths"]:
            tasks = [task for task in record["tasks"].values() if task["length"] == length]
            wanted = _mean_reads(tasks, equal["to"])
            for label in labels:
                came = _mean_reads(tasks, label)
                if wanted and came and abs(came / wanted - 1) > NEAR:
                    told = f"{label} read {percent(came)} of dense attention's bytes at {length} tokens"
                    other = f"{equal['to']} {percent(wanted)}: they differ by more than {NEAR:.0%}"
                    print(f"longreach: {told}, {other}", file=sys.stderr)


def _show_equal(record: dict[str, Any], out: Any) -> None:
    """Who reads as much as whom, by the dry run and as measured."""
    if not (equal := record.get("equal_bytes")):
        return
    tasks = record["tasks"].values()
    out.print(f"\nbudgets equal to {equal['to']}, {percent(equal['share'])} of dense attention's bytes in decoding:")
    for label, found in equal["found"].items():
        out.print(f"  {label}: {percent(found['share'])}, measured {_share(tasks, label, 'decode_reads')}")
    for label, why in equal["kept"].items():
        out.print(f"  {label} as it is, since {why}: measured {_share(tasks, label, 'decode_reads')}")


def _show_scores(table: Table, tasks: list[Any], labels: list[str]) -> None:
    """Those of one length, and their mean."""
    rows = [[task["results"][label]["score"] for label in labels] for task in tasks]
    for task, scores in zip(tasks, rows, strict=True):
        tokens = sum(s["tokens"] for s in task["samples"]) / len(task["samples"])
        table.row([task["task"], f"{tokens:.0f}", *(f"{score:.1%}" for score in scores)])
    if len(rows) > 1:
        means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
        table.row(["mean", "", *(f"{mean:.1%}" for mean in means)], style="bold")


def _share(tasks: Any, label: str, phase: str) -> str:
    return percent(_mean_reads(tasks, label, phase))


def _mean_reads(tasks: Any, label: str, phase: str = "decode_reads") -> float | None:
    found = [r["total"] for task in tasks if (r := task["results"][label][phase])]
    return sum(found) / len(found) if found else None


def _time(tasks: Any, label: str) -> str:
    found = [t for task in tasks if (t := task["results"][label]["seconds"]["per_token"]) is not None]
    return duration(sum(found) / len(found) if found else None)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def _decode_methods(model: Any) -> tuple[list[str], dict[str, str]]:
    """Every decode method that fits the model as it is by default; and why the others do not."""
    from longreach.adapters.transformers import unfit_methods
    from longreach.methods.registry import names

    decodes, strange = names("decode"), unfit_methods(model)
    return [n for n in decodes if n not in strange], {n: why for n, why in strange.items() if n in decodes}


def _list(args: argparse.Namespace) -> int:
    from longreach.tasks import registry

    tasks = [registry.task(name) for name in registry.TASKS]
    listed = [{"name": t.name, "source": t.source, "max_new_tokens": t.max_new_tokens} for t in tasks]
    listed += [{"name": f"{name}=FILE", "source": about, "max_new_tokens": None}
               for name, about in registry.ABOUT.items()]  # fmt: skip
    if args.json:
        emit(listed)
        return 0
    out = console()
    table = Table(out, [Column("task", 18, left=True), Column("answer", 7), Column("source", 60, left=True)])
    table.header()
    for row in listed:
        table.row([str(row["name"]), str(row["max_new_tokens"] or "-"), str(row["source"])])
    out.print()
    for group, names in registry.GROUPS.items():
        out.print(f"{group}: {', '.join(names)}")
    return 0
