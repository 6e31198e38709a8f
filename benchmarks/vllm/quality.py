"""Scores of RULER through vLLM and those of longreach's own loop, on longreach-mini in bf16.

python3 benchmarks/vllm/quality.py --lengths 4096 16384 --samples 20 --out FILE [--methods "quest dense_layers=[0]" ...]

Both answer the same prompts greedily. The loop runs first (`longreach.evaluate`), then an engine for each method, each
in a process of its own. A method agrees if its score through vLLM lies within the 95% interval of its score through the
loop, over prompts of all tasks. Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import cuda

from longreach.records import wilson

METHODS = ("dense", "streaming_llm", "quest", "omnikv", "less_is_more", "loki", "kascade", "kascade scoring=int8")
ON_GPUS = ("mac",)  # needs model runner V2


def own(methods: list[str], lengths: list[int], samples: int, tasks: str) -> dict[str, Any]:
    """method -> length -> task -> scores of prompts, through longreach's loop."""
    import torch

    import longreach

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = longreach.load("mini", dtype=torch.bfloat16, device=device)
    others = [method for method in methods if method != "dense"]
    record = longreach.evaluate(model, tokenizer, tasks=tasks, methods=others, length=lengths, samples=samples)
    found: dict[str, Any] = {method: {str(n): {} for n in lengths} for method in methods}
    for entry in record["tasks"].values():
        for label, result in entry["results"].items():
            scores = [answer["score"] for answer in result["answers"]]
            if label in found:  # dense attention is always measured
                found[label][str(entry["length"])][entry["task"]] = scores
    return found


def engine(method: str, lengths: list[int], samples: int, tasks: str) -> dict[str, Any]:
    """length -> task -> scores of prompts, through vLLM."""
    import torch
    from vllm import LLM, SamplingParams

    import longreach
    from longreach.evals.prompting import fitted
    from longreach.tasks import registry

    mini = Path(longreach.__file__).parent / "models" / "longreach-mini"
    options: dict[str, Any] = {"attention_backend": "CUSTOM"} if torch.cuda.is_available() else {}
    llm = LLM(
        str(mini), dtype="bfloat16", max_model_len=max(lengths), max_num_seqs=16, enable_prefix_caching=False,
        additional_config={"longreach": {"decode": method}}, **options,
    )  # fmt: skip
    tokenizer, found = llm.get_tokenizer(), dict[str, Any]()
    for length in lengths:
        scores = found.setdefault(str(length), {})
        for task in registry.choose(tasks):
            asked = [fitted(task, tokenizer, length, 0, number, samples) for number in range(samples)]
            greedy = SamplingParams(temperature=0.0, max_tokens=task.max_new_tokens)
            given = llm.generate([{"prompt_token_ids": ids} for _, ids in asked], greedy, use_tqdm=False)
            texts = (one.outputs[0].text for one in given)
            scores[task.name] = [task.score(text, sample) for text, (sample, _) in zip(texts, asked, strict=True)]
    return found


def compare(loop: dict[str, list[float]], vllm: dict[str, list[float]]) -> tuple[float, float, float]:
    """(score of the loop, half its 95% interval, score of vLLM), over prompts of all tasks."""
    ours = [score for scores in loop.values() for score in scores]
    theirs = [score for task in loop for score in vllm[task]]
    mean, n = statistics.mean(ours), len(ours)
    half = 1.96 * statistics.stdev(ours) / math.sqrt(n)
    if not half:  # all scores are equal: the interval of a share
        low, high = wilson(mean * n, n)
        half = max(mean - low, high - mean)
    return mean, half, statistics.mean(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--samples", type=int, default=20, help="prompts of a task")
    parser.add_argument("--tasks", default="ruler")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *(ON_GPUS if cuda.is_available() else ())])
    parser.add_argument("--out", type=Path, required=True, help="JSON of all scores")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        part = json.loads(given.part)
        run = own(given.methods, given.lengths, given.samples, given.tasks) if part == "own" else engine(
            part, given.lengths, given.samples, given.tasks
        )  # fmt: skip
        given.out.write_text(json.dumps(run))
        return
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parts, differing = dict[str, Any](), 0
    for part in ("own", *given.methods):
        place = given.out.with_suffix(".part")
        command = [
            sys.executable, __file__, "--lengths", *map(str, given.lengths), "--samples", str(given.samples),
            "--tasks", given.tasks, "--methods", *given.methods, "--out", str(place), "--part", json.dumps(part),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{part}: failed\n{(done.stdout + done.stderr)[-4000:]}")
        parts[part] = json.loads(place.read_text())
        place.unlink()
        given.out.write_text(json.dumps(parts))
        if part == "own":
            continue
        for length in map(str, given.lengths):
            loop, half, vllm = compare(parts["own"][part][length], parts[part][length])
            within = abs(vllm - loop) <= half
            differing += not within
            print(
                f"{length} {part}: loop {loop:.3f} +- {half:.3f}, vLLM {vllm:.3f}{'' if within else '  DIFFERENT'}",
                flush=True,
            )
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
