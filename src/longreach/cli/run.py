"""`longreach run`: questions about your document, on your model, with the method of your choice."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from longreach.cli.common import (
    add_json,
    add_model,
    emit,
    load_model,
    milliseconds,
    parse_settings,
    percent,
    progress,
    read_document,
)

NAME = "run"
HELP = "ask questions about a document; its KV is computed once"
EXAMPLES = (
    "longreach run --model mini --document notes.txt --question 'What is the access code for the archive?'",
    "longreach run --model ./Llama-3.1-8B-Instruct --document report.txt --question 'Who wrote it?' \\",
    "    --question 'When?' --decode streaming_llm --set decode.window=0.3",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    parser.add_argument("--document", required=True, metavar="FILE", help="UTF-8 text; - for standard input")
    parser.add_argument("--question", required=True, action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument("--prefill", metavar="NAME", help="method for the prompt (default dense)")
    parser.add_argument("--decode", metavar="NAME", help="method for the answer's tokens (default dense)")
    parser.add_argument("--set", action="append", default=[], metavar="SLOT.OPTION=VALUE", help="a method's option")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longest answer (default 128)")
    parser.add_argument("--prefill-chunk-size", type=int, default=512, help="prompt tokens per pass (default 512)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import Answer, Reader, attach, check_length, prompts, stop_tokens
    from longreach.errors import InvalidInput
    from longreach.methods.registry import choose

    options = parse_settings(args.set)
    prefill = choose("prefill", args.prefill, **options["prefill"])
    decode = choose("decode", args.decode, **options["decode"])
    if args.max_new_tokens < 1:
        raise InvalidInput(f"--max-new-tokens: expected at least 1, got {args.max_new_tokens}")
    document = read_document(args.document)
    if not all(q.strip() for q in args.question):
        raise InvalidInput("a --question is empty; ask something")
    model, tokenizer = load_model(args)
    shared, rests = prompts(tokenizer, document, args.question)
    stop, results = stop_tokens(model, tokenizer), list[dict[str, Any]]()
    with attach(model, prefill=prefill, decode=decode) as session:
        check_length(session, len(shared) + max(map(len, rests)), args.max_new_tokens)
        reader = Reader(session, args.prefill_chunk_size)
        with progress("reading the document", len(shared)) as advance:
            reader.read(shared, advance)
        for question, rest in zip(args.question, rests, strict=True):
            answer = Answer()
            if not args.json and len(args.question) > 1:
                print(f"> {question}")
            text = _streamed(reader.ask(rest, args.max_new_tokens, stop, answer), tokenizer, quiet=args.json)
            results.append(
                {
                    "question": question,
                    "answer": text.strip(),
                    "tokens": len(answer.tokens),
                    "time_to_first_token": reader.read_seconds + answer.first_token_seconds,
                    "time_per_token": answer.seconds_per_token,
                }
            )
        report = session.report()
    if args.json:
        config = {"prefill": prefill.to_json(), "decode": decode.to_json()}
        read = {"document_tokens": len(shared), "document_seconds": reader.read_seconds}
        emit({**config, **read, "answers": results, "report": report.to_json()})
        return 0
    rate = [r["time_per_token"] for r in results if r["time_per_token"] is not None]
    print(
        f"\nread {percent(report.fraction('prefill'))} (prefill, {prefill.name}) and "
        f"{percent(report.fraction('decode'))} (decode, {decode.name}) of the bytes that dense attention reads; "
        f"{len(shared)} tokens read once in {reader.read_seconds:.1f} s, "
        f"first token after {milliseconds(results[0]['time_to_first_token'])}, "
        f"{milliseconds(sum(rate) / len(rate) if rate else None)} a token",
        file=sys.stderr,
    )
    return 0


def _streamed(tokens: Any, tokenizer: Any, quiet: bool) -> str:
    """Print an answer as it comes; whole characters only. Returns its text."""
    ids, shown = list[int](), ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not quiet and not text.endswith("\ufffd"):
            new = text[len(shown) :] if shown else text.lstrip()
            print(new, end="", flush=True)
            shown = text
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if not quiet:
        print(text[len(shown) :])
    return text
