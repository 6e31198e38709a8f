"""Times of MagicPIG's attention step on a CPU: by our kernels, by those for AVX2, and of dense attention by torch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np
import torch

from longreach.bench.check import WrongResult, bound
from longreach.bench.cpu.conditions import cold, flush_bytes
from longreach.bench.cpu.dense import COPY, MATMUL, OURS, SDPA, baselines, largest_logit
from longreach.bench.cpu.inputs import Preset, Problem, Shape
from longreach.bench.cpu.other import other_cpu
from longreach.bench.cpu.step import PARTS, Step, distance, exact

PRESETS = (Preset(10, 150, "own"), Preset(10, 75, "group"))
TARGETS = {"own": 3.0, "group": 9.0}  # over the faster dense form of torch
SDPA_TARGET, AVX2_TARGET = 30.0, 0.85
SEED = 0
SLOW_ROUNDS = 3  # of SDPA, which takes a hundred times as long
Say = Callable[[str], None]


def measure(
    contexts: Sequence[int], threads: Sequence[int], rounds: int, say: Say, *, shape: Shape | None = None
) -> list[dict[str, Any]]:
    """A case for each context, number of threads and preset. shape: other sizes than the default's."""
    cases = list[dict[str, Any]]()
    for context in contexts:
        sizes = Shape(context) if shape is None else Shape(**{**asdict(shape), "context": context})
        say(f"{context} keys: drawing them, hashing them, here and in a process for AVX2")
        with other_cpu(sizes, SEED, PRESETS, flush_bytes()) as other:
            problem = Problem(sizes, SEED)
            steps = list[Step]()
            built = dict[str, float]()
            for preset in PRESETS:
                started = perf_counter()
                steps.append(Step(problem, preset, problem.tables(preset.bits, preset.tables, "numba")))
                built[preset.name] = perf_counter() - started
            checks = [_check(step) for step in steps]
            dense = baselines(problem)
            flush = np.empty(flush_bytes(), np.uint8)
            for count in threads:
                with using(count):
                    times = _rounds(steps, dense, other, count, rounds, flush)
                    for number, (step, check) in enumerate(zip(steps, checks, strict=True)):
                        case = _case(step, number, count, times, check)
                        case["table_bytes"], case["build_seconds"] = step.tables.nbytes, built[step.preset.name]
                        cases.append(case)
                        say(line(case))
    return cases


def _rounds(
    steps: Sequence[Step], dense: dict[str, Callable[[], Any]], other: Any, threads: int, rounds: int, flush: np.ndarray
) -> dict[str, list[Any]]:
    """Seconds of each call, in turns; of our steps as a whole, and by part. Each call starts `cold`."""
    times = defaultdict[str, list[Any]](list)
    outputs = [step.run().whole.out[0] for step in steps]
    for number in range(len(steps)):
        other.run(number, threads)
    for call in dense.values():
        call()
    for turn in range(rounds):
        for number, step in enumerate(steps):
            with cold(flush):
                times[f"ours {number}"].append(step.run().seconds)
            with cold(flush):
                times[f"parts {number}"].append(step.parts())
            seconds, out = other.run(number, threads)  # under the same conditions
            times[f"avx2 {number}"].append(seconds)
            off = float(distance(out, outputs[number].double()).max())
            if not off <= bound(torch.float32):
                raise WrongResult(f"{step.preset.name}: kernels for AVX2 differ by {off:.1e} from those for this CPU")
        for name, call in dense.items():
            if name == SDPA and turn >= SLOW_ROUNDS:
                continue
            with cold(flush):
                started = perf_counter()
                call()
                times[name].append(perf_counter() - started)
    return times


