"""Times of vLLM with longreach and with vLLM's own FlashAttention, on GPUs.

python3 benchmarks/vllm/measure.py CASE ... --out FILE

The model has Llama-3.1-8B's shape and random weights in bf16. Each method has an engine of its own, in a process of its
own, one after the other, with the same options but for the attention backend; FLASH_ATTN is first. An engine has room
for the longest of the named cases and runs those of its method. TPOT is the median time of a step in which all requests
decode, after 16 such steps; their prompts are read before, and found in vLLM's cache. TTFT is the time of one prompt
until its first token. Longer prompts and larger batches begin with the shorter and smaller ones, whose pages are
cached; requests of a batch share no page.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
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
CAPTURED = (1, 3, 4, 6, 8, 16, 32, 112)  # requests of captured steps, those of the batches below among them
SHOWN = {"tpot": ("tpot_ms",), "ttft": ("ttft_ms",), "load": ("tokens_per_second", "tpot_p50_ms", "gap_p99_ms")}
FITS = "as many as fit"
FIT = 0  # a batch of as many requests as fit
NEW, WARM = 80, 16  # tokens of an answer in a step's time, and those of them that are not timed
PLAIN = "FLASH_ATTN"
DENSE_TARGET = 0.97  # speed over FLASH_ATTN that dense is to reach


@dataclass(frozen=True)
class Case:
    """kind: tpot, ttft or load. context: tokens of a prompt. least: speed over FLASH_ATTN that kascade is to reach.

    max_requests: of an engine. arrival_seconds: time in which the requests of a load arrive; 0: all at once.
    """

    kind: str
    context: int
    batches: tuple[int, ...] = (1,)
    methods: tuple[str, ...] = ("dense", "kascade")
    ranks: int = 1
    least: dict[int, float] = field(default_factory=dict)
    max_requests: int = 32
    arrival_seconds: int = 60


CASES = {
    "ttft": Case("ttft", 32 * K, least={1: 0.98}),
    "tpot-8k": Case("tpot", 8 * K, (1, 4, 32)),
    "tpot-8k-fit": Case("tpot", 8 * K, (FIT,), max_requests=112),
    "tpot-128k": Case("tpot", 128 * K, (1, 4, FIT), ("dense", "kascade", "quest", "streaming_llm"), 1,
                      {1: 1.25, 4: 2.0, FIT: 2.5}),
    "tpot-256k": Case("tpot", 256 * K, (1, FIT), ("kascade",), least={1: 1.45, FIT: 2.2}),
    "load": Case("load", 16 * K, (32,), ("kascade",), least={32: 1.0}),
    "load-at-once": Case("load", 16 * K, (32,), least={32: 1.0}, arrival_seconds=0),
    "tpot-2gpu": Case("tpot", 128 * K, (8,), ("kascade heads=all",), 2, {8: 2.0}, max_requests=8),
}  # fmt: skip


def make_model(folder: Path, layers: int) -> None:
    """The model's configuration, and a plan of Kascade for it with a random head map, on which no cost depends."""
    import torch
    from transformers import AutoConfig

    from longreach.methods.kascade.plan import KascadePlan
    from longreach.methods.model_config import shape_of_config
    from longreach.plans import Made, Plan, PlannedModel

    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    shape = shape_of_config(AutoConfig.from_pretrained(folder))
    draw, heads = torch.Generator().manual_seed(0), shape.kv_heads
    drawn = [tuple(torch.randint(heads, (heads,), generator=draw).tolist()) for _ in range(layers)]
    anchors = tuple(n for n in ANCHORS if n < layers)
    maps = tuple(tuple(range(heads)) if n in anchors else drawn[n] for n in range(layers))
    plan = KascadePlan(anchors, maps, tuple(range(layers)), k=64, tile=128)
    made = Made("none", "", 0, {}, 0, "", None, "", "", "")
    Plan("kascade", PlannedModel.of("random", shape), plan.values(), made, {}).save(folder / "plan.json")


