"""`longreach store add`: documents into chunks, chunks into the store."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longreach.cli.common import (
    add_chunk_size,
    add_json,
    add_model,
    byte_size,
    load_model,
    positive,
    read_system,
    read_whole,
)
from longreach.cli.show import Column, Table, console, duration, emit, place, progress, size, waiting
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.adapters.transformers import ChunkPlace, Pieces, Precompute
    from longreach.store import ChunkStore

STATES = ("stored", "computed", "recomputed")
DEPENDENCE = ("stored", "computed", "none")
REPEATED = "repeated"  # the same chunk came before, in this document or another
FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    add_model(parser)
    parser.add_argument("names", nargs="+", metavar="FILE", help="UTF-8 text, read as it is; - for standard input")
    prefix = parser.add_mutually_exclusive_group()
    prefix.add_argument("--prefix", metavar="TEXT", help="what stands before every chunk and is attended to, with the "
                        "tokenizer's special tokens; '' for these alone (default: nothing)")  # fmt: skip
    prefix.add_argument("--prefix-file", metavar="FILE", help="the same, from a file")
    prefix.add_argument("--system", metavar="FILE", help="UTF-8 text: chunks are computed behind the head that "
                        "`longreach run --documents --system FILE` makes of it, chat template included, so that it "
                        "finds them; '' for run without --system")  # fmt: skip
    parser.add_argument("--exact", action="store_true", help="with --system: compute each chunk behind all that is "
                        "before it in a prompt of these files in this order; prompts that begin so recompute none of "
                        "them, others do not find them")  # fmt: skip
    parser.add_argument("--dependence", action="store_true", help="run each chunk once more, behind another one, and "
                        "store how far its tokens move, for --fuse dependence; chunks stored without it get "
                        "it")  # fmt: skip
    parser.add_argument("--chunk-tokens", type=positive, default=512, metavar="N", help="of a chunk at most (default "
                        "512); it ends with a paragraph or a sentence where it can")  # fmt: skip
    parser.add_argument("--max-bytes", type=byte_size, metavar="SIZE", help="of the store, such as 200GB; the longest "
                        "unused chunks give way. It binds this command alone, so give it each time (default: no "
                        "limit)")  # fmt: skip
    add_chunk_size(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    texts = {name: read_whole(name, "as FILE") for name in dict.fromkeys(args.names)}
    if args.exact and args.system is None:
        raise InvalidInput("--exact: what is before each chunk follows from --system; give it too ('' for none)")
    if args.exact and args.dependence:
        raise InvalidInput("--exact with --dependence: exact chunks are never recomputed; give one of the two")
    prefix_text = args.prefix if args.prefix_file is None else read_whole(args.prefix_file, "as --prefix-file")
    system = read_system(args.system) if args.system else ""
    if prefix_text is not None and any("\ud800" <= c <= "\udfff" for c in prefix_text):
        raise InvalidInput("--prefix must be text; this one holds bytes that are not UTF-8")
    with waiting("loading the model"):
        from longreach.store import ChunkStore

        store = ChunkStore(args.store, max_bytes=args.max_bytes)
        model, tokenizer = load_model(args)
        from longreach.adapters.transformers import (
            BETWEEN,
            Precompute,
            Splitter,
            attach,
            document_head,
            encode,
            fingerprint,
            model_path,
            places,
        )
        from longreach.records import environment

        machine = environment(model.device)
        started = time.perf_counter()
        known = fingerprint(model)
        fingerprinted = time.perf_counter() - started
        splitter = Splitter(tokenizer, args.chunk_tokens)
        documents = {name: _split(splitter, name, text) for name, text in texts.items()}
        prefix = [] if prefix_text is None else encode(tokenizer, prefix_text)
        if args.system is not None:
            prefix = document_head(tokenizer, system)[1]
        tokens = [[piece.tokens for piece in pieces.chunks] for pieces in documents.values()]
        where = places(tokens, encode(tokenizer, BETWEEN, special=False))
    started = time.perf_counter()
    with store, attach(model) as session:
        work = Precompute(session, prefix, chunk=args.prefill_chunk_size, known=known)
        wanted = [Wanted(work.key(p.tokens, p.before if args.exact else ()).name, p) for p in where]
        states = _fill(work, store, wanted, args)
        seconds = time.perf_counter() - started
        entries, counts = store.entries(), store.report()
        sizes, seen = {entry.name: entry.bytes for entry in entries}, set[str]()
        files = [
            _account(name, pieces, [w.name for w in wanted if w.place.document == number], states, sizes, seen)
            for number, (name, pieces) in enumerate(documents.items())
        ]
    ours = {c["name"]: c for file in files for c in file["chunks"] if c["state"] != REPEATED}
    document = {
        "kind": "store add", "format": FORMAT, "store": args.store,
        "model": {"name": model_path(args.model).name, "fingerprint": known.digest,
                  "dtype": str(model.dtype).removeprefix("torch.")},
        "config": {"chunk_tokens": args.chunk_tokens, "prefix_tokens": len(prefix), "max_bytes": args.max_bytes,
                   "prefill_chunk_size": args.prefill_chunk_size, "exact": args.exact,
                   "dependence": args.dependence},
        "files": files,
        "chunks": len(ours),
        **{state: sum(chunk["state"] == state for chunk in ours.values()) for state in STATES},
        "tokens_computed": sum(c["tokens"] for c in ours.values() if c["state"] != "stored"),
        "dependence": {answer: sum(c["dependence"] == answer for c in ours.values()) for answer in DEPENDENCE},
        "gave_way": sum(chunk["bytes"] is None for chunk in ours.values()),
        "others_in_store": sum(entry.name not in ours for entry in entries),
        "store_bytes": sum(entry.bytes for entry in entries),
        "counts": counts,
        "seconds": {"fingerprint": fingerprinted, "add": seconds},
        **machine,
    }  # fmt: skip
    if args.json:
        emit(document)
    else:
        _show(document, machine)
    if document["gave_way"]:
        print(f"longreach: {document['gave_way']} of these chunks gave way to others, for all of them are more than "
              f"--max-bytes; raise it", file=sys.stderr)  # fmt: skip
    return 0


def _split(splitter: Any, name: str, text: str) -> Pieces:
    try:
        return splitter.split(text)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error


class Wanted(NamedTuple):
    """A chunk to store: its name, and its place in a prompt of all files."""

    name: str
    place: ChunkPlace


def _fill(
    work: Precompute, store: ChunkStore, wanted: list[Wanted], args: argparse.Namespace
) -> dict[str, tuple[str, str]]:
    """name of a chunk -> one of STATES, and one of DEPENDENCE.

    If the store fails, its chunks stay, and the error names their number.
    """
    from longreach.adapters.transformers import DependenceMeter, get_or_compute

    todo: dict[str, ChunkPlace] = {}
    for name, where in wanted:
        work.check(where.tokens, where.before if args.exact else ())
        todo.setdefault(name, where)
    meter = DependenceMeter(work) if args.dependence else None
    states = dict[str, tuple[str, str]]()
    try:
        tokens = sum(len(where.tokens) for where in todo.values())
        with progress("computing tokens", tokens if meter is None else 2 * tokens) as advance:
            for name, where in todo.items():
                measure = None if meter is None or where.other is None else (meter, where.other)
                got = get_or_compute(
                    work, store, where.tokens, advance, behind=where.before if args.exact else (), exact=args.exact,
                    dependence=measure,
                )  # fmt: skip
                if meter is not None and measure is None:
                    advance(len(where.tokens))
                if got.error is not None:
                    raise got.error
                kept = "none" if got.chunk.dependence is None else "computed" if got.dependence_computed else "stored"
                states[name] = got.state, kept
    except BaseException as error:  # Ctrl-C too
        error.add_note(f"{len(states)} of {len(todo)} chunks are in the store; the same command continues from there")
        raise
    return states


def _account(
    name: str,
    pieces: Pieces,
    names: list[str],
    states: dict[str, tuple[str, str]],
    sizes: dict[str, int],
    seen: set[str],
) -> dict[str, Any]:
    """What became of a document, chunk by chunk. bytes: of the chunk's file, None where it gave way to others.

    names: of its chunks. sizes: of all files in the store. seen: names of chunks that came before; those of this
    document are added.
    """
    said = pieces.to_json()
    for chunk, chunk_name in zip(said["chunks"], names, strict=True):
        state, kept = states[chunk_name]
        chunk["name"], chunk["dependence"] = chunk_name, kept
        chunk["state"] = REPEATED if chunk_name in seen else state
        chunk["bytes"] = sizes.get(chunk["name"])
        seen.add(chunk["name"])
    return {"file": name, **said}


def _show(document: dict[str, Any], where: dict[str, Any]) -> None:
    """A row per file, then borders, times and the rest of the store."""
    out = console()
    columns = [Column("chars", 8), Column("tokens", 7), Column("chunks", 6),
               *(Column(state, max(6, len(state))) for state in STATES), Column("size", 8)]  # fmt: skip
    table = Table(out, [Column("file", 18, left=True), *columns])
    table.header()
    for file in document["files"]:
        chunks = file["chunks"]
        table.row([
            Path(file["file"]).name, str(file["characters"]), str(file["tokens"]), str(len(chunks)),
            *(str(sum(c["state"] == state for c in chunks)) for state in STATES),
            size(sum(c["bytes"] or 0 for c in chunks if c["state"] != REPEATED)),
        ])  # fmt: skip
    out.print()
    for file in document["files"]:
        _show_account(out, file)
    model, seconds = document["model"], document["seconds"]
    done, took = document["tokens_computed"], seconds["add"]
    n = document["config"]["prefix_tokens"]
    alone = f"behind a prefix of {n} token{'s' * (n != 1)}" if n else "alone"
    if document["config"]["exact"]:
        alone = f"behind {n} token{'s' * (n != 1)} and everything before them"
    out.print(
        f"{document['chunks']} chunks of {model['name']} ({model['dtype']}, fingerprint {model['fingerprint'][:12]}, "
        f"taken in {duration(seconds['fingerprint'])}), {alone}; {done} tokens computed and stored in "
        f"{duration(took)}. The store holds {document['others_in_store']} other chunks, "
        f"{size(document['store_bytes'])} in all.",
        soft_wrap=True,
    )
    if document["config"]["dependence"]:
        out.print(_dependence(document["dependence"]), soft_wrap=True)
    if document["recomputed"]:
        out.print(f"{document['recomputed']} chunks were damaged in the store and were computed again.", soft_wrap=True)
    out.print(place(where), soft_wrap=True)


def _dependence(counts: dict[str, int]) -> str:
    """How many chunks have their tokens' dependence, and why others have none."""
    told = f"Dependence: computed for {counts['computed']} chunks, stored before for {counts['stored']}"
    if counts["none"]:
        told += f", missing for {counts['none']}, as there is no other chunk to run before it; add another document"
    return f"{told}."


def _show_account(out: Any, file: dict[str, Any]) -> None:
    """Lines about a document of which not everything is as its reader may think."""
    name = Path(file["file"]).name
    if file["restored_characters"] < file["characters"]:
        out.print(f"{name}: the tokenizer changes the text from character {file['restored_characters']} on: its "
                  f"tokens, decoded, are not the text, in chunks as in any prompt.", soft_wrap=True)  # fmt: skip
    if repeated := sum(chunk["state"] == REPEATED for chunk in file["chunks"]):
        out.print(f"{name}: {repeated} chunks are the same as others before them.", soft_wrap=True)
    if file["special_tokens_in_text"]:
        out.print(f"{name}: the text spells out {file['special_tokens_in_text']} control tokens of the tokenizer; they "
                  f"are read as text.", soft_wrap=True)  # fmt: skip
    if file["other_tokens_alone"]:
        out.print(f"{name}: the chunks' tokens, joined, are the document's; {file['other_tokens_alone']} of its chunks "
                  f"would be other tokens if their text were given alone.", soft_wrap=True)  # fmt: skip
