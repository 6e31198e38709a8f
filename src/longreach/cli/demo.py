"""`longreach demo`: the main job on the shipped model, with every method beside dense."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from longreach.cli.common import add_json, emit, milliseconds, percent

NAME = "demo"
HELP = "hide facts in real text and ask the shipped model for them with each method"
EXAMPLES = ("longreach demo", "longreach demo --length 8192 --seed 3", "longreach demo --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=4096, help="tokens of text, question and answer (default 4096)")
    parser.add_argument("--seed", type=int, default=0, help="which text and facts (default 0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from longreach.adapters.transformers import context_limit, device_of
    from longreach.cli.common import progress
    from longreach.errors import InvalidInput
    from longreach.evals.demo import Demo
    from longreach.records import environment

    demo = Demo(args.length, args.seed, str(device_of(args.device)))
    limit = context_limit(demo.model)
    if limit is not None and args.length > limit:
        raise InvalidInput(f"--length {args.length}: longreach-mini's context is {limit} tokens; ask for less")
    where = environment(demo.model.device)
    rows, out = [], Console(highlight=False, soft_wrap=True)
    setting = demo.setting
    if not args.json:
        out.print(
            f"{setting.model}, {setting.tokens} tokens of real text ({setting.characters / setting.tokens:.1f} "
            f"characters a token), {len(demo.facts)} facts hidden at "
            f"depths {', '.join(f'{d:.0%}' for d in setting.depths)}.\n"
        )
        out.print(
            f"[bold]{'prefill':14}{'decode':14}{'fact at':>7}  {'expected':9}{'answer':12}"
            f"{'read':>7}{'first':>8}{'token':>7}[/]"
        )
    with progress("reading", len(demo.document) * len(demo.combinations())) as advance:
        for row in demo.rows(advance):
            rows.append(row)
            if args.json:
                continue
            mark = "[green]right[/]" if row.right else "[red]wrong[/]"
            first = milliseconds(row.read_seconds + row.first_token_seconds)
            out.print(
                f"{row.prefill:14}{row.decode:14}{row.depth:>7.0%}  {row.expected:9}{_short(row.answer):12}"
                f"{percent(row.decode_fraction):>7}{first:>8}{milliseconds(row.seconds_per_token):>7} {mark}"
            )
    if args.json:
        emit({**where, "setting": asdict(setting), "rows": [asdict(r) for r in rows]})
        return 0
    shares = {r.prefill: r.prefill_fraction for r in rows}
    out.print(
        "\nread: bytes of keys, values and metadata that decoding read, over dense attention's; oracle_top_k scores "
        "all keys first, so it reads more than dense and shows quality only. first: time to the first token, reading "
        "the document included (methods with the same prefill share that reading; prefill read "
        + ", ".join(f"{percent(share)} with {name}" for name, share in shares.items())
        + "). token: time per token after it.\n"
        f"Measured just now on {where['device']['name']}, {where['device']['threads']} threads, "
        f"torch {where['versions']['torch']}, transformers {where['versions']['transformers']}."
    )
    return 0


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 11 else line[:10] + "…"
