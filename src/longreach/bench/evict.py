"""Run a case of the group "evict": answers after a long prompt, with all its keys and with those that SnapKV keeps.

A random prompt is really read; host clock, token by token. Besides the time of a token and the bytes that the cache
holds, a record has what answers of some lengths take in all, so that it shows from which length on eviction pays; and
how long an answer fits: what was made, and as many tokens as the memory that was free at the peak of decoding holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import Case
from longreach.bench.decoding import Decoding, entry_of
from longreach.bench.launches import observed
from longreach.bench.memory import release, total_bytes
from longreach.bench.targets import judge
from longreach.bench.user import (
    NEW,
    OURS,
    TIMED,
    WARM_UP,
    Answer,
    as_entry,
    chunked,
    require_tokens,
    rounding,
    timed,
    tried,
)

CAPACITY = 1024  # keys that a KV head keeps
LENGTHS = 10, 100, 300  # tokens of answers
CHECKED = "the first token against the model's own logits after the prompt; those after eviction are not checked"


def run_evict(bench: Decoding, case: Case, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a case; the result as a record's part, also given to `save` after each way. Raises WrongResult."""
    from longreach.methods.snapkv import SnapKV

    model, _ = bench.model(case)
    ids = bench.tokens(case, model, case.shape.context)
    weights, kv = bench.bytes(case, model)
    bench.say(f"{case.name}: prompts of {case.shape.batch} x {case.shape.context} tokens, {CAPACITY} keys kept")
    most = rounding(model, ids).behind
    answer = first_logits(model, ids)
    entries, left_out = list[dict[str, Any]](), dict[str, str]()

    def result() -> dict[str, Any]:
        return {
            **bench.described(case, weights, kv),
            **chunked(case),
            "capacity": CAPACITY,
            "check": {"how": CHECKED, "behind_bound": most},
            "left_out": dict(left_out),
            "timing": {"how": "host clock, token by token", "replays": TIMED, "warm_up": NEW - TIMED},
            "baselines": {"versions": {}, "left_out": [], "tried": {}},
            "entries": list(entries),
            "targets": judge(case, entries),
        }

    capacity = min(CAPACITY, case.shape.context // 4)
    for name, evict in ((OURS, None), (f"{OURS}, snapkv", SnapKV(capacity=capacity, window=min(32, capacity // 2)))):
        found = tried(bench, name, left_out, partial(_measure, bench, case, model, ids, evict, answer, most))
        if found is not None:
            entries.append(entry_of(weights, found["kv_read"], **{**found, "name": name}))
            step = entries[-1]["microseconds"]["median"] / 1e6
            held, batch = entries[-1]["kv_bytes"] / 2**30, case.shape.batch
            bench.say(f"  {name}: {1e3 * step:.2f} ms a token, {batch / step:.0f} tokens/s, {held:.2f} GiB of KV held")
            save(result())
    return result()


@torch.no_grad()
def first_logits(model: Any, ids: Tensor) -> Answer:
    """The model's own logits after each prompt."""
    answer = Answer()
    for row in ids.split(1):  # one at a time: a batch of prompts takes memory that is not needed here
        logits = model(input_ids=row, use_cache=False, logits_to_keep=1).logits[:, -1].float().cpu()
        answer.logits = [logits if not answer.logits else torch.cat([answer.logits[0], logits])]
    return answer


@torch.no_grad()
def _measure(
    bench: Decoding, case: Case, model: Any, ids: Tensor, evict: Any, answer: Answer, most: float
) -> dict[str, Any]:
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.loop import generate
    from longreach.bench.user import Rounding

    made = list[Any]()
    with attach(model, evict=evict) as session:

        def run(prompt: Tensor, clock: Any) -> None:
            made.append(generate(session, prompt, max_new_tokens=NEW, eos_token_id=(), streamer=clock, **chunked(case)))

        # the warm-up's prompt is longer than the capacity, so that keys are evicted and the kernels for it compiled
        capacity = 0 if evict is None else evict.capacity
        run(ids[:, : capacity + WARM_UP], None)
        session.static_caches.clear()
        release(bench.device)
        with observed() as seen:
            clock, taken = timed(bench, lambda clock: run(ids, clock), None)
        cache = session.static_caches[len(ids)]
        (decoder,) = cache.decoders.values()
        held = cache.kv.nbytes
        kept = sum(sum(cache.kv.slots_in_use(layer)) - len(ids) * (NEW - 1) for layer in range(len(cache.layers)))
        launched = bench.launched_by(decoder, None if decoder.graph is None else seen.captured)
    behind = require_tokens(case.name, answer, made[-1].tokens, 1, Rounding(0.0, most))
    settings = {"impl": "auto", "captured": made[-1].captured, "evict": None if evict is None else evict.to_json()}
    entry = as_entry(OURS, "longreach", clock, taken, settings, launched)
    step = entry["timing"].median
    evicting = made[-1].evict_seconds  # after the first token
    seconds = {str(n): taken["ttft_seconds"] + evicting + (n - 1) * step for n in LENGTHS}
    whole = bench.bytes(case, model)[1]
    key = whole // (len(cache.layers) * ids.numel())  # bytes of one token's key and value in one layer
    peak = taken["memory"]["decode_peak"]
    more = None if peak is None else (total_bytes(bench.device) - peak) // (whole // case.shape.context)
    return {
        **entry, "tokens_that_fit": None if more is None else NEW + more,
        "error": behind, "error_bound": most, "kv_bytes": held, "kv_read": kept * key, "kv_percent": 100 * held / whole,
        "tokens_per_second": len(ids) / step, "answer_seconds": seconds,
        "evict_seconds": evicting,
    }  # fmt: skip
