"""Run a case of MKA: training of attention, of a decoder layer or of scan; decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from longreach.bench.case import Case
from longreach.bench.mka.attention import run_attention
from longreach.bench.mka.decode import run_decode
from longreach.bench.mka.layer import run_layer
from longreach.bench.mka.scan import run_scan
from longreach.bench.sweep import Sweeps

TRAINING = {"attention": run_attention, "layer": run_layer, "scan": run_scan}


def run_mka(
    case: Case, device: torch.device, *, without: Iterable[str] = (), replays: int = 21, seed: int = 0,
    say: Callable[[str], None] = lambda line: None, sweeps: Sweeps | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case; the result as a record's part. Raises WrongResult, and for decoding what `run_case` raises."""
    assert case.trained is not None
    say(f"{case.name}: {case.shape.batch} x {case.shape.context} tokens")
    if case.trained.what == "decode":
        result = run_decode(case, device, without=without, replays=replays, seed=seed, say=say, sweeps=sweeps)
    else:
        with torch.enable_grad():
            result = TRAINING[case.trained.what](case, device, replays=replays, seed=seed)
        result["baselines"] = {"versions": {}, "left_out": [], "tried": {}}
    return {"shape": asdict(case.shape), "reads": asdict(case.reads), "trained": asdict(case.trained), "seed": seed,
            **result}  # fmt: skip
