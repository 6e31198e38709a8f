"""Run a case of the group "steps": one captured step of every decode method, compared with dense attention's.

All methods decode from the same drawn keys and values, none has to read a prompt. An entry is one method's captured
step: its time, the kernels it launches, the bytes it reads, the peak memory of decoding, and how wrong it may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.check_step import relative
from longreach.bench.decoding import WARM, Decoding, entry_of
from longreach.bench.mac import decoding as mac
from longreach.bench.methods import FORCED, method_for
from longreach.bench.targets import judge
from longreach.errors import InvalidInput, OutOfMemory

DENSE = "dense"


def run_method_steps(bench: Decoding, case: Case, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a case; the result as a record's part, also given to `save` after each method.

    Raises WrongResult, once all methods were measured, for those whose step is wrong: they have no entry. A method
    that does not fit into memory is named under left_out.
    """
    from longreach.adapters.transformers import shape_of

    if case.methods[:1] != (DENSE,):
        raise InvalidInput(f"{case.name}: expected dense as the first of its methods, got {case.methods}")
    model, _ = bench.model(case)
    shape = shape_of(model)
    ids = bench.tokens(case, model, case.shape.context + 2)
    weights, kv = bench.bytes(case, model)
    bench.say(f"{case.name}: {case.shape.batch} x {case.shape.context} keys, {len(case.methods)} methods")
    entries, setup = list[dict[str, Any]](), dict[str, Any]()
    checks, left_out, wrong = dict[str, Any](), dict[str, str](), list[str]()
    exact, dense = torch.empty(0), None

    def result() -> dict[str, Any]:
        measured = {entry["name"] for entry in entries}
        judged = tuple(t for t in case.targets if {t.of, t.over or t.of} <= measured)
        return {
            **bench.described(case, weights, kv),
            "forced": {FORCED: mac.FORCED},
            "check": dict(checks),
            "left_out": dict(left_out),
            "setup_seconds": dict(setup),
            "timing": {"how": entries[0]["how"] if entries else None, "replays": bench.steps, "warm_up": WARM},
            "baselines": {"versions": {}, "left_out": [], "tried": {}},
            "entries": list(entries),
            "targets": judge(replace(case, targets=judged), entries),
        }

    for name in case.methods:
        try:
            with method_for(name, case, shape, bench.seed, forced_steps=bench.rows) as method:
                layers = name not in (DENSE, FORCED)
                stepped = bench.step(case, model, ids, method, check_layers=layers)
            more: dict[str, Any] = {}
            if dense is None:
                exact, dense = bench.judge_steps(case, model, ids, stepped.done)
                verdict: Any = dense
            elif name == FORCED:  # from empty entries it is the model with a window
                _, verdict = bench.judge_steps(case, model, ids, stepped.done, mac.window(case))
            else:
                verdict = bench.judge_method(f"{case.name}: {name}", case, stepped, dense)
                more["left_out"] = relative(stepped.done.logits[: len(exact), :1], exact[:, :1])
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            left_out[name] = f"out of memory: {' '.join(str(error).split())[:200]}"
            bench.say(f"  {name}: {left_out[name]}")
            if dense is None:
                raise
            continue
        except WrongResult as error:
            wrong.append(str(error))
            bench.say(f"  {name}: {error}")
            if dense is None:
                raise
            continue
        captured = {**stepped.entries[0], "name": name, **more}
        if method is not None:
            captured["settings"] = {**captured["settings"], "method": _options(method.to_json())}
        entries.append(entry_of(weights, kv, **captured, error=verdict.error, error_bound=verdict.error_bound))
        checks[name], setup[name] = verdict.recorded(), stepped.setup
        over = entries[-1]["microseconds"]["median"] / entries[0]["microseconds"]["median"]
        kernels = entries[-1]["launched"]["kernels"]
        bench.say(f"  {name}: {stepped.timing.median * 1e3:.3f} ms, {over:.3f} of dense, {kernels} kernels")
        save(result())
    if wrong:
        raise WrongResult("; ".join(wrong))
    return result()


def _options(method: dict[str, Any]) -> dict[str, Any]:
    """A method's options without its plan, which was made up and is gone."""
    return {key: value for key, value in method.items() if key != "plan"}
