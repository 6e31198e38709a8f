"""Run a case of the group "first-token": a random prompt of a whole model up to its first token, dense and by Kascade.

Both sides are `longreach.generate` for one token, with logits of the prompt's last token alone; a record also has what
a plan made of the prompt takes ("auto"). Memory is what torch has allocated at most until the first token.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longreach.bench.case import Case
from longreach.bench.decoding import Decoding, entry_of
from longreach.bench.evict import first_logits
from longreach.bench.launches import launched
from longreach.bench.memory import peak_bytes, release, reset_peak
from longreach.bench.stack import planned
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.bench.user import chunked, require_tokens, rounding
from longreach.methods.base import AttentionMethod
from longreach.methods.registry import choose
from longreach.records.launches import Launched
from longreach.runtime import PlanReport

DENSE = "dense"
HOW = "host clock, from the prompt to its first token"
WARM = 1  # prompts before those that are timed: kernels are compiled there
PLAN_NEW = 2  # tokens after which a plan of the prompt is made
UNCHECKED = "answers of a sparse prefill are not those of dense attention; kascade-prefill checks its attention"


@torch.no_grad()
def run_first_token(bench: Decoding, case: Case, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a case; the result as a record's part. Raises WrongResult where the dense side's first token is wrong."""
    from longreach.adapters.transformers import shape_of

    assert case.stack is not None
    model, _ = bench.model(case)
    ids = bench.tokens(case, model, case.shape.context)
    weights, kv = bench.bytes(case, model)
    bench.say(f"{case.name}: {case.shape.batch} x {case.shape.context} tokens up to the first token")
    behind, answer = rounding(model, ids), first_logits(model, ids)
    rounds = case.replays or 5
    seconds, peaks = dict[str, list[float]](), dict[str, int | None]()
    with planned(case, bench.seed, shape_of(model)) as (kascade, _, _):
        ways: dict[str, AttentionMethod | None] = {DENSE: None, case.stack.method: kascade}
        for number in range(WARM + rounds):
            names = list(ways)[number % 2 :] + list(ways)[: number % 2]
            for name in names:
                took, peaks[name], token = _first_token(bench, case, model, ids, ways[name])
                if name == DENSE:
                    require_tokens(case.name, answer, token, 1, behind)
                if number >= WARM:
                    seconds.setdefault(name, []).append(took)
        launches = {name: _launched(bench, case, model, ids, method) for name, method in ways.items()}
    entries = [
        entry_of(
            weights, kv, name=name, who="longreach", settings={"prefill": name}, memory={"peak": peaks[name]},
            timing=Timing.of(seconds[name], 1, HOW, launches[name]), error=None, error_bound=None,
            unchecked=UNCHECKED if name != DENSE else "its token is compared with the model's own logits",
        )
        for name in ways
    ]  # fmt: skip
    for entry in entries:
        bench.say(f"  {entry['name']}: {entry['microseconds']['median'] / 1e6:.3f} s")
    result = {
        **bench.described(case, weights, kv),
        **chunked(case),
        "timing": {"how": HOW, "replays": rounds, "warm_up": WARM},
        "baselines": {"versions": {}, "left_out": [], "tried": {}},
        "entries": entries,
        "targets": judge(case, entries),
    }
    save(result)
    made = [_plan_of(case, model, ids) for _ in range(WARM + 1)][-1]
    share = None if made.seconds is None else 1e6 * made.seconds / entries[0]["microseconds"]["median"]
    bench.say(f"  {made}" + ("" if share is None else f" ({share:.1%} of the dense prefill)"))
    return {**result, "automatic_plan": {"about": made.about, "seconds": made.seconds, "share_of_dense": share}}


def _first_token(
    bench: Decoding, case: Case, model: Any, ids: Tensor, method: AttentionMethod | None
) -> tuple[float, int | None, Tensor]:
    """Seconds, the most bytes, and the token [B, 1]."""
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.loop import generate

    with attach(model, prefill=method) as session:
        release(bench.device)
        reset_peak(bench.device)
        started = bench.now()
        made = generate(session, ids, max_new_tokens=1, eos_token_id=(), **chunked(case))
        took, most = bench.now() - started, peak_bytes(bench.device)
    return took, most, made.tokens


def _launched(bench: Decoding, case: Case, model: Any, ids: Tensor, method: AttentionMethod | None) -> Launched:
    """What a prompt launches up to its first token."""
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.loop import generate

    with attach(model, prefill=method) as session:
        release(bench.device)
        call = partial(generate, session, ids, max_new_tokens=1, eos_token_id=(), **chunked(case))
        return launched(call, bench.device)


def _plan_of(case: Case, model: Any, ids: Tensor) -> PlanReport:
    """The plan made of the prompt, where none is kept, or why there is none."""
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.loop import generate

    method = choose("decode", "kascade", plan="auto")
    with _empty_cache_folder(), attach(model, decode=method) as session:
        generate(session, ids, max_new_tokens=PLAN_NEW, eos_token_id=(), **chunked(case))
        (report,) = session.report().plans
    return report


@contextmanager
def _empty_cache_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        yield
