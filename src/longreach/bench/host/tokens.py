"""One more token: each step of a long answer is timed, as keys enter MagicPIG's tables while it goes on."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.decoding import WARM, Decoding, entry_of
from longreach.bench.format import show_seconds
from longreach.bench.host.cases import MAGICPIG, entry_name
from longreach.bench.host.fill import fill_host
from longreach.bench.launches import observed
from longreach.bench.memory import allocated_bytes, peak_bytes, release, reset_peak
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.cache import CacheConfig
from longreach.methods.magicpig import MagicPIG

BOUND = 1.3  # over the median, above which steps are named
NAMED = 64  # the most of them
UNCHECKED = "the cases of magicpig-decode and of host memory check the same step"


@torch.no_grad()
def run_tokens(bench: Decoding, case: Case) -> dict[str, Any]:
    """Measure a case; the result as a record's part. Keys, values and tables lie in GPU memory."""
    assert case.sampling is not None and case.generated is not None
    model, seconds = bench.model(case)
    weights, kv = bench.bytes(case, model)
    entries, setup = list[dict[str, Any]](), dict[str, Any]()
    for preset in case.sampling.presets:
        release(bench.device)
        name = entry_name(MAGICPIG, preset)
        bench.say(f"{case.name}: {name}: {case.generated} steps after {case.shape.context} keys")
        measured, setup[name] = _answer(bench, case, model, MagicPIG(**asdict(preset)))
        more: dict[str, Any] = {"unchecked": UNCHECKED, "slowest": slowest(measured["timing"].seconds)}
        show_seconds(name, setup[name])
        entries.append(entry_of(weights, kv, name=name, who="longreach", error=None, error_bound=None,
                                **measured, **more))  # fmt: skip
    return {
        "shape": asdict(case.shape),
        "model": asdict(case.model) if case.model else None,
        "generated": case.generated,
        "bytes": {"weights": weights, "kv": kv},
        "seed": bench.seed,
        "setup_seconds": {"model": seconds, **setup},
        "timing": {"how": entries[0]["how"], "replays": case.generated, "warm_up": WARM},
        "baselines": {"versions": {}, "left_out": [], "tried": {}},
        "entries": entries,
        "targets": judge(case, entries),
    }


def _answer(bench: Decoding, case: Case, model: Any, method: MagicPIG) -> tuple[dict[str, Any], dict[str, float]]:
    """An entry's settings, timing and memory, and the seconds of setting it up."""
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.loop import generate

    assert case.generated is not None
    tokens, impl, capture = case.shape.context, case.impls[0], bench.device.type == "cuda"
    with attach(model, decode=method, impl=impl) as session:
        cache = session.new_cache(case.shape.batch, CacheConfig(capacity=tokens + case.generated + WARM + 1))
        seconds = fill_host(cache, model, session.decode, tokens, bench.seed, impl, bench.now)
        before = allocated_bytes(bench.device)
        reset_peak(bench.device)
        ids = bench.tokens(case, model, tokens + 1)
        with observed() as seen:
            got = generate(session, ids, max_new_tokens=WARM, eos_token_id=(), past_key_values=cache)
        if got.captured != ("full" if capture else None):
            raise WrongResult(f"{case.name}: the step was not one CUDA graph ({got.not_captured_reason})")
        cache.drop_columns(cache.columns - tokens)
        (decoder,) = cache.decoders.values()
        started = bench.now()
        replays = bench.replays(decoder, capture, case.generated)
        timed = bench.now() - started
        cache.drop_columns(cache.columns - tokens)
        launched = bench.launched_by(decoder, None if not capture else seen.captured)
        how = "CUDA graph replays in a row" if capture else "host clock, functional run only"
        memory = {
            "before": before, "decode_peak": peak_bytes(bench.device), "state": cache.states.nbytes,
            "device_kv": cache.kv.nbytes,
        }  # fmt: skip
        settings = {"compile": decoder.compile, "impl": impl, "captured": capture, "method": method.to_json()}
        took = {**seconds, "compile_and_capture": got.setup_seconds, "time": timed}
        return {"settings": settings, "timing": Timing.of(replays, 1, how, launched), "memory": memory}, took


def slowest(seconds: tuple[float, ...]) -> dict[str, Any]:
    """The slowest step over the median one, and the steps above BOUND: numbers from 0, and times over the median."""
    middle = median(seconds)
    step = max(range(len(seconds)), key=seconds.__getitem__)
    above = [{"step": n, "over_median": s / middle} for n, s in enumerate(seconds) if s > BOUND * middle]
    return {
        "steps": len(seconds), "step": step, "over_median": seconds[step] / middle, "bound": BOUND,
        "count_above": len(above), "above": above[:NAMED],
    }  # fmt: skip
