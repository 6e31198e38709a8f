"""A prompt and tokens of the shipped model on a CPU: plain transformers, and the same calls with longreach attached.

`python -m longreach.bench.cpu_attached --output FILE`, on a machine that does nothing else. Attention is dense on both
sides, so the ratio is what longreach itself costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longreach.bench.clock import Clock
from longreach.records import check_writable, environment, write

FORMAT = 1
LENGTHS = (2048, 4096)
TOKENS, WARM = 33, 2  # of an answer; rounds that do not count
MOST = {"prefill": 1.1, "step": 1.15}  # of attached over plain
WAYS = "plain", "attached"


def measure(lengths: list[int], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The record but for where it was measured: seconds to the first token, and of a token after it, in turns."""
    from longreach.adapters.transformers import attach, load

    busy = os.getloadavg()[0]
    model, _ = load("mini")
    cases = []
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for number in range(WARM + rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                with attach(model) if way == "attached" else nullcontext():
                    took = _timed(model, ids)
                if number >= WARM:
                    times[way].append(took)
        cases.append(_case(length, times))
        say(line(cases[-1]))
    return {
        "kind": "cpu attached", "format": FORMAT, "model": "longreach-mini",
        "config": {"lengths": lengths, "tokens": TOKENS, "rounds": rounds, "warm_up": WARM},
        "load_average_before": busy, "cases": cases,
    }  # fmt: skip


def _timed(model: Any, ids: Tensor) -> tuple[float, float]:
    clock, started = Clock(), time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
                   do_sample=False, streamer=clock)  # fmt: skip
    return clock.times[1] - started, statistics.median(b - a for a, b in zip(clock.times[1:], clock.times[2:]))


def _case(length: int, times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    parts = {
        part: {way: [round(took[place], 6) for took in each] for way, each in times.items()}
        for place, part in enumerate(MOST)
    }
    ratios = {part: statistics.median(x["attached"]) / statistics.median(x["plain"]) for part, x in parts.items()}
    targets = {part: {"most": most, "met": ratios[part] <= most} for part, most in MOST.items()}
    return {"length": length, "seconds": parts, "ratios": ratios, "targets": targets}


def line(case: dict[str, Any]) -> str:
    """One line of a case."""
    told = [f"{case['length']:6} tokens"]
    for part, each in case["seconds"].items():
        plain, mine = (1e3 * statistics.median(each[way]) for way in WAYS)
        verdict = "reached" if case["targets"][part]["met"] else "missed"
        told.append(f"{part}: plain {plain:.1f} ms, attached {mine:.1f} ms, {case['ratios'][part]:.2f}x ({verdict})")
    return "  ".join(told)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longreach.bench.cpu_attached", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each way that are timed")
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_writable(args.output)
    record = {**measure(args.lengths, args.rounds, print), **environment(torch.device("cpu"))}
    if args.output is not None:
        write(args.output, record)


if __name__ == "__main__":
    main()
