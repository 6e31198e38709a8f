"""`longreach store add`: documents into chunks, chunks into the store."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_chunk_size, add_json, add_model, byte_size, load_model, positive, read_text
from longreach.cli.show import Column, Table, console, duration, emit, place, progress, size, waiting
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.adapters.transformers import Pieces, Precompute
    from longreach.store import ChunkStore

STATES = ("stored", "computed", "recomputed")
REPEATED = "repeated"  # the same chunk came before, in this document or another
FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    add_model(parser)
    parser.add_argument("names", nargs="+", metavar="FILE", help="UTF-8 text, read as it is; - for standard input")
    prefix = parser.add_mutually_exclusive_group()
    prefix.add_argument("--prefix", metavar="TEXT", help="what stands before every chunk and is attended to, with the "
                        "tokenizer's special tokens; '' for these alone (default: nothing)")  # fmt: skip
    prefix.add_argument("--prefix-file", metavar="FILE", help="the same, from a file")
    parser.add_argument("--chunk-tokens", type=positive, default=512, metavar="N", help="of a chunk at most (default "
                        "512); it ends with a paragraph or a sentence where it can")  # fmt: skip
    parser.add_argument("--max-bytes", type=byte_size, metavar="SIZE", help="of the store, such as 200GB; the longest "
                        "unused chunks give way. It binds this command alone, so give it each time (default: no "
                        "limit)")  # fmt: skip
    add_chunk_size(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    texts = {name: _read(name, "FILE") for name in dict.fromkeys(args.names)}
    prefix_text = args.prefix if args.prefix_file is None else _read(args.prefix_file, "--prefix-file")
    if prefix_text is not None and any("\ud800" <= c <= "\udfff" for c in prefix_text):
        raise InvalidInput("--prefix must be text; this one holds bytes that are no UTF-8")
    with waiting("loading the model"):
        from longreach.store import ChunkStore

        store = ChunkStore(args.store, max_bytes=args.max_bytes)
        model, tokenizer = load_model(args)
        from longreach.adapters.transformers import Precompute, Splitter, attach, encode, fingerprint, model_path
        from longreach.records import environment

        where = environment(model.device)
        started = time.perf_counter()
        known = fingerprint(model)
        fingerprinted = time.perf_counter() - started
        splitter = Splitter(tokenizer, args.chunk_tokens)
        documents = {name: _split(splitter, name, text) for name, text in texts.items()}
        prefix = [] if prefix_text is None else encode(tokenizer, prefix_text)
    started = time.perf_counter()
    with store, attach(model) as session:
        work = Precompute(session, prefix, chunk=args.prefill_chunk_size, known=known)
        states = _fill(work, store, documents)
        seconds = time.perf_counter() - started
        entries, counts = store.entries(), store.report()
        sizes, seen = {entry.name: entry.bytes for entry in entries}, set[str]()
        files = [_account(work, name, pieces, states, sizes, seen) for name, pieces in documents.items()]
    ours = {c["name"]: c for file in files for c in file["chunks"] if c["state"] != REPEATED}
    document = {
        "kind": "store add", "format": FORMAT, "store": args.store,
        "model": {"name": model_path(args.model).name, "fingerprint": known.digest,
                  "dtype": str(model.dtype).removeprefix("torch.")},
        "config": {"chunk_tokens": args.chunk_tokens, "prefix_tokens": len(prefix), "max_bytes": args.max_bytes,
                   "prefill_chunk_size": args.prefill_chunk_size},
        "files": files,
        "chunks": len(ours),
        **{state: sum(chunk["state"] == state for chunk in ours.values()) for state in STATES},
        "tokens_computed": sum(c["tokens"] for c in ours.values() if c["state"] != "stored"),
        "gave_way": sum(chunk["bytes"] is None for chunk in ours.values()),
        "others_in_store": sum(entry.name not in ours for entry in entries),
        "store_bytes": sum(entry.bytes for entry in entries),
        "counts": counts,
        "seconds": {"fingerprint": fingerprinted, "add": seconds},
        **where,
    }  # fmt: skip
    if args.json:
        emit(document)
    else:
        _show(document, where)
    if document["gave_way"]:
        print(f"longreach: {document['gave_way']} of these chunks gave way to others, for all of them are more than "
              f"--max-bytes; raise it", file=sys.stderr)  # fmt: skip
    return 0


def _read(name: str, what: str) -> str:
    """The text of a file exactly as it is, its line ends too; a byte order mark is no text. Raises InvalidInput."""
    shown, text = read_text(name, f"as {what}")
    if not text.strip():
        raise InvalidInput(f"{shown} is empty; leave it out, or give a file with text in it")
    return text


def _split(splitter: Any, name: str, text: str) -> Pieces:
    try:
        return splitter.split(text)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error


def _fill(work: Precompute, store: ChunkStore, documents: dict[str, Pieces]) -> dict[str, str]:
    """name of a chunk -> one of STATES. Where the store fails, all that it has stays, and the error says how much."""
    from longreach.adapters.transformers import get_or_compute

    wanted = {work.key(piece.tokens).name: piece.tokens for pieces in documents.values() for piece in pieces.chunks}
    for tokens in wanted.values():
        work.check(tokens)
    states = dict[str, str]()
    try:
        with progress("computing tokens", sum(map(len, wanted.values()))) as advance:
            for name, tokens in wanted.items():
                found = get_or_compute(work, store, tokens, advance)
                if found.error is not None:
                    raise found.error
                states[name] = found.state
    except BaseException as error:  # Ctrl-C too
        error.add_note(f"{len(states)} of {len(wanted)} chunks are in the store; the same command goes on from there")
        raise
    return states


def _account(
    work: Precompute, name: str, pieces: Pieces, states: dict[str, str], sizes: dict[str, int], seen: set[str]
) -> dict[str, Any]:
    """What became of a document, chunk by chunk. bytes: of the chunk's file, None where it gave way to others.

    sizes: of all files in the store. seen: names of chunks that came before; those of this document are added.
    """
    said = pieces.to_json()
    for chunk, piece in zip(said["chunks"], pieces.chunks, strict=True):
        chunk["name"] = work.key(piece.tokens).name
        chunk["state"] = REPEATED if chunk["name"] in seen else states[chunk["name"]]
        chunk["bytes"] = sizes.get(chunk["name"])
        seen.add(chunk["name"])
    return {"file": name, **said}


def _show(document: dict[str, Any], where: dict[str, Any]) -> None:
    """A row a file, then what there is to know of borders, times and the rest of the store."""
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
    out.print(
        f"{document['chunks']} chunks of {model['name']} ({model['dtype']}, fingerprint {model['fingerprint'][:12]}, "
        f"taken in {duration(seconds['fingerprint'])}), {alone}; {done} tokens computed and stored in "
        f"{duration(took)}. The store holds {document['others_in_store']} chunks besides, "
        f"{size(document['store_bytes'])} in all.",
        soft_wrap=True,
    )
    if document["recomputed"]:
        out.print(f"{document['recomputed']} chunks were damaged in the store and are computed anew.", soft_wrap=True)
    out.print(place(where), soft_wrap=True)


def _show_account(out: Any, file: dict[str, Any]) -> None:
    """Lines about a document of which not everything is as its reader may think."""
    name = Path(file["file"]).name
    if file["restored_characters"] < file["characters"]:
        out.print(f"{name}: the tokenizer changes the text from character {file['restored_characters']} on: its "
                  f"tokens, decoded, are not the text, in chunks as in any prompt.", soft_wrap=True)  # fmt: skip
    if repeated := sum(chunk["state"] == REPEATED for chunk in file["chunks"]):
        out.print(f"{name}: {repeated} chunks are the same as others before them.", soft_wrap=True)
    if file["special_tokens_in_text"]:
        out.print(f"{name}: the text spells out {file['special_tokens_in_text']} special tokens of the tokenizer.",
                  soft_wrap=True)  # fmt: skip
    if file["other_tokens_alone"]:
        out.print(f"{name}: the chunks' tokens, joined, are the document's; {file['other_tokens_alone']} of its chunks "
                  f"would be other tokens if their text were given alone.", soft_wrap=True)  # fmt: skip
