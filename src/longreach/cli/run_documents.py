"""`longreach run --documents`: questions about documents that are read from chunks."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longreach.cli.common import check_questions, load_model, read_system, read_whole, tell_unapplied
from longreach.cli.show import duration, emit, progress, waiting
from longreach.errors import InvalidInput, StoreError

if TYPE_CHECKING:
    from longreach.adapters.transformers import Account, Documents
    from longreach.store import Chunk, ChunkStore, Entry

DEFAULT = "a3"
LOOKED_AT = 64  # chunks of a store in which none was found


def run_documents(args: argparse.Namespace, options: dict[str, dict[str, Any]]) -> int:
    texts = [read_whole(name, "to --documents") for name in args.documents]
    system = "" if args.system is None else read_system(args.system)
    check_questions(args.question)
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
            session = opened.enter_context(attach(model, fuse=fuse, prefill=prefill, evict=evict, decode=decode))
            started = time.perf_counter()
            known = fingerprint(model)
            fingerprinted = time.perf_counter() - started
            documents = Documents(
                session, tokenizer, system=system, store=store, chunk_tokens=args.chunk_tokens,
                prefill_chunk=args.prefill_chunk_size, known=known, graph=args.graph,
            )  # fmt: skip
        longest = max(len(documents.question_tokens(question)) for question in args.question)
        left_out = unapplied(model, sampled=False, applied=("stop_strings",))
        tell_unapplied(left_out)
        started = time.perf_counter()
        before = [] if store is None else store.entries()
        with progress("reading documents", documents.count(texts)) as advance:
            documents.read(texts, advance, reserve=longest + args.max_new_tokens)
        read_seconds = time.perf_counter() - started
        if store is not None and before and _had_none(before, documents):
            print(_why_none_was_found(store, before, documents.chunks[0][0]), file=sys.stderr)
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
    _summarise(documents, read_seconds, [account for *_, account in answers])
    return 0


def _had_none(entries: list[Entry], documents: Documents) -> bool:
    """Whether a store with these entries had none of the documents' chunks, broken ones included."""
    names = {entry.name for entry in entries}
    used = any(chunk.key.name in names for chunks in documents.chunks for chunk in chunks)
    return not used and all(origin.state != "recomputed" for origin in documents.origins)


def _why_none_was_found(store: ChunkStore, entries: list[Entry], ours: Chunk) -> str:
    """One line: what the chunks are of that a store had before ours were put into it, judged by those used last."""
    kinds = Counter[str]()
    for entry in entries[-LOOKED_AT:]:
        with suppress(StoreError):
            if (about := store.about(entry.name)) is None:
                continue
            if about.key.dtype != ours.key.dtype:
                kinds[f"of another dtype ({about.key.dtype})"] += 1
            elif about.key.model != ours.key.model:
                kinds["of another model, or of other weights"] += 1
            elif about.key.prefix != ours.key.prefix:
                kinds["behind another system prompt or other documents"] += 1
            else:
                kinds["of other documents, or cut otherwise"] += 1
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"longreach: the store had none of these chunks. Of its {kinds.total()} most recently used chunks {shown}."


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


def _summarise(documents: Documents, seconds: float, accounts: list[Account]) -> None:
    """One line on stderr: counts of chunks (repeated ones count once) and of the prompt's tokens, and the times."""
    from rich.console import Console

    first = accounts[0].fusion
    chunks = [chunk for each in documents.chunks for chunk in each]
    origins = dict(reversed([(chunk.key, o) for chunk, o in zip(chunks, documents.origins, strict=True)])).values()
    stored = sum(origin.state in ("held", "stored") for origin in origins)
    done = [f"{stored} stored", f"{len(origins) - stored} computed"]
    if measured := sum(origin.dependence_computed for origin in origins):
        done.append(f"dependence of {measured} measured")
    kept = f"Chunks: {', '.join(done)}, in {duration(seconds)}"
    rates = [a.answer.seconds_per_token for a in accounts if a.answer.seconds_per_token is not None]
    Console(stderr=True, highlight=False, markup=False).print(
        f"\n{kept}. Prompt: {first.tokens} tokens, {first.exact} exact as stored, {first.reused} reused, "
        f"{first.recomputed} recomputed, {first.computed} computed. First token after "
        f"{duration(accounts[0].first_token_seconds)}, then {duration(rates[0] if rates else None)} a token."
    )
