"""`longreach run --documents`: questions about documents that are read from chunks."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longreach.cli.common import (
    cache_config,
    check_questions,
    load_model,
    pass_tokens,
    read_system,
    read_whole,
    warn_unapplied,
)
from longreach.cli.show import after_first_token, duration, emit, progress, show_memory, size, waiting
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.adapters.transformers import Account, Documents, FusionReport

DEFAULT = "a3"
CHUNK_TOKENS = 512


def run_documents(args: argparse.Namespace, options: dict[str, dict[str, Any]]) -> int:
    texts = [read_whole(name, "to --documents") for name in args.documents]
    system = "" if args.system is None else read_system(args.system)
    check_questions(args.question)
    cache = cache_config(args)
    with ExitStack() as opened:
        with waiting("loading the model"):
            from longreach.methods.registry import choose, choose_eviction, choose_fusion

            fuse = choose_fusion(args.fuse or DEFAULT, **options.get("fuse", {}))
            evict = choose_eviction(args.evict, **options.get("evict", {}))
            prefill = choose("prefill", args.prefill, **options.get("prefill", {}))
            decode = choose("decode", args.decode, **options.get("decode", {}))
            if fuse is None:
                raise InvalidInput("--fuse none with --documents: chunks are used by a fusion method; give --document")
            model, tokenizer = load_model(args)
            from longreach.adapters.transformers import Documents, attach, fingerprint, unapplied
            from longreach.records import environment
            from longreach.store import ChunkStore

            store = None if args.store is None else opened.enter_context(ChunkStore(args.store))
            session = opened.enter_context(
                attach(model, fuse=fuse, prefill=prefill, evict=evict, decode=decode, cache=cache)
            )
            started = time.perf_counter()
            known = fingerprint(model)
            fingerprinted = time.perf_counter() - started
            documents = Documents(
                session, tokenizer, system=system, store=store, chunk_tokens=args.chunk_tokens or CHUNK_TOKENS,
                prefill_chunk=pass_tokens(args), known=known, graph=args.graph,
            )  # fmt: skip
        longest = max(len(documents.question_tokens(question)) for question in args.question)
        left_out = unapplied(model, sampled=False, applied=("stop_strings",))
        warn_unapplied(left_out)
        started = time.perf_counter()
        with progress("reading documents", documents.count(texts)) as advance:
            documents.read(texts, advance, reserve=longest + args.max_new_tokens)
        read_seconds = time.perf_counter() - started
        if documents.absent is not None:
            print(f"longreach: {documents.absent}", file=sys.stderr)
        for error in {str(origin.error) for origin in documents.origins if origin.error is not None}:
            print(f"longreach: the store could not be used, chunks were computed: {error}", file=sys.stderr)
        answers = []
        for question in args.question:
            if not args.json and len(args.question) > 1:
                print(f"> {question}")
            text = ""
            for piece in documents.ask(question, args.max_new_tokens):
                text += piece
                if not args.json:
                    print(piece, end="", flush=True)
            assert documents.account is not None
            answers.append((question, text.rstrip(), documents.account))
            if not args.json:
                print(flush=True)
        report = session.report()
    if args.json:
        methods = {"fuse": fuse.to_json(), "prefill": prefill.to_json(), "decode": decode.to_json(),
                   "evict": None if evict is None else evict.to_json(), "not_applied": left_out}  # fmt: skip
        emit({**environment(model.device), **methods, "documents": _origins(documents, len(texts)),
              "seconds": {"fingerprint": fingerprinted, "documents": read_seconds},
              "answers": [_answer(*answer) for answer in answers], "report": report.to_json()})  # fmt: skip
        return 0
    _summarise(documents, read_seconds, [account for *_, account in answers], report)
    return 0


def _origins(documents: Documents, count: int) -> list[dict[str, Any]]:
    """Of each document: its tokens, its chunks by where they came from, those that are exact, and those whose
    dependence was computed."""
    found = []
    for number in range(count):
        mine = [origin for origin in documents.origins if origin.document == number]
        states = {state: sum(o.state == state for o in mine) for state in ("held", "stored", "computed", "recomputed")}
        exact, measured = sum(o.exact for o in mine), sum(o.dependence_computed for o in mine)
        found.append({
            "tokens": sum(o.tokens for o in mine), "chunks": len(mine), **states, "exact": exact,
            "dependence_computed": measured,
        })  # fmt: skip
    return found


def _answer(question: str, text: str, account: Account) -> dict[str, Any]:
    answer = account.answer
    return {
        "question": question, "answer": text, "tokens": len(answer.tokens), "stopped": answer.stopped,
        "prompt": asdict(account.fusion), "read_seconds": account.read_seconds,
        "first_token_seconds": account.first_token_seconds, "seconds_per_token": answer.seconds_per_token,
        "setup_seconds": answer.setup_seconds,
    }  # fmt: skip


def _summarise(documents: Documents, seconds: float, accounts: list[Account], report: Any) -> None:
    """One line on stderr: counts of chunks (repeated ones count once) and of the prompt's tokens, and the times."""
    from rich.console import Console

    first = accounts[0].fusion
    chunks = [chunk for each in documents.chunks for chunk in each]
    origins = dict(reversed([(chunk.key, o) for chunk, o in zip(chunks, documents.origins, strict=True)])).values()
    stored = sum(origin.state in ("held", "stored") for origin in origins)
    done = [f"{stored} stored", f"{len(origins) - stored} computed"]
    pairs = zip(chunks, documents.origins, strict=True)
    if measured := len({chunk.key for chunk, origin in pairs if origin.dependence_computed}):
        done.append(f"dependence of {measured} measured")
    kept = f"Chunks: {', '.join(done)}, in {duration(seconds)}"
    rates = [a.answer.seconds_per_token for a in accounts if a.answer.seconds_per_token is not None]
    setup = sum(a.answer.setup_seconds for a in accounts)
    errors = Console(stderr=True, highlight=False, markup=False)
    errors.print(
        f"\n{kept}. Prompt: {first.tokens} tokens, {first.exact} exact as stored, {first.reused} reused, "
        f"{first.recomputed} recomputed, {first.computed} computed. {_copies(first)}First token after "
        f"{duration(accounts[0].first_token_seconds)}{after_first_token(rates[0] if rates else None, setup)}"
    )
    show_memory(errors, [report.memory])


def _copies(report: FusionReport) -> str:
    """A sentence about the copies of stored keys and values to the device; "" if there were none."""
    if not report.loaded_bytes:
        return ""
    waited = report.waited_seconds
    wait = "without overlap" if waited is None else f"{duration(waited)} waited for them"
    return f"Copied to the device: {size(report.loaded_bytes)}, {wait}. "
