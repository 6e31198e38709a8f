"""Perplexity of long texts with every method: of prompts read with it, and of tokens decoded with it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import (
    Advance,
    Answer,
    Reader,
    Session,
    attach,
    check_length,
    encode,
    planned_shape,
)
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, MeasurementFailed
from longreach.evals.failures import failure
from longreach.evals.methods import NAMED, Spec, by_prefill, refuse_slots
from longreach.evals.progress import Progress, counted, unseen
from longreach.evals.read_shares import phase_bytes, shares
from longreach.methods.base import AttentionMethod
from longreach.records import bootstrap

BINS = 16  # of positions
MOST = 709.0  # nats: the largest with a finite exponential
Keep = Callable[[str, Any], None]


def _forget(name: str, part: Any) -> None:
    """Keeps nothing."""


def perplexity(nll: float) -> float:
    """exp(nll), infinite where no float holds it."""
    return math.exp(nll) if not nll > MOST else math.inf


@dataclass
class Curve:
    """Sums of -log p, in nats, by position in the window: bins of equal width over [start, stop)."""

    start: int
    stop: int
    bins: int = BINS
    sums: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        bins = min(self.bins, self.stop - self.start)
        self.edges = [self.start + (self.stop - self.start) * i // bins for i in range(bins + 1)]
        self.sums, self.tokens = [0.0] * bins, [0] * bins

    def sums_of(self, nll: Tensor) -> list[float]:
        """The sums of one window. nll [stop - start]: of the tokens at these positions."""
        pairs = zip(self.edges, self.edges[1:], strict=False)
        return [float(nll[a - self.start : b - self.start].double().sum()) for a, b in pairs]

    def over(self, windows: Iterable[Sequence[float]]) -> dict[str, Any]:
        """A record's entry for windows with these sums."""
        for sums in windows:
            self.windows.append(sum(sums) / (self.stop - self.start))
            for i, (a, b) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
                self.sums[i] += sums[i]
                self.tokens[i] += b - a
        return self.to_json()

    def to_json(self) -> dict[str, Any]:
        """perplexity = exp(nll), nll the mean over all tokens, by_window and by_position the same of their parts.

        interval_95: of nll, by bootstrap over windows; None for a single window.
        """
        mean = sum(self.sums) / sum(self.tokens)
        rows = zip(self.edges, self.edges[1:], self.sums, self.tokens, strict=False)
        return {
            "perplexity": perplexity(mean),
            "nll": mean,
            "interval_95": bootstrap(self.windows),
            "tokens": sum(self.tokens),
            "by_window": self.windows,
            "by_position": [{"start": a, "stop": b, "nll": s / n, "tokens": n} for a, b, s, n in rows],
        }


@dataclass(frozen=True)
class Text:
    """A file's tokens without special ones."""

    name: str
    sha256: str
    characters: int
    tokens: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": len(self.tokens)}


