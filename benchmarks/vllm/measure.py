"""Times of vLLM with longreach beside vLLM's own FlashAttention, on GPUs.

python3 benchmarks/vllm/measure.py CASE ... --out FILE

The model has Llama-3.1-8B's shape and random weights in bf16. Each engine is a process of its own, one after the other,
with the same options but for the attention backend; a case runs FLASH_ATTN first, then the methods. TPOT is the median
time of a step in which all requests decode, after 32 such steps. TTFT is the time of one prompt until its first token.
Batches of one engine share the prompts of smaller ones, whose pages are cached; requests of a batch share no page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 524288, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 500000.0,
}  # fmt: skip
ANCHORS = (0, 2, 8, 13, 14)  # Kascade's for Llama-3.1-8B
K = 1024
MOST = 32  # requests, where as many run as fit
NEW = 96  # tokens of an answer: the first 32 are not timed
# case -> (tokens of a prompt, batches; 0: as many as fit, methods, ranks, least speed over FLASH_ATTN by batch)
DECODE: dict[str, tuple[int, tuple[int, ...], tuple[str, ...], int, dict[int, float]]] = {
    "tpot-8k": (8 * K, (1, 4, 0), ("dense", "kascade"), 1, {}),
    "tpot-128k": (128 * K, (1, 4, 0), ("dense", "kascade", "quest", "streaming_llm"), 1, {1: 1.25, 4: 2.0, 0: 2.5}),
    "tpot-256k": (256 * K, (1, 4), ("dense", "kascade"), 1, {1: 1.45, 4: 2.2}),
    "tpot-2gpu": (128 * K, (8,), ("kascade heads=all",), 2, {8: 2.0}),
}
PLAIN = "FLASH_ATTN"


def model_folder(folder: Path) -> Path:
    """The model's configuration, and a plan of Kascade for it with a random head map, on which no cost depends."""
    import torch
    from transformers import AutoConfig

    from longreach.methods.kascade.plan import KascadePlan
    from longreach.methods.model_config import shape_of_config
    from longreach.plans import Made, Plan, PlannedModel

    (folder / "config.json").write_text(json.dumps(CONFIG))
    shape = shape_of_config(AutoConfig.from_pretrained(folder))
    draw, own = torch.Generator().manual_seed(0), tuple(range(8))
    drawn = [tuple(torch.randint(8, (8,), generator=draw).tolist()) for _ in range(32)]
    maps = tuple(own if n in ANCHORS else drawn[n] for n in range(32))
    plan = KascadePlan(ANCHORS, maps, tuple(range(32)), k=64, tile=128)
    made = Made("none", "", 0, {}, 0, "", None, "", "", "")
    Plan("kascade", PlannedModel.of("random", shape), plan.values(), made, {}).save(folder / "plan.json")
    return folder


def engine(folder: Path, method: str, *, context: int, batch: int, ranks: int = 1, **options: Any) -> Any:
    """A vllm.LLM that decodes by FLASH_ATTN or a longreach method."""
    from vllm import LLM

    given: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": context + 2 * K, "max_num_seqs": batch, "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True, "max_num_batched_tokens": 8 * K, "tensor_parallel_size": ranks,
        "attention_backend": PLAIN, "disable_log_stats": False,
    }  # fmt: skip
    if method != PLAIN:
        name, _, rest = method.partition(" ")
        text = f"{name} plan={folder / 'plan.json'} {rest}".strip() if name == "kascade" else method
        given |= {"attention_backend": "CUSTOM", "additional_config": {"longreach": {"decode": text}}}
    return LLM(**{**given, **options})


