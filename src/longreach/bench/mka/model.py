"""The captured decode step of an 8B-shaped model converted to FastMKA, over that of the model itself.

Both read the same prompt: the running means of a converted model cannot be drawn as keys and values are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.check_step import relative
from longreach.bench.decoding import WARM, Decoding, Stepped, entry_of
from longreach.bench.memory import release
from longreach.bench.mka.cases import DENSE
from longreach.bench.targets import judge

CHUNK = 8192  # tokens of a pass over the prompt
GATE = 0.5  # of the converted model, so that the mixture is no copy
# relative error of logits that rounding explains: layers of a random model amplify it (in bf16 0.18 was seen with
# exact attention); wrong attention gives about 1.4. Else 1e-3.
MOST = {torch.bfloat16: 0.25, torch.float16: 5e-2}


@torch.no_grad()
def run_mka_model(bench: Decoding, case: Case, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a case; the result as a record's part, also given to `save` after each kind.

    Raises WrongResult where the first step's logits differ from those of one pass of the same model under transformers.
    """
    from longreach.adapters.transformers.mka import convert, revert
    from longreach.adapters.transformers.mka.attention import MemoryAttention

    assert case.trained is not None
    model, _ = bench.model(case)
    ids = bench.tokens(case, model, case.shape.context + 2)
    weights, kv = bench.bytes(case, model)
    entries, setup = list[dict[str, Any]](), dict[str, Any]()

    def result() -> dict[str, Any]:
        return {
            **bench.described(case, weights, kv),
            "trained": {"kinds": list(case.trained.kinds) if case.trained else [], "gate": GATE},
            "setup_seconds": dict(setup),
            "timing": {"how": entries[0]["how"] if entries else None, "replays": bench.steps, "warm_up": WARM},
            "baselines": {"versions": {}, "left_out": [], "tried": {}},
            "entries": list(entries),
            "targets": judge(case, entries),
        }

    for kind in case.trained.kinds:
        bench.say(f"{case.name}: {kind}")
        if kind != DENSE:
            convert(model, kind, gate=GATE)
        try:
            stepped, error = _measured(bench, case, model, ids)
        finally:
            if kind != DENSE:
                for module in model.modules():
                    if isinstance(module, MemoryAttention):
                        module.mka.router.gate.bias.zero_()
                revert(model)
        captured = {**stepped.entries[0], "name": kind}
        most = MOST.get(model.dtype, 1e-3)
        entries.append(entry_of(weights, kv, **captured, error=error, error_bound=most))
        setup[kind] = stepped.setup
        save(result())
    return result()


def _measured(bench: Decoding, case: Case, model: Any, ids: Tensor) -> tuple[Stepped, float]:
    """The step after the prompt, and the relative error of its first logits."""
    from longreach.adapters.transformers import attach
    from longreach.cache import CacheConfig

    tokens, started = case.shape.context, bench.now()
    want = model(ids[:, : tokens + 1], use_cache=False, logits_to_keep=1).logits[:, -1]
    with attach(model, cache=CacheConfig(capacity=tokens + bench.rows), impl=case.impls[0]) as session:
        cache = session.new_cache(case.shape.batch)
        for part in ids[:, :tokens].split(CHUNK, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        seconds = {"read": bench.now() - started}
        kept = cache.states.snapshot()  # while it lives, running means can be cut back to the prompt
        stepped = bench.filled_step(case, session, cache, ids, seconds, share=False)
    del cache, kept
    release(bench.device)
    error = relative(stepped.done.logits[:, 0], want)
    most = MOST.get(model.dtype, 1e-3)
    if not error <= most:
        raise WrongResult(f"{case.name}: logits of the first step differ by {error:.2e}, more than {most:.1e}")
    return stepped, error
