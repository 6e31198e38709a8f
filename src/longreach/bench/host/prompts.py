"""Time to the first token of a long prompt, with its keys and values in host memory and in GPU memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from longreach.bench.case import Case
from longreach.bench.decoding import Decoding
from longreach.bench.host import reads
from longreach.bench.host.cases import MAGICPIG, entry_name
from longreach.bench.memory import peak_bytes, release, reset_peak
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.cache import CacheConfig
from longreach.cache.host_pool import HostPool
from longreach.methods.magicpig import MagicPIG

CHUNK = 4096  # prompt tokens of a pass
TIMES = 2
HOW = "host clock from the call to the first token: dense prefill, and tables built; kernels compiled before"
UNCHECKED = "tests compare answers of prompts that are staged with those of prompts that are not"


@torch.no_grad()
def run_prompts(bench: Decoding, case: Case, limit: int) -> dict[str, Any]:
    """Measure a case; the result as a record's part. limit: GPU memory for keys, values and staging, in bytes."""
    assert case.sampling is not None
    model, seconds = bench.model(case)
    weights, kv = bench.bytes(case, model)
    entries = list[dict[str, Any]]()
    for preset in case.sampling.presets:
        for where in ("host memory", "GPU memory"):
            release(bench.device)
            name = f"{entry_name(MAGICPIG, preset)}, {where}"
            bench.say(f"{case.name}: {name}: a prompt of {case.shape.context} tokens")
            entries.append({"name": name, **_read(bench, case, model, MagicPIG(**asdict(preset)), where, limit)})
            bench.say(f"  {entries[-1]['microseconds']['median'] / 1e6:.2f} s to the first token")
    return {
        "shape": asdict(case.shape),
        "model": asdict(case.model) if case.model else None,
        "host": asdict(case.host) if case.host else None,
        "bytes": {"weights": weights, "kv": kv},
        "seed": bench.seed,
        "setup_seconds": {"model": seconds},
        "timing": {"how": HOW, "replays": TIMES, "warm_up": 1},
        "baselines": {"versions": {}, "left_out": [], "tried": {}},
        "entries": entries,
        "targets": judge(case, entries),
    }


def _read(bench: Decoding, case: Case, model: Any, method: MagicPIG, where: str, limit: int) -> dict[str, Any]:
    """An entry without its name."""
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.loop import generate

    tokens, impl, host = case.shape.context, case.impls[0], where == "host memory"
    ids = bench.tokens(case, model, tokens)
    room = tokens + bench.rows
    config = CacheConfig(capacity=room)
    if host:
        config = CacheConfig(capacity=room, host=True, device_bytes=limit, host_attend="link")
    pool, took, memory = bench.shared.setdefault("host memory", HostPool(bench.device)), list[float](), dict[str, Any]()
    chunk = min(CHUNK, max(1, tokens // 4))
    with attach(model, decode=method, impl=impl) as session:
        for time in range(1 + TIMES):  # first a part, which compiles kernels
            cache = session.new_cache(case.shape.batch, config)
            if host:
                cache.kv.use_pool(pool)
            part = ids if time else ids[:, : 2 * chunk]
            reset_peak(bench.device)
            started = bench.now()
            generate(session, part, max_new_tokens=1, eos_token_id=(), prefill_chunk_size=chunk, past_key_values=cache)
            if time:
                took.append(bench.now() - started)
                memory = {**reads.memory_of(cache, model), "prefill_peak": peak_bytes(bench.device)}
            del cache
            release(bench.device)
            if host:
                pool.reclaim()
    settings = {"impl": impl, "method": method.to_json(), "prefill_chunk_size": chunk, "where": where,
                "device_bytes": limit if host else None}  # fmt: skip
    timing = Timing.of(took, 1, HOW)
    return {"who": "longreach", "settings": settings, **timing.recorded(), "how": HOW, "memory": memory,
            "error": None, "error_bound": None, "unchecked": UNCHECKED}  # fmt: skip