def engine(folder: Path, method: str, cases: list[Case]) -> Any:
    """A vllm.LLM with room for all of these cases that decodes by FLASH_ATTN or a longreach method."""
    from vllm import LLM

    requests = max(case.max_requests for case in cases)
    given: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": max(case.context for case in cases) + 2 * K, "max_num_seqs": requests,
        "gpu_memory_utilization": 0.9, "enable_prefix_caching": True, "max_num_batched_tokens": 2 * K,
        "tensor_parallel_size": cases[0].ranks, "attention_backend": PLAIN, "disable_log_stats": False,
        "compilation_config": {"cudagraph_capture_sizes": [size for size in CAPTURED if size <= requests]},
    }  # fmt: skip
    if method != PLAIN:
        name, _, rest = method.partition(" ")
        text = f"{name} plan={folder / 'plan.json'} {rest}".strip() if name == "kascade" else method
        given |= {"attention_backend": "CUSTOM", "additional_config": {"longreach": {"decode": text}}}
    return LLM(**given)


def prompts(batch: int, tokens: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Random prompts; a larger batch begins with those of a smaller one, a longer prompt with a shorter one."""
    import torch

    draws = (torch.Generator().manual_seed(seed + number) for number in range(batch))
    drawn = (torch.randint(1000, 100000, (512 * K,), generator=draw)[:tokens] for draw in draws)
    return [{"prompt_token_ids": ids.tolist()} for ids in drawn]


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
        if found:  # an engine that schedules ahead returns nothing while its queue is not full
            last = now
    return read, times


def allocations(worker: Any) -> int:
    """How often a worker's process has taken memory from its GPU. vLLM calls it in each worker."""
    import torch

    return torch.cuda.memory_stats().get("num_device_alloc", 0)


def compilations(worker: Any) -> list[str]:
    """longreach's Triton kernels that a worker's process has compiled since the last call; none at the first call.

    Kernels from Triton's cache are among them. vLLM calls it in each worker.
    """
    from triton import knobs

    if not hasattr(worker, "compiled_kernels"):
        worker.compiled_kernels, before = [], knobs.runtime.jit_post_compile_hook

        def note(*, fn: Any, **facts: Any) -> Any:
            if fn.module.startswith("longreach."):
                worker.compiled_kernels.append(fn.name)
            return before(fn=fn, **facts) if before else None

        knobs.runtime.jit_post_compile_hook = note
    found, worker.compiled_kernels = worker.compiled_kernels, []
    return found


def tpot(llm: Any, case: Case, batch: int) -> dict[str, Any]:
    cache = llm.llm_engine.vllm_config.cache_config
    room = cache.num_gpu_blocks * cache.block_size
    fitting = room // (case.context + NEW + cache.block_size)
    count = batch or min(case.max_requests, fitting)
    ids = prompts(count, case.context)
    first, _ = step_times(llm, ids, 1)  # fills the cache, so that all requests decode at once below
    _, times = step_times(llm, ids, NEW)
    timed = times[WARM:]
    return {
        "batch": count, "fits": count == fitting, "prompts_seconds": first, "steps": len(timed),
        "tpot_ms": 1e3 * statistics.median(timed) if timed else None,
        "quartiles_ms": [1e3 * each for each in statistics.quantiles(timed, n=4)] if len(timed) > 1 else None,
        "cache_tokens": room, "page": cache.block_size,
    }  # fmt: skip


def ttft(llm: Any, case: Case, batch: int) -> dict[str, Any]:
    """One prompt after another, none of which is cached. The first one is not counted."""
    times = [1e3 * step_times(llm, prompts(batch, case.context, seed=1000 + n), 2)[0] for n in range(6)]
    return {"batch": batch, "ttft_ms": statistics.median(times[1:]), "all_ms": times}


def load(llm: Any, case: Case, batch: int) -> dict[str, Any]:
    """Throughput and latencies of requests that arrive evenly, with answers of 256 tokens. No prompt is cached.

    tpot_p50_ms: median over requests of their mean inter-token latency. gap_p50_ms, gap_p99_ms: percentiles of single
    inter-token latencies. Both include steps that prefill other requests.
    """
    from vllm import SamplingParams

    core, ids, new = llm.llm_engine, prompts(batch, case.context, seed=2000 + 100 * case.arrival_seconds), 256
    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    begun, sent, counts, stamps = time.perf_counter(), 0, dict[str, int](), dict[str, list[float]]()
    while sent < batch or core.has_unfinished_requests():
        while sent < batch and time.perf_counter() - begun >= sent * case.arrival_seconds / batch:
            core.add_request(f"{begun}-{sent}", ids[sent], greedy)
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
    means = [1e3 * (each[-1] - each[0]) / (new - 1) for each in stamps.values()]
    return {
        "batch": batch, "seconds": total, "tokens_per_second": batch * new / total,
        "tpot_p50_ms": statistics.median(means), "gap_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
    }  # fmt: skip


def options(llm: Any) -> dict[str, Any]:
    """The engine's set-up. record.py compares two engines only if it is the same."""
    config = llm.llm_engine.vllm_config
    scheduler, graphs = config.scheduler_config, config.compilation_config
    return {
        "max_model_len": config.model_config.max_model_len, "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens, "async_scheduling": scheduler.async_scheduling,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "cudagraph_mode": graphs.cudagraph_mode.name, "captured": list(graphs.cudagraph_capture_sizes),
        "model_runner": "V2" if config.use_v2_model_runner else "V1",
        "multiprocessing": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1",
    }  # fmt: skip


def run(folder: Path, method: str, names: list[str], out: Path) -> None:
    """Measure the method in each named case that lists it. Each result is written to `out` at once, as a line."""
    import torch
    import vllm

    from longreach.bench.record import conditions

    begun = time.perf_counter()
    llm = engine(folder, method, [CASES[name] for name in names])
    started, at_start = time.perf_counter() - begun, llm.collective_rpc(allocations)
    llm.collective_rpc(compilations)
    facts = conditions(torch.device("cuda"))
    facts["versions"]["vllm"] = vllm.__version__
    facts |= {
        "method": method, "layers": llm.llm_engine.vllm_config.model_config.hf_config.num_hidden_layers,
        "options": options(llm), "start_seconds": started, "started_at": time.time(),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }  # fmt: skip

    def keep(found: dict[str, Any]) -> None:
        now = llm.collective_rpc(allocations)
        since = [after - before for before, after in zip(at_start, now, strict=True)]
        with out.open("a") as stream:
            compiled = Counter(name for names in llm.collective_rpc(compilations) for name in names)
            line = found | facts | {"allocations_since_start": since, "kernels_compiled": compiled}
            stream.write(json.dumps(line) + "\n")

    step_times(llm, prompts(1, K, seed=3000), 16)
    for name in (name for name in names if method in (PLAIN, *CASES[name].methods)):
        case = CASES[name]
        for batch in case.batches:
            measured = {"tpot": tpot, "ttft": ttft, "load": load}[case.kind](llm, case, batch)
            keep({"case": name, "context": case.context, "ranks": case.ranks, **measured})
    if method != PLAIN:
        import longreach

        reads = longreach.vllm.report(llm).fraction("decode")
        keep({"case": "reads", "ranks": CASES[names[0]].ranks, "read_of_dense": reads})


def case_and_batch(one: dict[str, Any]) -> tuple[str, str]:
    """(case, batch): the key that matches a measurement with its baseline."""
    return one["case"], FITS if one.get("fits") else str(one["batch"])


def baseline_of(one: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """FLASH_ATTN's measurement of the same case and batch, if there is one."""
    return next(
        (each for each in found if each["method"] == PLAIN and case_and_batch(each) == case_and_batch(one)), None
    )


def speedups(one: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, float]:
    """Speed-up over FLASH_ATTN for each shown value; empty for FLASH_ATTN itself and without a baseline.

    With as many requests as fit the two batches may differ, so tokens of all requests per time are compared.
    """
    base = baseline_of(one, found)
    if one["method"] == PLAIN or not base:
        return {}
    ratios = dict[str, float]()
    for key in SHOWN[CASES[one["case"]].kind]:
        if not base[key] or not one[key]:
            continue
        ratios[key] = base[key] / one[key]
        if key == "tokens_per_second":
            ratios[key] = one[key] / base[key]
        elif one.get("fits"):
            ratios[key] *= one["batch"] / base["batch"]
    return ratios


def target_of(one: dict[str, Any]) -> float | None:
    """The smallest speed-up that meets the target; None without a target."""
    method, case = one["method"].split()[0], CASES[one["case"]]
    if method == "dense" and case.kind == "tpot":
        return DENSE_TARGET
    return case.least.get(FIT if one.get("fits") else one["batch"]) if method == "kascade" else None


def show(found: list[dict[str, Any]], method: str) -> None:
    """Print the times of a method, and their ratio to FLASH_ATTN's."""
    timed = [one for one in found if one["case"] in CASES]
    for one in (each for each in timed if each["method"] == method):
        ratios, base, keys = speedups(one, timed), baseline_of(one, timed), SHOWN[CASES[one["case"]].kind]
        for key in keys:
            value = f"{one[key]:.3f}" if one[key] else "not measured"
            text = f"{one['case']} {method} batch {one['batch']}: {key} {value}"
            if key in ratios:
                text += f"  {ratios[key]:.3f}x of {PLAIN}"
                if base and one.get("fits"):
                    text += f" with batch {base['batch']}"
                if key == keys[0] and target_of(one) is not None:
                    text += f" (to reach: {target_of(one)}x)"
            print(text, flush=True)
        compiled = sum(one.get("kernels_compiled", {}).values())
        if compiled:
            print(
                f"{one['case']} {method} batch {one['batch']}: compiled {compiled} of longreach's kernels", flush=True
            )


def run_command(command: list[str], seconds: int, environ: dict[str, str] | None = None) -> str:
    """Run a command in a process group of its own. Returns the end of its output if it failed, else an empty text."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environ
        )
        late = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"stopped after {seconds} s\n"
            os.killpg(process.pid, signal.SIGKILL)  # the engine's workers too, as they hold GPU memory
            process.wait()
        output.seek(0)
        return late + output.read()[-4000:] if process.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--methods", nargs="*", help=f"of those that the cases name; {PLAIN} is one of each case")
    parser.add_argument("--out", type=Path, required=True, help="a file that gets one JSON line a measurement")
    parser.add_argument("--append", action="store_true", help="to a file of this GPU that has lines already")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="fewer, to try this script")
    parser.add_argument("--seconds", type=int, default=1800, help="for one method's engine, at most")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        folder, method = json.loads(given.one)
        run(Path(folder), method, given.cases, given.out)
        return
    if len({CASES[name].ranks for name in given.cases}) > 1:
        parser.error("cases of one and of two GPUs cannot share an engine: measure tpot-2gpu alone")
    if given.out.exists() and not given.append:
        parser.error(f"{given.out} exists: name another file, or add to it with --append")
    failed = False
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for functions sent to workers
    named = dict.fromkeys((PLAIN, *(method for name in given.cases for method in CASES[name].methods)))
    with tempfile.TemporaryDirectory() as folder:  # one for all: vLLM compiles a model once for each folder
        make_model(Path(folder), given.layers)
        for method in named:
            if given.methods is not None and method not in given.methods:
                continue
            one = json.dumps([folder, method])
            command = [sys.executable, __file__, *given.cases, "--out", str(given.out), "--one", one]
            error = run_command(command, given.seconds)
            if error:
                failed = True
                print(f"{method}: failed\n{error}", flush=True)
            lines = given.out.read_text().splitlines() if given.out.exists() else []
            show([json.loads(line) for line in lines], method)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
