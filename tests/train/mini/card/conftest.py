"""A model directory, logs of the two runs that led to it, and records of its evaluation, all made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.records import wilson
from longreach.records.weights import weights_sha256
from longreach.tasks import haystack
from longreach.tasks.registry import RULER
from longreach.testing.recipe import SHAPE
from longreach.train.mini import checkpoint
from longreach.train.mini.checkpoint import Trained
from longreach.train.mini.model import Llama

FIRST, LAST = Trained(60.004, 100, 400_000), Trained(300.25, 500, 2_500_000)
WHERE = {"commit": "c0ffee" * 6, "dirty": False, "python": "3.12.1", "versions": {"torch": "2.13.0"},
         "device": {"type": "cuda", "name": "GPU of a test", "threads": 2}}  # fmt: skip
SOURCES = [
    {"package": "cpython", "version": "3.11.7", "licence": "PSF-2.0", "files": 5390, "sha256": "ab"},
    {"package": "numpy", "version": "2.3.5", "licence": "BSD-3-Clause", "files": 240, "sha256": "cd"},
]
CORPUS = {"sources": SOURCES, "tokens": {"prose": {"cpython": 600_000, "numpy": 300_000}, "code": 100_000},
          "prose_collected": {"cpython": 7_654_321, "numpy": 12}, "overlap_window": 64, "overlap_hits": 0,
          "haystack_sha256": haystack.sha256()}  # fmt: skip


def log(begun: Trained, ended: Trained, lengths: tuple[int, ...], resumed: bool, **more: Any) -> dict[str, Any]:
    """A training log of ten points from one place to another."""
    shares = [(n + 1) / 10 for n in range(10)]
    steps = [begun.steps + round(share * (ended.steps - begun.steps)) for share in shares]
    tokens = [begun.tokens + round(share * (ended.tokens - begun.tokens)) for share in shares]
    curve = [{"step": step, "seconds": 1.0 * step, "tokens": seen, "lr": 1e-3, "lengths": [*lengths], "loss": 3.0,
              "answer": 9 / step, "text": 3 + 1 / step, "grad_norm": 1.0, "forms": {"needles": 0.75, "tracing": 0.5}}
             for step, seen in zip(steps, tokens)]  # fmt: skip
    place = {**asdict(ended), "seconds": round(ended.seconds, 2)}
    resume = {"from": "elsewhere", **asdict(begun)} if resumed else None
    return {"shape": asdict(SHAPE), "minutes": 5.0, "seed": 3, "resume": resume, **WHERE,
            "parameters": 12_345_678, "curve": curve, **place, "schedule": {}, **more}  # fmt: skip


def record(sha256: str, length: int, scores: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """What longreach eval writes: of each task its samples' scores under dense attention."""
    tasks = {}
    for name, found in scores.items():
        answers = [{"number": n, "draw": 0, "text": "a", "score": score, "tokens": 1, "stopped": True, "error": None,
                    "diverges_at": None} for n, score in enumerate(found)]  # fmt: skip
        result = {"score": sum(found) / len(found), "interval_95": list(wilson(sum(found), len(found))), "failed": 0,
                  "answers": answers, "length_over_dense": None, "prefill_reads": None, "decode_reads": None,
                  "seconds": {"read": 1.0, "setup": 0.0, "per_token": 0.1}}  # fmt: skip
        samples = [{"number": n, "tokens": length, "characters": 9, "expected": ["a"], "facts": {}}
                   for n in range(len(found))]  # fmt: skip
        tasks[name] = {"source": "RULER", "max_new_tokens": 9, "characters_per_token": 4.0, "samples": samples,
                       "results": {"dense": result}}  # fmt: skip
    model = {"name": "m", "sha256": sha256, "dtype": "bfloat16", "parameters": 12_345_678, "context": 1024}
    config = {"length": length, "samples": 4, "limit": None, "seed": 11, "draws": 1, "temperature": 0.0}
    dense = {"prefill": {"name": "dense"}, "decode": {"name": "dense"}}
    return {"kind": "eval", "format": 1, "model": model, "config": config, **WHERE, "methods": {"dense": dense},
            "tasks": tasks, **more}  # fmt: skip


@dataclass
class Made:
    """A directory's files, to be written, spoilt and read."""

    model: Path
    logs: list[Path]
    records: list[Path]

    def edit(self, path: Path, change: Callable[[Any], Any]) -> None:
        """The JSON of a file as `change` leaves it (in place) or gives it."""
        content = json.loads(path.read_text())
        path.write_text(json.dumps(change(content) or content))


@pytest.fixture
def made(data: Path, tmp_path: Path) -> Made:
    torch.manual_seed(0)
    model = tmp_path / "small-model"
    checkpoint.save(Llama(SHAPE), model, data, LAST)
    (model / "corpus.json").write_text(json.dumps(CORPUS))
    logs = [log(Trained(), FIRST, (512, 512), False), log(FIRST, LAST, (1024, 512), True)]
    sha256 = weights_sha256(model)
    ruler = {task: [1.0, 1.0, 0.5 if task == "vt" else 1.0, 0.0] for task in RULER}
    found = [
        record(sha256, 512, {**ruler, "plan": [0.25] * 4}),
        record(sha256, 1024, {task: [1.0, 0.0, 0.0, 0.0] for task in ("vt", "cwe")}),
    ]
    result = Made(model, [], [])
    for number, (one, other) in enumerate(zip(logs, found, strict=True), 1):
        result.logs.append(tmp_path / f"train-{number}.json")
        result.records.append(tmp_path / f"ruler-{number}.json")
        result.logs[-1].write_text(json.dumps(one))
        result.records[-1].write_text(json.dumps(other))
    return result
