"""`longreach run`: questions about your document, on your model, with the method of your choice."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
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
    tell_compiled,
    warn_unapplied,
)
from longreach.cli.saved_cache import add_saved_cache, check_save_place, loaded_cache
from longreach.cli.show import (
    after_first_token,
    duration,
    emit,
    progress,
    show_memory,
    show_plans,
    show_shares,
    waiting,
)
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.evals.run import QuestionAnswer

NAME = "run"
HELP = "ask questions about a document; its KV is computed once"
EXAMPLES = (
    "longreach run --model mini --document notes.txt --question 'What is the access code for the archive?'",
    "longreach run --model ./Llama-3.1-8B-Instruct --document report.txt --question 'Who wrote it?' \\",
    "    --question 'When?' --decode 'loki k=0.1'",
    "longreach run --model mini --document notes.txt    (a chat about it)",
    "longreach run --model mini --documents a.txt b.txt --question 'Which of them names a code?' --fuse a3 \\",
    "    --evict snapkv --set evict.capacity=512 --store chunks",
    "longreach run --model ./Llama-3.1-8B-Instruct --document long.txt --question 'Who wrote it?' --host \\",
    "    --device-memory 16GB --decode quest",
    "longreach methods    (values of --fuse, --prefill, --evict, --decode and --set)",
)
SLOTS = ("fuse", "prefill", "evict", "decode")
PHASES = ("prefill", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--document", metavar="FILE", help="UTF-8 text; - for standard input")
    text.add_argument("--documents", nargs="+", metavar="FILE", help="UTF-8 texts, cut into chunks; a chunk's keys "
                      "and values are computed once, stored, and used at any place in a prompt")  # fmt: skip
    add_chunk_size(parser, default=None, more=f", with --host {HOST_PASS_TOKENS}")
    parser.add_argument("--question", action="append", default=[], metavar="TEXT", help="may be given several times; "
                        "without one you chat about the --document: each line of the terminal, or of standard input, "
                        "is a turn")  # fmt: skip
    parser.add_argument("--fuse", metavar="METHOD", help="how the chunks of --documents are used (default a3); options "
                        "follow the method's name, as in 'a3 ratio=0.3'")  # fmt: skip
    parser.add_argument("--prefill", metavar="METHOD", help="method for the prompt (default dense)")
    parser.add_argument("--evict", metavar="METHOD", help="which keys stay once the prompt is read (default all)")
    parser.add_argument("--decode", metavar="METHOD", help="method for the answer's tokens (default dense), such as "
                        "'quest k=0.2' or 'kascade plan=plan.json'")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="SLOT.OPTION=VALUE",
                        help="another way to give an option: decode.k=0.2")  # fmt: skip
    parser.add_argument("--system", metavar="FILE", help="with --documents: UTF-8 text before them, behind which their "
                        "chunks are computed")  # fmt: skip
    parser.add_argument("--store", metavar="DIR", help="with --documents: the chunk store (default: none)")
    parser.add_argument("--chunk-tokens", type=positive, metavar="N", help="with --documents: of a chunk "
                        "at most (default 512)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="longest answer, in tokens "
                        "(default 128)")  # fmt: skip
    add_saved_cache(parser)
    add_host(parser)
    add_graph(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = parse_settings(args.set, "slot", SLOTS)
    if args.documents:
        from longreach.cli.run_documents import run_documents

        _refuse_with_documents(args)
        return run_documents(args, options)
    _refuse_without_documents(args, options)
    if not args.question:
        from longreach.cli.run_chat import run_chat

        return run_chat(args, options)
    check_save_place(args)
    cache = cache_config(args)
    document = read_document(args.document)
    check_questions(args.question)
    with waiting("loading the model"):
        from longreach.methods.registry import choose

        prefill = choose("prefill", args.prefill, **options.get("prefill", {}))
        decode = choose("decode", args.decode, **options.get("decode", {}))
        model, tokenizer = load_model(args)
        from longreach.adapters.transformers import attach, unapplied
        from longreach.evals.run import Questions
        from longreach.records import environment

        task = Questions(model, tokenizer, document, args.question, args.max_new_tokens, cache)
    left_out = unapplied(model, sampled=False, applied=("stop_strings",))
    warn_unapplied(left_out)
    with attach(model, prefill=prefill, decode=decode, cache=task.cache) as session:
        loaded = loaded_cache(session, args.cache, task.document, task.cache)
        reader = task.read(session, pass_tokens(args), progress, graph=args.graph, cache=loaded)
        if args.save_cache is not None:
            reader.cache.save(args.save_cache, tokens=[task.document])
        tell_compiled(task.cache, model.device, args.max_new_tokens)
        for number, question in enumerate(task.questions):
            if not args.json and len(task.questions) > 1:
                print(f"> {question}")
            for piece in task.ask(reader, number):
                if not args.json:
                    print(piece, end="", flush=True)
            if not args.json:
                print(flush=True)
                note(task.answered[-1])
        report = session.report()
    if args.json:
        config = {"prefill": prefill.to_json(), "decode": decode.to_json(), "not_applied": left_out}
        read = {"document_tokens": len(task.document), "document_seconds": reader.read_seconds}
        answers = [{**asdict(a), "time_to_first_token": reader.read_seconds + a.first_token_seconds}
                   for a in task.answered]  # fmt: skip
        emit({**environment(model.device), **config, **read, "answers": answers, "report": report.to_json()})
        return 0
    _summarise(task.answered, len(task.document), reader.read_seconds, report, (prefill.name, decode.name))
    return 0


def _refuse_with_documents(args: argparse.Namespace) -> None:
    """Raise InvalidInput for what belongs to --document."""
    if not args.question:
        raise InvalidInput("--documents: give --question; without one, you chat about a single --document FILE")
    given = [name for name, value in (("--save-cache", args.save_cache), ("--cache", args.cache)) if value is not None]
    if given:
        raise InvalidInput(f"{', '.join(given)}: is for --document; keys of --documents are kept with --store DIR")


def _refuse_without_documents(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Raise InvalidInput for what belongs to --documents."""
    asked = {"--fuse": args.fuse, "--evict": args.evict, "--system": args.system, "--store": args.store,
             "--chunk-tokens": args.chunk_tokens,
             "--set fuse.": options.get("fuse"), "--set evict.": options.get("evict")}  # fmt: skip
    given = [name for name, value in asked.items() if value is not None]
    if given:
        raise InvalidInput(
            f"{', '.join(given)}: a --document is kept whole for all questions; give --documents FILE instead"
        )


