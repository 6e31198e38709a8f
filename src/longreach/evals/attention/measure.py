"""A model's attention over several needle prompts, as part of a record."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import CHUNK, Answer, Reader, attach, check_length, shape_of
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.attention.agreement import K
from longreach.evals.attention.masses import COVER, SINKS, TOPS, WINDOWS
from longreach.evals.attention.probe import KINDS, AttentionProbe
from longreach.evals.attention.prompts import TASKS, make
from longreach.evals.attention.queries import RECENT, TAUS
from longreach.evals.calibration.gather import DenseBeforeRotation
from longreach.evals.progress import Progress, unseen

DIGITS = 6  # significant


class Attention:
    """Prompts of each of TASKS, `samples` of them, of at most `length` tokens with room for an answer.

    rows: positions of each prompt's text that are looked at, drawn from its last quarter. Raises InvalidInput where
    length, samples or rows do not fit, Unsupported for a tokenizer or model that cannot be measured.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, length: int = 4096, samples: int = 8, rows: int = 64, seed: int = 0
    ):
        for name, value in (("samples", samples), ("rows", rows)):
            if value < 1:
                raise InvalidInput(f"{name}: expected at least 1, got {value}")
        check_length(model, length, 0)
        self.model, self.length = model, length
        self.prompts = [make(t, tokenizer, length, seed, n, samples, rows) for t in TASKS for n in range(samples)]

    def run(self, chunk: int = CHUNK, progress: Progress = unseen) -> dict[str, Any]:
        """{"samples", "results"} of a record; see `results`."""
        watch = AttentionProbe(shape_of(self.model), self.length, TASKS, self.model.device)
        method, samples = DenseBeforeRotation(), list[dict[str, Any]]()
        total = sum(len(p.tokens) + len(p.answer) for p in self.prompts)
        room = CacheConfig(capacity=self.length)
        with attach(self.model, prefill=method, decode=method, cache=room) as session:
            reader, session.on_layer = Reader(session, chunk, graph=False), watch
            with progress("reading", total) as advance:
                for prompt in self.prompts:
                    watch.begin(prompt)
                    with reader.rollback():
                        right = _write(reader, reader.read(prompt.tokens, advance), prompt.answer)
                    advance(len(prompt.answer))
                    samples.append({
                        "task": prompt.task, "number": prompt.number, "tokens": len(prompt.tokens),
                        "answer_tokens": len(prompt.answer), "right": right, "facts": prompt.facts,
                    })  # fmt: skip
        return {"samples": samples, "results": results(watch)}


def _write(reader: Reader, logits: Tensor, answer: tuple[int, ...]) -> int:
    """Feed the right answer token by token; how many of them the model would have chosen itself."""
    forced = torch.tensor(answer, device=logits.device)
    guesses: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        guesses.append(logits[0].argmax())
        at = min(len(guesses), len(forced)) - 1
        return forced[at : at + 1]

    with closing(reader.decode(logits, len(forced), Answer(), choose=choose)) as tokens:
        for _ in tokens:
            pass
    return int((torch.stack(guesses[: len(forced)]) == forced).sum())


def results(watch: AttentionProbe) -> dict[str, Any]:
    """The measurements: lists are [layers][query heads], with one more level for several numbers each.

    Weights are shares of the weight on keys. A virtual sink's share of the whole is separate. None: not measured.
    """
    return {
        "windows": watch.windows,
        "sink_keys": SINKS, "last_keys": list(WINDOWS), "top_keys": list(TOPS), "cover": COVER,
        "distance_edges": watch.edges, "recent_queries": RECENT, "taus": list(TAUS), "agreement_keys": K,
        "queries_unknown": {str(layer): why for layer, why in watch.rotations_unknown.items()},
        "rows": {kind: _rows(watch, n) for n, kind in enumerate(KINDS)},
        "retrieval": {
            task: {"score": _lists(watch.retrieval.mean("copies", n)),
                   "needle": _lists(watch.retrieval.mean("needle", n))}
            for n, task in enumerate(watch.tasks)
        },
    }  # fmt: skip


def _rows(watch: AttentionProbe, kind: int) -> dict[str, Any]:
    names = ("sinks", "windows", "distance", "tops", "cover", "virtual_sink", "previous", "best", "match")
    measured = {name: _lists(watch.masses.mean(name, kind)) for name in names}
    return {"count": int(watch.agreement.rows[kind]), **measured, "agreement": _rounded(watch.agreement.maps(kind))}


def _lists(layers: list[Tensor | None]) -> Any:
    return [None if layer is None else _rounded(layer.tolist()) for layer in layers]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return None if value is None else float(f"{value:.{DIGITS}g}")
