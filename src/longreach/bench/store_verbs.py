"""Times of `longreach store` on the shipped model and haystack: fingerprint, cut, add, list, verify.

`python -m longreach.bench.store_verbs --chunks 1000 --chunk-tokens 128 --folder DIR --output FILE`; DIR takes as many
bytes as the record states, and is left there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longreach.adapters.transformers import (
    Precompute,
    Splitter,
    attach,
    device_of,
    fingerprint,
    get_or_compute,
    load,
    model_path,
)
from longreach.records import check_writable, environment, write
from longreach.records.sources import source_hash
from longreach.records.weights import weights_sha256
from longreach.store import ChunkStore
from longreach.tasks.haystack import paragraphs
from longreach.tasks.haystack import sha256 as haystack_sha256

FORMAT = 1
SAMPLE = 100  # chunks of which computing is timed alone, next to the model's own prefill


def measure(folder: Path, chunks: int, most: int, say: Callable[[str], None], model: str = "mini") -> dict[str, Any]:
    """The record but for where it was measured. Each step once, the disk's page cache as the step before leaves it."""
    took, busy, each = dict[str, float](), dict[str, float](), dict[str, list[float]]()

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        took[what] = time.perf_counter() - started
        busy[what] = os.getloadavg()[0]
        say(f"{what}: {took[what]:.2f} s")

    weights = model_path(model)
    loaded, tokenizer = load(model, device=str(device_of("auto")))
    text = "\n\n".join(paragraphs())

    @torch.no_grad()
    def prefill(tokens: Sequence[int]) -> None:
        loaded.get_decoder()(input_ids=torch.tensor([tokens], device=loaded.device), use_cache=True)

    with timed("fingerprint"):
        known = fingerprint(loaded)
    with timed("split"):
        document = Splitter(tokenizer, most).split(text)
    pieces = [piece.tokens for piece in document.chunks[:chunks]]
    with ChunkStore(folder) as store, attach(loaded) as session:
        if store.entries():
            raise SystemExit(f"{folder} holds chunks already; name an empty folder")
        work = Precompute(session, known=known)
        work.compute(pieces[0])
        with timed("add"):
            states, each["add"] = _each(lambda tokens: get_or_compute(work, store, tokens).state, pieces)
        entries = store.entries()
    with ChunkStore(folder) as store, attach(loaded) as session:
        work = Precompute(session, known=known)
        with timed("add again"):
            again, each["add again"] = _each(lambda tokens: get_or_compute(work, store, tokens).state, pieces)
        _, each["compute"] = _each(work.compute, pieces[:SAMPLE])
    _, each["prefill of the model by itself"] = _each(prefill, pieces[:SAMPLE])
    with ChunkStore(folder) as store, timed("list"):
        listed = [store.about(entry.name) for entry in store.entries()]
    with ChunkStore(folder) as store, timed("verify"):
        verified = store.verify_all()
    return {
        "kind": "store verbs", "format": FORMAT,
        "model": {"name": weights.name, "sha256": weights_sha256(weights), "fingerprint": known.digest,
                  "dtype": str(loaded.dtype).removeprefix("torch.")},
        "config": {"chunks": len(pieces), "chunk_tokens": most, "haystack_sha256": haystack_sha256()},
        "document": {"characters": len(text), "tokens": len(document.tokens), "chunks": len(document.chunks),
                     "other_tokens_alone": sum(not piece.alone for piece in document.chunks)},
        "tokens": sum(map(len, pieces)),
        "bytes": sum(entry.bytes for entry in entries),
        "computed": states.count("computed"), "stored_again": again.count("stored"),
        "listed": sum(about is not None for about in listed), "whole": verified.whole, "broken": len(verified.broken),
        "load_average_after": busy,  # of a minute: above the threads' number, others were at work too
        "seconds": took, "seconds_a_chunk": {what: _quartiles(times) for what, times in each.items()},
    }  # fmt: skip


def _each(call: Callable[[Sequence[int]], Any], pieces: Sequence[Sequence[int]]) -> tuple[list[Any], list[float]]:
    """A call's result for every chunk, and the time of each."""
    found, seconds = [], []
    for tokens in pieces:
        started = time.perf_counter()
        found.append(call(tokens))
        seconds.append(time.perf_counter() - started)
    return found, seconds


def _quartiles(seconds: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median": middle, "first_quartile": low, "third_quartile": high}


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longreach.bench.store_verbs", description="Times of the store.")
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--folder", type=Path, required=True, help="of the store, empty")
    parser.add_argument("--output", type=Path, required=True, help="the record")
    args = parser.parse_args(argv)
    check_writable(args.output)
    record = measure(args.folder, args.chunks, args.chunk_tokens, lambda line: print(line, flush=True))
    sources = {name: source_hash(name) for name in ("precompute", "chunk_store")}
    write(args.output, {**record, **environment(device_of("auto")), "sources": sources})


if __name__ == "__main__":
    main()
