"""`longreach demo`: the main job on the shipped model, with every method and dense attention."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_device, add_host, add_json, cache_config, load_model, positive, tell_left_out
from longreach.cli.show import Column, Table, console, duration, emit, fitted, percent, place, progress, waiting

if TYPE_CHECKING:
    from longreach.evals.demo import Demo, Row

NAME = "demo"
HELP = "hide facts in real text and ask the shipped model for them with each method"
EXAMPLES = ("longreach demo", "longreach demo --length 8192 --seed 3", "longreach demo --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=positive, default=4096, metavar="N",
                        help="tokens of text, question and answer (default 4096)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which text and facts (default 0)")
    add_device(parser)
    add_host(parser)
    add_json(parser)
    parser.set_defaults(model="mini", dtype="auto")


def run(args: argparse.Namespace) -> int:
    cache = cache_config(args)
    with waiting("loading longreach-mini"):
        model, tokenizer = load_model(args)
        from longreach.evals.demo import Demo
        from longreach.records import environment

        demo = Demo(model, tokenizer, args.length, args.seed, cache)
        where = environment(model.device)
    tell_left_out(demo.left_out)
    if args.json:
        facts = [{"depth": d, "key": f.key, "value": f.value, "statement": f.statement} for d, f in demo.placed]
        text = {"model": "longreach-mini", "tokens": demo.tokens, "characters": demo.characters, "facts": facts}
        emit({**where, **text, "rows": [asdict(row) for row in demo.rows(progress)]})
        return 0
    out = console()
    _introduce(demo, out)
    table = Table(out, _columns(demo))
    table.header()
    prefill, rows = "", []
    for row in demo.rows(progress):
        if row.prefill != prefill:
            prefill = row.prefill
            read = percent(row.prefill_reads.total if row.prefill_reads else None)
            out.print(f"-- {prefill} prefill: {duration(row.read_seconds)}, {read} of dense attention's bytes")
        table.row(_cells(row))
        rows.append(row)
    _explain(rows, out, place(where))
    return 0


def _introduce(demo: Demo, out: Any) -> None:
    out.print(f"longreach-mini reads {demo.tokens} tokens of real text ({demo.characters / demo.tokens:.1f} characters "
              f"a token) in which {len(demo.placed)} facts are hidden:")  # fmt: skip
    for depth, fact in demo.placed:
        out.print(f"  {depth:.0%} deep  {fact.statement}")
    out.print(f"Each method answers for each: {demo.placed[0][1].question.partition('?')[0]}?\n")


def _columns(demo: Demo) -> list[Column]:
    facts = [Column(f"at {depth:.0%}", 13, left=True) for depth, _ in demo.placed]
    shares = [Column(title, 6, wide=True) for title in ("K", "V", "meta")]
    return [Column("decode", 15, left=True), *facts, Column("bytes", 6), *shares, Column("1st tok", 7),
            Column("per tok", 7)]  # fmt: skip


def _cells(row: Row) -> list[Any]:
    from rich.text import Text

    answers = []
    for said in row.answers:
        verdict = ("right", "green") if said.right else ("wrong", "red")
        answers.append(Text.assemble(fitted(said.answer, 7), " ", verdict))
    reads = row.decode_reads
    shares = [percent(x) for x in (reads.total, reads.keys, reads.values, reads.metadata)] if reads else ["-"] * 4
    return [row.decode, *answers, *shares, duration(row.first_token_seconds), duration(row.seconds_per_token)]


def _why_more(name: str) -> str:
    """Why a method reads more than dense attention does."""
    if name.startswith("oracle"):
        return "which scores every key first, to show quality and not savings"
    return "which at this length saves less than its metadata takes"


def _explain(rows: list[Row], out: Any, where: str) -> None:
    costly = dict.fromkeys(row.decode for row in rows if row.decode_reads and row.decode_reads.total > 1.0)
    above = f" Above 100%: {'; '.join(f'{name}, {_why_more(name)}' for name in costly)}." if costly else ""
    out.print(
        f"\nbytes: keys (K), values (V) and metadata read while decoding, over dense attention's.{above} "
        "1st tok: time to the first token, including the prefill, measured once for methods with the same prefill. "
        "per tok: time per token after it, past a warm-up step. All methods run with their default options."
    )
    out.print(where)
