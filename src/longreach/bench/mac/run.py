"""Run a case of MAC's step: appending, recovery, match, decision, attention, merge and ring, against exact kernels.

The baselines attend and nothing more: their keys and values are appended already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from longreach.bench.baselines import baseline
from longreach.bench.case import Case, Reuse
from longreach.bench.check import bound, require_right
from longreach.bench.competitor import Competitor
from longreach.bench.entries import rival_entry, speeds
from longreach.bench.inputs import Inputs, bytes_needed, least_read
from longreach.bench.mac.break_even import break_even
from longreach.bench.mac.check import check_step
from longreach.bench.mac.forced_hits import ForcedHits
from longreach.bench.sweep import Sweeps
from longreach.bench.targets import judge
from longreach.bench.timing import Timing, copies_needed, measure
from longreach.errors import InvalidInput, OutOfMemory
from longreach.runtime import Ledger

Say = Callable[[str], None]
DENSE = "dense"
FORCED = (
    "Hits are forced, for timing alone: where a head is to hit, the row `gap` back was given its query, and the band "
    "is as wide as it takes; the match then looks through the whole ring and decides by its rule. How often heads hit, "
    "and what that leaves unread, is no result."
)
RESERVED = 6 << 30  # bytes for what kernels and baselines make


@torch.no_grad()
def run_mac(
    case: Case, device: torch.device, *, without: Iterable[str] = (), replays: int = 21, seed: int = 0,
    say: Say = lambda line: None, sweeps: Sweeps | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case; the result as a record's part.

    Raises WrongResult, Unsupported and BaselineFailed as run_case does, OutOfMemory where it does not fit.
    """
    reuse = case.reuse
    assert reuse is not None
    if case.shape.rows != 1:
        raise InvalidInput(f"{case.name}: MAC's step has one row a sequence, got --rows {case.shape.rows}")
    names = [name for name in case.baselines if name not in set(without)]
    versions: dict[str, str] = {}
    for name in names:
        versions |= baseline(name).load()
    say(f"{case.name}: {case.shape.batch} x {case.shape.context} keys, {len(reuse.hits)} ways to hit")
    check_room(case, device)
    inputs, impl, sweeps = Inputs(case, device, seed), case.impls[0], sweeps or Sweeps()
    mine = [ForcedHits(inputs, hits, impl, seed) for hits in reuse.hits]
    copies = range(inputs.copies)
    calls = {p.hits.name: p.timed() for p in mine} | {DENSE: [mine[0].dense(copy) for copy in copies]}
    for planted in mine:
        check_step(planted, 0)
    rivals, tried = list[Competitor](), dict[str, Any]()
    for name in names:
        found, tests = sweeps.fastest(name, inputs, say)
        tried[name] = [asdict(test) for test in tests]
        rivals += found
    times = measure({**calls, **{c.name: c.calls for c in rivals}}, device, replays=replays)
    entries = [_mine(p, times[p.hits.name], check_step(p, 0), impl) for p in mine]  # again: after all calls
    entries.append(_dense(mine[0], times[DENSE], impl))
    entries += [rival_entry(c, times[c.name], inputs) for c in rivals]
    return {
        "shape": asdict(case.shape),
        "reads": asdict(case.reads),
        "forced": FORCED,
        "reuse": asdict(reuse),
        "method": mine[0].method.to_json(),
        "bytes_needed": bytes_needed(case),
        "copies": inputs.copies,
        "seed": seed,
        "error_bound": bound(inputs.dtype),
        "timing": {"how": times[DENSE].how, "replays": replays, "warm_up": 3},
        "baselines": {
            "versions": versions,
            "left_out": sorted(set(case.baselines) - set(names)),
            "tried": tried,
            "timed": "attention alone: their keys and values are appended already, ours within what is timed",
        },
        "entries": entries,
        "speed_over_fastest": speeds(entries),
        "break_even": break_evens(reuse, entries, case.shape.heads // case.shape.kv_heads),
        "targets": judge(case, entries),
    }


def check_room(case: Case, device: torch.device) -> None:
    """Raise OutOfMemory, with the bytes needed, if the copies of keys, values and rings do not fit into the GPU."""
    reuse, shape = case.reuse, case.shape
    assert reuse is not None
    if device.type != "cuda":
        return
    rings = shape.batch * shape.heads * reuse.window * shape.dim * (2 + 4) * len(reuse.hits)
    needed = copies_needed(least_read(case), device) * (bytes_needed(case) + rings) + RESERVED
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise OutOfMemory(
            f"{case.name}: keys, values and rings take {needed / 2**30:.0f} GiB, the GPU has {free / 2**30:.0f} left"
        )


def break_evens(reuse: Reuse, entries: list[dict[str, Any]], group: int) -> dict[str, dict[str, float | None]]:
    """For each kind of kernel compared with, with the guard and without: the hit rate from which the step is faster.

    Empty for cases of one rate.
    """
    if len({h.rate for h in reuse.hits}) < 2:
        return {}
    took = {e["name"]: e["microseconds"]["median"] for e in entries}
    others = [took[e["name"]] for e in entries if e["who"] != "longreach"]
    against = {DENSE: took[DENSE], **({"fastest other kernel": min(others)} if others else {})}
    found = {}
    for guard in (True, False):
        curve = sorted((h.rate, took[h.name]) for h in reuse.hits if h.guard is guard)
        found["guard" if guard else "no guard"] = {
            name: break_even(curve, other, group) for name, other in against.items()
        }
    return found


def _mine(planted: ForcedHits, timing: Timing, error: float, impl: str) -> dict[str, Any]:
    inputs, ledger = planted.inputs, Ledger()
    planted.run(0, ledger)
    (layer,) = ledger.report().layers
    shape, state = inputs.shape, planted.states[0]
    vector = 2 * shape.dim * inputs.dtype.itemsize
    read = layer.key_bytes + layer.value_bytes + (layer.metadata_bytes if planted.hits.part == "step" else 0)
    return {
        "name": planted.hits.name,
        "who": "longreach",
        "settings": {"impl": impl, "part": planted.hits.part, "forced": planted.described()},
        **timing.recorded(),
        "tb_per_s": read / timing.median / 1e12,
        "bytes_read": read,
        "ring_percent_of_kv": 100 * state.bytes_per_sequence / (shape.context * shape.kv_heads * vector),
        "error": error,
    }


def _dense(planted: ForcedHits, timing: Timing, impl: str) -> dict[str, Any]:
    """The library's dense attention, which appends as well."""
    inputs = planted.inputs
    out = planted.dense(0)().partial.out
    return {
        "name": DENSE,
        "who": "longreach",
        "settings": {"impl": impl, "part": "step"},
        **timing.recorded(),
        "tb_per_s": bytes_needed(inputs.case) / timing.median / 1e12,
        "error": require_right(DENSE, inputs, inputs.case.memories[0], 1, out),
    }
