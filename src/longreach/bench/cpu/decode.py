"""Times of a token of the shipped model on a CPU: each decode method compiled by Numba, and by the reference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longreach.adapters.transformers import BatchReader, Session, attach, encode, load, model_path, shape_of
from longreach.cache import CacheConfig
from longreach.methods.base import AttentionMethod
from longreach.methods.registry import choose, names, unfit
from longreach.records.weights import weights_sha256
from longreach.tasks.haystack import paragraphs

TARGET = 3.0  # of a token by the reference over one by Numba, for methods that attend to lists
SPANS = ("dense", "streaming_llm")  # methods without lists: dense rows are matrix products, which torch does well
TOKENS = 4  # of an answer that is timed
IMPLS = ("auto", "reference")
Say = Callable[[str], None]


def measure(
    context: int, repeats: int, say: Say, *, model: str = "mini", methods: Sequence[str] | None = None
) -> dict[str, Any]:
    """The record's part. The prompt is read once, and each answer starts after it, by turns of implementations."""
    weights = model_path(model)
    loaded, tokenizer = load(model)
    chosen = [choose("decode", n) for n in methods or names("decode") if n not in unfit(shape_of(loaded))]
    ids = encode(tokenizer, "\n\n".join(paragraphs()))[: context - TOKENS - 1]
    found = list[dict[str, Any]]()
    with attach(loaded, cache=CacheConfig(capacity=context)) as session:
        session.prepare(*chosen)
        reader = BatchReader(session)
        say(f"decode: reading {len(ids)} tokens")
        logits = reader.read([ids])
        for method in chosen:
            found.append(_method(session, reader, logits, method, repeats))
            say(line(found[-1]))
    return {
        "model": {"name": weights.name, "sha256": weights_sha256(weights), "dtype": str(loaded.dtype)[6:]},
        "context": len(ids), "tokens": TOKENS, "repeats": repeats, "threads": torch.get_num_threads(),
        "read_seconds": reader.read_seconds, "methods": found,
    }  # fmt: skip


def _method(
    session: Session, reader: BatchReader, logits: torch.Tensor, method: AttentionMethod, repeats: int
) -> dict[str, Any]:
    """Seconds a token by implementation, who computed, and whether both gave the same tokens."""
    session.switch(method)
    took: dict[str, list[float]] = {impl: [] for impl in IMPLS}
    tokens, used, share = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for turn in range(repeats + 1):
        for impl in IMPLS:
            session.impl = impl
            session.reset_report()
            got = reader.answer(logits, TOKENS + 1, ())
            tokens[impl] = got.tokens
            report = session.report()
            used[impl], share[impl] = sorted({x.impl for x in report.layers}), report.fraction("decode")
            if turn and got.steps:  # the first turn compiles
                took[impl].append(got.decode_seconds / got.steps)
    session.impl = IMPLS[0]
    seconds = {impl: statistics.median(took[impl]) for impl in IMPLS}
    ratio = seconds["reference"] / seconds["auto"]
    return {
        "method": method.to_json(), "seconds": seconds, "each": took, "computed_by": used,
        "read": share["auto"], "same_tokens": tokens["auto"] == tokens["reference"], "ratio": ratio,
        **({} if method.name in SPANS else {"target": {"wanted": TARGET, "met": ratio >= TARGET}}),
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """A method in a line."""
    ours, reference = (1e3 * found["seconds"][impl] for impl in IMPLS)
    return (
        f"decode {found['method']['name']:16} {ours:7.1f} ms a token, reference {reference:7.1f} "
        f"({found['ratio']:.1f}x); read {found['read']:.1%}"
    )
