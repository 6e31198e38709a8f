"""`longreach run` without a question: turns about a document, from the terminal or from standard input."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longreach.cli.common import cache_config, load_model, pass_tokens, read_document, warn_unapplied
from longreach.cli.saved_cache import check_save_place, loaded_cache
from longreach.cli.show import duration, progress, show_memory, show_plans, show_shares, waiting
from longreach.errors import InvalidInput, LongreachError

ROOM = 4096  # tokens of turns for which memory is reserved with the document
EXIT = "exit"
# for models without a chat template: the prompts of --question, one after the other
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Question: {{ m.content }}\nAnswer:"
    "{% elif m.role == 'assistant' %} {{ m.content }}\n\n{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
)


def run_chat(args: argparse.Namespace, options: dict[str, dict[str, Any]]) -> int:
    if args.json:
        raise InvalidInput("--json: prints the answers to --question; give one, or leave --json out to chat")
    if args.document == "-":
        raise InvalidInput(
            "--document -: standard input is read as the document, so no questions can come from it; give a file, or "
            "--question"
        )
    if sys.stdin is None:
        raise InvalidInput("standard input is closed, so no questions can come from it; give --question")
    check_save_place(args)
    config, document = cache_config(args), read_document(args.document)
    with waiting("loading the model"):
        from longreach.methods.registry import choose

        prefill = choose("prefill", args.prefill, **options.get("prefill", {}))
        decode = choose("decode", args.decode, **options.get("decode", {}))
        model, tokenizer = load_model(args)
        from longreach.adapters.transformers import attach, context_limit, encode, stop_strings, unapplied
        from longreach.adapters.transformers.conversation import Chat

    warn_unapplied(unapplied(model, sampled=False, applied=("stop_strings",)))
    given: dict[str, Any] = {"document": document}
    if not tokenizer.chat_template:
        begin = tokenizer.bos_token if tokenizer.bos_token_id in encode(tokenizer, "") else ""
        tokenizer.chat_template, given = f"{begin}{PLAIN}", {"system": document.rstrip()}
    with attach(model, prefill=prefill, decode=decode, cache=config) as session:
        beginning = Chat(session, tokenizer, **given).beginning()
        started = time.perf_counter()
        cache = loaded_cache(session, args.cache, beginning, config)
        chat = Chat(session, tokenizer, cache=cache, **given)
        limit = context_limit(model)
        room = ROOM if limit is None else max(0, min(ROOM, limit - len(beginning)))
        with progress("reading the document", len(beginning)) as advance:
            chat.read_ahead(advance, prefill_chunk_size=pass_tokens(args), room=room)
        seconds = time.perf_counter() - started
        if args.save_cache is not None:
            chat.save(Path(args.save_cache))
        _turns(chat, args, stop_strings(model))
        report = session.report()
    from rich.console import Console

    errors = Console(stderr=True, highlight=False, markup=False)
    shares = show_shares(report, {"prefill": prefill.name, "decode": decode.name})
    errors.print(f"\n{shares}Document: {len(beginning)} tokens in {duration(seconds)}.")
    show_memory(errors, [report.memory])
    show_plans(errors, report.plans)
    return 0


def _turns(chat: Any, args: argparse.Namespace, stop: tuple[str, ...]) -> None:
    """Ask until the user ends it. On a terminal, errors and Ctrl-C end an answer only."""
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"Ask about {args.document}; {EXIT} or Ctrl-D ends, Ctrl-C stops an answer.", file=sys.stderr)
    for question in _questions(interactive):
        if not interactive:
            print(f"> {question}")
        try:
            streamer = _Printer(chat.tokenizer, stop)
            reply = chat.ask(
                question, max_new_tokens=args.max_new_tokens, streamer=streamer, graph=args.graph,
                prefill_chunk_size=pass_tokens(args),
            )  # fmt: skip
            print(flush=True)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(flush=True)
            print("(stopped; this turn is not part of the conversation)", file=sys.stderr)
            continue
        except LongreachError as error:
            if not interactive:
                raise
            print(f"longreach: {' '.join(str(error).split())}", file=sys.stderr)
            continue
        if not reply.text:
            print("(no answer: the model stopped at once)", file=sys.stderr)
        elif not reply.stopped:
            print(f"(cut after {reply.tokens} tokens; --max-new-tokens allows more)", file=sys.stderr)


def _questions(interactive: bool) -> Iterator[str]:
    """Lines that are not empty, up to `exit` or the end of input."""
    if interactive:
        with contextlib.suppress(ImportError):  # line editing, where Python has it
            import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if interactive else _line()
        except EOFError:
            if interactive:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(f"\n({EXIT} or Ctrl-D ends)", file=sys.stderr)
            continue
        if line.strip() == EXIT:
            return
        if line.strip():
            yield line.strip()


def _line() -> str:
    """A line of standard input. Raises EOFError at its end, InvalidInput for other bytes than UTF-8."""
    content = sys.stdin.buffer.readline()
    if not content:
        raise EOFError
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput("standard input is not UTF-8 text; convert it, for example with iconv") from error


class _Printer:
    """A streamer of transformers that prints the answer as it comes."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]):
        from longreach.adapters.transformers.answer_text import AnswerText

        self._text, self._prompt = AnswerText(tokenizer, stop), True

    def put(self, tokens: Any) -> None:
        """The prompt first, then each token [1]."""
        if self._prompt:
            self._prompt = False
            return
        for token in tokens.tolist():
            print(self._text.add(token), end="", flush=True)

    def end(self) -> None:
        """The answer is over."""
        print(self._text.rest(), end="", flush=True)