def note(answer: QuestionAnswer) -> None:
    if not answer.tokens:
        print("(no answer: the model stopped at once)", file=sys.stderr)
    elif not answer.stopped:
        print(f"(cut after {answer.tokens} tokens; --max-new-tokens allows more)", file=sys.stderr)


def _summarise(
    answers: list[QuestionAnswer], tokens: int, seconds: float, report: Any, methods: tuple[str, str]
) -> None:
    """One line on stderr: what was read over what dense attention reads, and the times."""
    from rich.console import Console

    rates = [(a.seconds_per_token, a.tokens) for a in answers if a.seconds_per_token is not None]
    rate = sum(s * n for s, n in rates) / sum(n for _, n in rates) if rates else None
    shares = show_shares(report, dict(zip(PHASES, methods, strict=True)))
    setup = sum(a.setup_seconds for a in answers)
    again = f" ({duration(answers[1].first_token_seconds)} for further questions)" if len(answers) > 1 else ""
    errors = Console(stderr=True, highlight=False, markup=False)
    errors.print(
        f"\n{shares}Document: {tokens} tokens in "
        f"{duration(seconds)}. First token after {duration(seconds + answers[0].first_token_seconds)}{again}"
        f"{after_first_token(rate, setup)}"
    )
    show_memory(errors, [report.memory])
    show_plans(errors, report.plans)