def prompts(batch: int, tokens: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Random prompts; a larger batch begins with those of a smaller one."""
    import torch

    draws = (torch.Generator().manual_seed(seed + number) for number in range(batch))
    return [{"prompt_token_ids": torch.randint(1000, 100000, (tokens,), generator=draw).tolist()} for draw in draws]


def step_times(llm: Any, ids: list[dict[str, list[int]]], new: int) -> tuple[float, list[float]]:
    """(seconds until all prompts are read, seconds of each step in which all requests decode)."""
    from vllm import SamplingParams

    core, greedy = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    for number, each in enumerate(ids):
        core.add_request(f"{begun}-{number}", each, greedy)
    counts, times, read, last = dict[str, int](), list[float](), 0.0, begun
    while core.has_unfinished_requests():
        found = core.step()
        now = time.perf_counter()
        before = dict(counts)
        counts |= {one.request_id: len(one.outputs[0].token_ids) for one in found}
        if len(before) == len(ids) and all(counts[name] == before[name] + 1 for name in counts):
            times.append(now - last)
        if len(counts) == len(ids) and not read:
            read = now - begun
        last = now
    return read, times


def tpot(folder: Path, case: str, method: str, batches: list[int]) -> list[dict[str, Any]]:
    import torch

    context, _, _, ranks, _ = DECODE[case]
    most = MOST if 0 in batches else max(batches)
    llm = engine(folder, method, context=context, batch=most, ranks=ranks)
    cache = llm.llm_engine.vllm_config.cache_config
    fit = min(most, cache.num_gpu_blocks * cache.block_size // (context + NEW + cache.block_size))
    step_times(llm, prompts(1, K, seed=1000), 16)
    found = list[dict[str, Any]]()
    for label in batches:
        batch = label or fit
        before = torch.cuda.memory_stats().get("num_device_alloc") if ranks == 1 else None
        read, times = step_times(llm, prompts(batch, context), NEW)
        after, timed = torch.cuda.memory_stats().get("num_device_alloc") if ranks == 1 else None, times[32:]
        one: dict[str, Any] = {
            "case": case, "method": method, "batch": batch, "fits": label == 0, "context": context, "ranks": ranks,
            "prompts_seconds": read, "tpot_ms": 1e3 * statistics.median(timed), "steps": len(timed),
            "quartiles_ms": [1e3 * each for each in statistics.quantiles(timed, n=4)],
            "cache_tokens": cache.num_gpu_blocks * cache.block_size, "page": cache.block_size,
            "device_allocations": [before, after],
        }  # fmt: skip
        if method != PLAIN:
            import longreach

            one["read_of_dense"] = longreach.vllm.report(llm).fraction("decode")
        found.append(one)
    return found


def ttft(folder: Path, method: str) -> list[dict[str, Any]]:
    """One prompt of 32K tokens in chunks of 2048."""
    llm = engine(folder, method, context=32 * K, batch=4, max_num_batched_tokens=2 * K)
    times = [1e3 * step_times(llm, prompts(1, 32 * K, seed=n), 2)[0] for n in range(6)]
    return [{"case": "ttft", "method": method, "ttft_ms": statistics.median(times[1:]), "all_ms": times}]


def load(folder: Path, method: str) -> list[dict[str, Any]]:
    """32 requests of 16K tokens that arrive over a minute, answers of 256 tokens."""
    from vllm import SamplingParams

    llm = engine(folder, method, context=16 * K, batch=32, max_num_batched_tokens=2 * K)
    step_times(llm, prompts(2, 2 * K), 16)
    core, ids = llm.llm_engine, prompts(32, 16 * K)
    greedy = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True, detokenize=False)
    begun, sent, counts, stamps = time.perf_counter(), 0, dict[str, int](), dict[str, list[float]]()
    while sent < 32 or core.has_unfinished_requests():
        while sent < 32 and time.perf_counter() - begun >= sent * 60 / 32:
            core.add_request(str(sent), ids[sent], greedy)
            sent += 1
        if not core.has_unfinished_requests():
            time.sleep(0.001)
            continue
        for one in core.step():
            n = len(one.outputs[0].token_ids)
            if n > counts.get(one.request_id, 0):
                counts[one.request_id] = n
                stamps.setdefault(one.request_id, []).append(time.perf_counter())
    total = time.perf_counter() - begun
    gaps = sorted(b - a for each in stamps.values() for a, b in pairwise(each))
    means = [1e3 * (each[-1] - each[0]) / 255 for each in stamps.values()]
    one = {
        "case": "load", "method": method, "seconds": total, "tokens_per_second": 32 * 256 / total,
        "tpot_p50_ms": statistics.median(means), "gap_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
    }  # fmt: skip
    return [one]


def run(case: str, method: str, batches: list[int]) -> list[dict[str, Any]]:
    import torch
    import vllm

    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name))
        if case in DECODE:
            found = tpot(folder, case, method, batches)
        else:
            found = {"ttft": ttft, "load": load}[case](folder, method)
    versions = {"gpu": torch.cuda.get_device_name(0), "vllm": vllm.__version__, "torch": torch.__version__}
    return [{**one, **versions} for one in found]


def show(case: str, found: list[dict[str, Any]], method: str) -> None:
    """Print the times of a method, and their ratio to FLASH_ATTN's."""
    plain = {one.get("batch"): one for one in found if one["method"] == PLAIN}
    fits = next((one for one in plain.values() if one.get("fits")), None)
    for one in (each for each in found if each["method"] == method):
        key = next(name for name in ("tpot_ms", "ttft_ms", "tpot_p50_ms") if name in one)
        base = fits if one.get("fits") else plain.get(one.get("batch"))
        # batches that fit may differ: then times of a token are compared, over all requests
        per = one[key] / (one["batch"] if one.get("fits") else 1)
        least = DECODE[case][4].get(0 if one.get("fits") else one["batch"]) if case in DECODE else None
        target = "" if least is None or one["method"].split()[0] != "kascade" else f" (to reach: {least}x)"
        ratio = ""
        if base is not None and one["method"] != PLAIN:
            ratio = f"{base[key] / (base['batch'] if one.get('fits') else 1) / per:.2f}x of {PLAIN}{target}"
        print(f"{case} {one['method']} batch {one.get('batch', 1)}: {one[key]:.3f} ms  {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[*DECODE, "ttft", "load"])
    parser.add_argument("--methods", nargs="*", help="instead of the case's own; FLASH_ATTN always comes first")
    parser.add_argument("--batches", nargs="*", type=int, help="instead of the case's own; 0: as many as fit")
    parser.add_argument("--out", type=Path, required=True, help="a file that gets one JSON line a measurement")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        method, batches = json.loads(given.one)
        with given.out.open("a") as stream:
            stream.writelines(json.dumps(one) + "\n" for one in run(given.cases[0], method, batches))
        return
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for case in given.cases:
        batches = given.batches or (DECODE[case][1] if case in DECODE else (1,))
        methods = given.methods or (DECODE[case][2] if case in DECODE else ("dense", "kascade"))
        found = list[dict[str, Any]]()
        for method in (PLAIN, *methods):
            lines = len(given.out.read_text().splitlines()) if given.out.exists() else 0
            command = [sys.executable, __file__, case, "--out", str(given.out), "--one", json.dumps([method, batches])]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{case} {method}: failed\n{(done.stdout + done.stderr)[-4000:]}", flush=True)
                continue
            new = [json.loads(line) for line in given.out.read_text().splitlines()[lines:]]
            found += new
            show(case, found, method)


if __name__ == "__main__":
    main()