def read_text(path: Path, tokenizer: Any) -> Text:
    """Raises InvalidInput for a file that cannot be read, is not UTF-8 text or is empty."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path given to --text") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is not UTF-8 text (byte {error.start}); convert it, for example with iconv"
        ) from error
    if not text.strip():
        raise InvalidInput(f"{path} is empty; give a file with text in it")
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    return Text(path.name, hashlib.sha256(content).hexdigest(), len(text), ids)


def text_of(given: str | Path, number: int, tokenizer: Any) -> Text:
    """A text given in Python: str is the text itself, named by its number, Path a file. Raises as `read_text`."""
    if isinstance(given, Path):
        return read_text(given, tokenizer)
    if not given.strip():
        raise InvalidInput(f"text {number} is empty; give one with words in it")
    ids = tuple(tokenizer(given, add_special_tokens=False, verbose=False).input_ids)
    return Text(f"text {number}", hashlib.sha256(given.encode()).hexdigest(), len(given), ids)


def windows_of(texts: Sequence[Text], tokenizer: Any, length: int, limit: int | None = None) -> list[list[int]]:
    """Texts cut into windows of `length` tokens, each starting with the tokenizer's beginning of text if it has one.

    Raises InvalidInput where none is whole, or has room for a token of a text.
    """
    begin = encode(tokenizer, "")
    take = length - len(begin)
    if take < 1:
        raise InvalidInput(f"length: expected at least {len(begin) + 1} tokens, got {length}; raise --length")
    found = [
        [*begin, *text.tokens[at : at + take]] for text in texts for at in range(0, len(text.tokens) - take + 1, take)
    ]
    if not found:
        longest = max((len(text.tokens) for text in texts), default=0)
        raise InvalidInput(
            f"the longest text has {longest} tokens, a window takes {take}; lower --length, or give longer texts"
        )
    return found[:limit]


class Perplexity:
    """Texts cut into windows (`windows_of`).

    decode_tokens: tokens of each window, its last, that are fed one by one through the decode methods after the rest
    was read with the prefill method; 0 for none. Where cutting off a window's end would not leave what reading the rest
    leaves (prefills that pool over rows, MAC's ring), the rest is read once more before its end is decoded, and the
    bytes of prefill are of this. cache: its place in memory; its capacity is that of a window.
    Raises InvalidInput if no window is whole, a window exceeds the model's context, or decoding leaves nothing to read.
    """

    def __init__(
        self, model: Any, tokenizer: Any, texts: Sequence[Text], specs: Sequence[Spec], *, length: int = 4096,
        decode_tokens: int = 256, limit: int | None = None, graph: bool | None = None,
        cache: CacheConfig | None = None,
    ):  # fmt: skip
        check_length(model, length, 0)
        if not 0 <= decode_tokens <= length - 3:
            raise InvalidInput(f"decode tokens: expected 0 to {length - 3} of windows of {length}, got {decode_tokens}")
        refuse_slots(specs, NAMED, "perplexity reads windows of a text, which hold no documents and no question")
        for spec in specs:
            for method in (spec.prefill, spec.decode):
                method.check(planned_shape(model))
        self.model, self.specs, self.length, self.decode_tokens, self.graph = model, specs, length, decode_tokens, graph
        self.windows = windows_of(texts, tokenizer, length, limit)
        self.room = replace(cache or CacheConfig(), capacity=length)

    def run(
        self, chunk: int, progress: Progress = unseen, *, done: Mapping[str, Any] | None = None, keep: Keep = _forget
    ) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """(each method's part of a record by its label, the windows that failed: method, window, error).

        Windows are read once for methods that share a prefill. A window that failed with one method is left out for
        all, so that means are over the same tokens; a method that failed in all of them has no results.
        done: windows that an interrupted run measured, by name; `keep` is called with each new one that did not fail.
        Raises MeasurementFailed if the device is lost, or no window is left.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for prefill, specs in by_prefill(self.specs):
            names = [f"{specs[0].label}|{number}" for number in range(len(self.windows))]
            parts = {name: (done or {})[name] for name in names if name in (done or {})}
            if len(parts) < len(names):
                self._measure(prefill, specs, chunk, progress, names, parts, keep)
            found |= {spec.label: [parts[name] for name in names] for spec in specs}
        failed = {label: {n: e for n, part in enumerate(parts) if (e := _error(part, label))}
                  for label, parts in found.items()}  # fmt: skip
        measured = [label for label in found if len(failed[label]) < len(self.windows)]
        left = [n for n in range(len(self.windows)) if not any(n in failed[label] for label in measured)]
        told = [
            {"method": label, "window": n, "error": e} for label, errors in failed.items() for n, e in errors.items()
        ]
        if not measured or not left:
            first = "window {window}, {method}: {error}".format(**told[0])
            raise MeasurementFailed(f"no window was measured with all methods: {len(told)} failures, first {first}")
        return {label: self._result(label, [found[label][n] for n in left]) for label in measured}, told

    def _measure(
        self, prefill: AttentionMethod, specs: list[Spec], chunk: int, progress: Progress, names: Sequence[str],
        parts: dict[str, Any], keep: Keep,
    ) -> None:  # fmt: skip
        """Add to `parts` the windows that are missing."""
        fresh = [(name, w) for name, w in zip(names, self.windows, strict=True) if name not in parts]
        with (
            attach(self.model, prefill=prefill, cache=self.room) as session,
            progress(f"{prefill.name} prefill, {counted(len(specs), 'method')}", self.length * len(fresh)) as advance,
        ):
            session.prepare(*(spec.decode for spec in specs))
            reader = Reader(session, chunk, graph=self.graph)
            for name, window in fresh:
                parts[name] = self._window(session, reader, specs, window, advance)
                if not any(_error(parts[name], spec.label) for spec in specs):
                    keep(name, parts[name])

    def _window(
        self, session: Session, reader: Reader, specs: list[Spec], window: list[int], advance: Advance
    ) -> dict[str, Any]:
        """One window read, and its end decoded with every method, as JSON values; {"error": ...} after a crash."""
        session.reset_report()
        before, decoded = reader.read_seconds, dict[str, Any]()
        try:
            with reader.rollback():
                whole = self._whole().sums_of(reader.score(window, advance).cpu())
                seconds, prompt = reader.read_seconds - before, window[: -self.decode_tokens - 1]
                # state that the prefill or a method made from the end must not exist before it
                exact = session.prefill.chunked_prefill_exact
                rings = any(method.keeps == "sequences" for method in session.observers)
                stays = not reader.cache.can_drop(self.decode_tokens + 1)  # the model's own state (FastMKA)
                if self.decode_tokens and (not exact or rings or stays):
                    reader.cache.drop_columns(len(window))
                    session.reset_report()
                    reader.read(prompt, then=self.decode_tokens + 1)
                elif self.decode_tokens:
                    reader.cache.drop_columns(self.decode_tokens + 1)
                read = {spec.label: phase_bytes(session.report(spec.decode), "prefill") for spec in specs}
                for spec in specs if self.decode_tokens else ():
                    decoded[spec.label] = self._decoded(session, reader, spec, window)
        except Exception as error:
            return {"error": failure(error, self.model.device)}
        return {"sums": whole, "bytes": read, "seconds": seconds, "decode": decoded}

    def _decoded(self, session: Session, reader: Reader, spec: Spec, window: list[int]) -> dict[str, Any]:
        session.switch(spec.decode)
        times = Answer()
        try:
            with reader.rollback(spec.decode):
                sums = self._end().sums_of(self._decode(reader, window, times))
        except Exception as error:
            return {"error": failure(error, self.model.device)}
        read = phase_bytes(session.report(), "decode")
        return {"sums": sums, "bytes": read, "seconds": times.decode_seconds, "steps": times.steps}

    def _result(self, label: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A record's entry for a method over these windows."""
        mine = [part["decode"][label] for part in parts if self.decode_tokens]
        steps = sum(one["steps"] for one in mine)
        per_token = sum(one["seconds"] for one in mine) / steps if steps else None
        return {
            "prefill": self._whole().over([part["sums"] for part in parts]),
            "decode": self._end().over([one["sums"] for one in mine]) if mine else None,
            "prefill_reads": shares([part["bytes"][label] for part in parts]),
            "decode_reads": shares([one["bytes"] for one in mine]),
            "seconds": {"read": sum(p["seconds"] for p in parts) / len(parts), "per_token": per_token},
        }

    def _whole(self) -> Curve:
        return Curve(1, self.length)

    def _end(self) -> Curve:
        return Curve(self.length - self.decode_tokens, self.length)

    def _decode(self, reader: Reader, window: list[int], times: Answer) -> Tensor:
        """-log p [decode_tokens] of the window's last tokens, each fed in its turn."""
        rest = torch.tensor(window[-self.decode_tokens - 1 :], device=self.model.device)
        found: list[Tensor] = []
        calls = iter(range(len(rest) + 1))

        def choose(logits: Tensor) -> Tensor:
            at = min(next(calls), len(rest) - 1)
            if at:  # tokens before the first fed one were read, not decoded
                found.append(-logits[0].float().log_softmax(0)[rest[at]])
            return rest[at : at + 1]

        answer = Answer()
        anything = torch.zeros(1, device=self.model.device)
        with closing(reader.decode(anything, len(rest), answer, choose=choose)) as tokens:
            for _ in tokens:
                pass
        times.decode_seconds += answer.decode_seconds
        times.steps += answer.steps
        return torch.stack(found).cpu()


def _error(part: dict[str, Any], label: str) -> str | None:
    """Why a window has no numbers of a method, if so."""
    return part.get("error") or part["decode"].get(label, {}).get("error")
