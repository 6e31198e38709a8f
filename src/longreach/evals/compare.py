"""Methods beside dense on one prompt: how far next-token distributions move, what is read, how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import Reader, attach, check_length, stop_tokens
from longreach.errors import InvalidInput
from longreach.methods.registry import names


@dataclass(frozen=True)
class Comparison:
    """One method beside dense over the same tokens (dense's own greedy continuation, fed to both).

    kl: mean KL(dense || method) of next-token distributions, nats. first_divergence: the first step at which the
    method's most likely token is another, counted from 0; None if none. Fractions are of dense's bytes.
    """

    prefill: str
    decode: str
    kl: float
    first_divergence: int | None
    steps: int
    prefill_fraction: float | None
    decode_fraction: float | None
    first_token_seconds: float
    seconds_per_token: float | None


def combinations(chosen: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """(prefill, decode) pairs: dense, each decode method after a dense prefill, each prefill method throughout."""
    pairs = [("dense", name) for name in names("decode")]
    pairs += [(name, name) for name in names("prefill") if name != "dense"]
    return [p for p in pairs if p == ("dense", "dense") or chosen is None or p[1] in chosen]


def compare(
    model: Any, tokenizer: Any, prompt: Sequence[int], *, steps: int = 32, methods: Sequence[str] | None = None,
    chunk: int = 512, progress: Callable[[int], None] = lambda n: None,
) -> list[Comparison]:  # fmt: skip
    """Compare over at most `steps` decode steps; dense comes first. Raises InvalidInput for a prompt too long."""
    if steps < 1:
        raise InvalidInput(f"steps: expected at least 1, got {steps}")
    stop = stop_tokens(model, tokenizer)
    found: list[Comparison] = []
    tokens: list[int] = []
    reference: list[Tensor] = []
    for prefill, decode in combinations(methods):
        dense = (prefill, decode) == ("dense", "dense")
        with attach(model, prefill=prefill, decode=decode) as session:
            check_length(session, len(prompt), steps)
            reader = Reader(session, chunk)
            started = time.perf_counter()
            rows = [_log_probabilities(_prompt(reader, prompt, progress))]
            first = time.perf_counter() - started
            begun = time.perf_counter()
            while len(rows) <= (steps if dense else len(tokens)):
                token = int(rows[-1].argmax()) if dense else tokens[len(rows) - 1]
                if dense:
                    if token in stop and len(rows) > 1:
                        break
                    tokens.append(token)
                rows.append(_log_probabilities(reader.step(token)))
            took = time.perf_counter() - begun
            report = session.report()
        reference = rows if dense else reference
        kls = [float((a.exp() * (a - b)).sum()) for a, b in zip(reference, rows, strict=True)]
        differs = [i for i, (a, b) in enumerate(zip(reference, rows, strict=True)) if a.argmax() != b.argmax()]
        found.append(
            Comparison(
                prefill,
                decode,
                max(0.0, sum(kls) / len(kls)),
                differs[0] if differs else None,
                len(rows) - 1,
                report.fraction("prefill"),
                report.fraction("decode"),
                first,
                took / (len(rows) - 1),
            )
        )
    return found


def _prompt(reader: Reader, prompt: Sequence[int], progress: Callable[[int], None]) -> Tensor:
    reader.read(prompt[:-1], progress)
    return reader.prompt(prompt[-1:])


def _log_probabilities(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), -1).cpu()