def _check(step: Step) -> dict[str, Any]:
    """Errors of the step and of the dense forms, and what it reads. Raises WrongResult beyond rounding."""
    result, stop = step.run(), int(step.tables.stop[0])
    same = float(distance(result.whole.out[0], exact(step.problem, result.lists, stop)).max())
    if not same <= bound(torch.float32):
        raise WrongResult(
            f"{step.preset.name}: relative error {same:.1e} over its own lists and weights exceeds "
            f"{bound(torch.float32):.0e}; its time does not count"
        )
    whole = exact(step.problem, None, stop)
    errors = dict[str, float]()
    for name, call in baselines(step.problem).items():
        if name == COPY:
            continue
        errors[name] = float(distance(call(), whole).max())
        # weights and results are rounded to bf16; the products of torch's matmul too, where logits are large
        most = 2 * bound(torch.bfloat16) + (largest_logit(step.problem) * 2**-8 if name == MATMUL else 0.0)
        if not errors[name] <= most:
            raise WrongResult(f"{name}: relative error {errors[name]:.1e} exceeds {most:.1e}; its time does not count")
    from_dense = distance(result.whole.out[0], whole)
    return {**step.reads(result.lists), "errors_of_dense": errors, "error": same, "error_bound": bound(torch.float32),
            "from_dense": {"mean": float(from_dense.mean()), "largest": float(from_dense.max())}}  # fmt: skip


def _case(step: Step, number: int, threads: int, times: dict[str, list[Any]], check: dict[str, Any]) -> dict[str, Any]:
    shape, preset = step.problem.shape, step.preset
    ours, avx2 = (np.array(times[f"{who} {number}"]) for who in ("ours", "avx2"))
    medians = {name: statistics.median(times[name]) for name in (MATMUL, SDPA, COPY, OURS)}
    whole, theirs = float(np.median(ours)), float(np.median(avx2))
    parts = dict(zip(PARTS, np.median(np.array(times[f"parts {number}"]), 0).tolist(), strict=True))
    row = 2 * shape.dim * getattr(torch, shape.dtype).itemsize
    ratios = {
        "dense": min(medians[MATMUL], medians[SDPA]) / whole,
        "sdpa": medians[SDPA] / whole,
        "avx2": whole / theirs,
    }
    wanted = {"dense": TARGETS[preset.share], "sdpa": SDPA_TARGET, "avx2": AVX2_TARGET}
    return {
        "shape": asdict(shape), "preset": asdict(preset), "threads": threads, "rounds": len(ours),
        "seconds": {"ours": _quartiles(ours), "ours for AVX2": _quartiles(avx2),
                    **{name: _quartiles(times[name]) for name in medians}},
        "parts": parts,  # by an op each: together they take longer than the step, which is one call
        **check,
        "rows_bytes_per_second": check["rows"] * row / parts["attend"],
        "dense_bytes_per_second": shape.dense_bytes / medians[MATMUL],
        "copied_bytes_per_second": shape.dense_bytes / medians[COPY],  # of the keys, each byte read and written
        "ratios": ratios,
        "targets": {name: {"wanted": least, "met": ratios[name] >= least} for name, least in wanted.items()},
    }  # fmt: skip


def _quartiles(seconds: Any) -> dict[str, float]:
    if len(seconds) < 2:
        return dict.fromkeys(("median", "first_quartile", "third_quartile"), float(seconds[0]))
    low, middle, high = statistics.quantiles([float(s) for s in seconds], n=4, method="inclusive")
    return {"median": middle, "first_quartile": low, "third_quartile": high}


def line(case: dict[str, Any]) -> str:
    """A case in a line."""
    seconds, ratios, parts = case["seconds"], case["ratios"], case["parts"]
    preset = Preset(**case["preset"])
    return (
        f"{case['shape']['context']:>7} {case['threads']:>2} thr. {preset.name:15} "
        f"{1e3 * seconds['ours']['median']:7.2f} ms ({', '.join(f'{k} {1e3 * v:.2f}' for k, v in parts.items())}); "
        f"matmul {1e3 * seconds[MATMUL]['median']:.1f}, {ratios['dense']:.1f}x; SDPA {ratios['sdpa']:.0f}x; "
        f"AVX2 {ratios['avx2']:.2f}; keys {case['keys_read']:.2%}, "
        f"rows {case['rows_bytes_per_second'] / 1e9:.2f} GB/s, "
        f"copy {case['copied_bytes_per_second'] / 1e9:.1f}; off {case['from_dense']['mean']:.3f}"
    )


@contextmanager
def using(threads: int) -> Iterator[None]:
    """torch's threads, and with them ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
