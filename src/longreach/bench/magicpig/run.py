"""Run a case of MagicPIG's step: appending, sealing, codes, look-ups, weights, attention, merge, against exact kernels.

The baselines attend and nothing more: their keys and values are appended already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import torch

from longreach.bench.baselines import baseline
from longreach.bench.case import Case
from longreach.bench.check import require_right
from longreach.bench.competitor import Competitor
from longreach.bench.entries import rival_entry, speeds
from longreach.bench.inputs import WIDTHS, Inputs, bytes_needed, least_read
from longreach.bench.magicpig.check import SampleVerdict, check_layer
from longreach.bench.magicpig.layers import DENSE, NO_BLOCK, ONE_BLOCK, SampledLayers
from longreach.bench.sweep import Sweeps
from longreach.bench.targets import judge
from longreach.bench.timing import L2_MULTIPLE, Timing, copies_needed, l2_bytes, measure
from longreach.errors import InvalidInput, OutOfMemory
from longreach.methods.base import attend_densely

Say = Callable[[str], None]
RESERVED = 8 << 30  # bytes for lists, counts of matches, graphs and baselines
BUILDS = 5  # builds of a prompt's tables that are timed
HOW = (
    "Times are those of a layer, in a pass over all layers. A step is the mean of `seal` steps. In one of them a block "
    "is sealed, for all sequences and layers at once; its ids are removed first, which is timed too. Parts are timed "
    "alone. Rest: a step without a block less its parts, as counting of reads and limits of lists."
)


@torch.no_grad()
def run_magicpig(
    case: Case, device: torch.device, *, without: Iterable[str] = (), replays: int = 21, seed: int = 0,
    say: Say = lambda line: None, sweeps: Sweeps | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case; the result as a record's part.

    Raises WrongResult, Unsupported and BaselineFailed as run_case does, OutOfMemory where it does not fit, InvalidInput
    if a preset reads too little for the L2 to be cold.
    """
    sampling = case.sampling
    assert sampling is not None
    names = [name for name in case.baselines if name not in set(without)]
    versions: dict[str, str] = {}
    for name in names:
        versions |= baseline(name).load()
    say(f"{case.name}: {case.shape.batch} x {case.shape.context} keys, {len(sampling.presets)} presets")
    check_room(case, device)
    inputs, impl, sweeps = Inputs(case, device, seed), case.impls[0], sweeps or Sweeps()
    mine = [SampledLayers(inputs, preset, impl) for preset in sampling.presets]
    presets = dict[str, dict[str, Any]]()
    for layers in mine:
        check_layer(layers)
        presets[layers.preset.name] = described(layers)
        check_cold(layers, presets[layers.preset.name]["bytes_read"])
    rivals, tried = list[Competitor](), dict[str, Any]()
    for name in names:
        found, tests = sweeps.fastest(name, inputs, say)
        tried[name] = [asdict(test) for test in tests]
        rivals += found
    calls = {f"{x.preset.name}: {NO_BLOCK}": [x.step()] for x in mine}
    calls |= {f"{x.preset.name}: {ONE_BLOCK}": [x.step(sealing=True)] for x in mine}
    calls[DENSE] = [mine[0].dense()]
    times = measure({**calls, **{c.name: c.calls for c in rivals}}, device, replays=replays)
    entries = list[dict[str, Any]]()
    for layers in mine:
        entries += _mine(layers, times, presets[layers.preset.name], check_layer(layers))  # again: after all calls
    entries.append(_dense(mine[0], times[DENSE]))
    entries += [rival_entry(c, times[c.name], inputs) for c in rivals]
    for layers in mine:
        presets[layers.preset.name] |= _parts(layers, times[f"{layers.preset.name}: {NO_BLOCK}"], replays)
        check_layer(layers)
    return {
        "shape": asdict(case.shape),
        "reads": asdict(case.reads),
        "layers": sampling.layers,
        "sampled": presets,
        "bytes_needed": bytes_needed(case),
        "copies": inputs.copies,
        "seed": seed,
        "timing": {"how": times[DENSE].how, "replays": replays, "warm_up": 3, "of": HOW},
        "baselines": {
            "versions": versions,
            "left_out": sorted(set(case.baselines) - set(names)),
            "tried": tried,
            "timed": "attention alone: their keys and values are appended already, ours within what is timed",
        },
        "entries": entries,
        "speed_over_fastest": speeds(entries),
        "targets": judge(case, entries),
    }


def check_room(case: Case, device: torch.device) -> None:
    """Raise OutOfMemory, with the bytes needed, if the copies of keys, values and tables do not fit into the GPU."""
    shape, sampling = case.shape, case.sampling
    assert sampling is not None
    if device.type != "cuda":
        return
    ids = 2 * shape.batch * shape.kv_heads * shape.context * sum(p.tables for p in sampling.presets)
    kv = 2 * shape.batch * shape.kv_heads * shape.context * shape.dim * WIDTHS[shape.dtype]
    needed = copies_needed(least_read(case), device) * int(kv + 1.2 * ids) + RESERVED  # offsets: up to a fifth of ids
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise OutOfMemory(
            f"{case.name}: keys, values and tables take {needed / 2**30:.0f} GiB, the GPU has {free / 2**30:.0f} left"
        )


def check_cold(layers: SampledLayers, read: float) -> None:
    """Raise InvalidInput if the copies of the inputs are too few for a step to find its keys outside the L2."""
    inputs = layers.inputs
    least = L2_MULTIPLE * l2_bytes(inputs.device)
    if inputs.copies * read < least:
        raise InvalidInput(
            f"{layers.preset.name}: the {inputs.copies} copies are read by {read:.3g} bytes each, which is less than "
            f"{L2_MULTIPLE} times the L2 ({least} bytes): times would not be cold; lower inputs.LEAST_SAMPLED"
        )


def described(layers: SampledLayers) -> dict[str, Any]:
    """What a preset samples, reads and keeps: means over the copies, as the method's report has them.

    Bytes are of one step of one layer, all sequences; bytes_read and percent_of_dense are means over steps with a block
    and without, the others are of a step without. sampled_head, sampled_group: shares of the context, means over KV
    heads. table_bytes: of the tables and centres of all sequences in one layer.
    """
    reports = layers.reports()
    plain, sealing = (fmean(r.bytes_read for r in some) for some in (reports, layers.reports(sealing=True)))
    read = plain + (sealing - plain) / layers.preset.seal
    notes = [report.notes or {} for report in reports]
    shape = layers.inputs.shape

    def mean(name: str) -> float:
        return fmean(fmean(n[name]) if isinstance(n[name], list) else n[name] for n in notes)

    return {
        "preset": asdict(layers.preset),
        "method": layers.method.to_json(),
        "bytes_read": read,
        "percent_of_dense": 100 * read / fmean(r.dense_bytes for r in reports),
        "bytes_read_if_sealing": sealing,
        "key_bytes": fmean(r.key_bytes for r in reports),
        "value_bytes": fmean(r.value_bytes for r in reports),
        "metadata_bytes": fmean(r.metadata_bytes for r in reports),
        **{name: mean(name) for name in ("search_bytes", "attention_bytes", "sampled_head", "sampled_group")},
        "table_bytes": round(mean("table_bytes_per_sequence") * shape.batch),
        "tables_percent_of_kv": 100 * mean("table_share"),
        "keys_in_tables": layers.stops[0] - layers.method.sinks,
    }


def _mine(
    layers: SampledLayers, times: dict[str, Timing], preset: dict[str, Any], verdict: SampleVerdict
) -> list[dict[str, Any]]:
    """Entries of the mean step, and of steps without a block and with one."""
    name, read = layers.preset.name, preset["bytes_read"]
    plain, sealing = (times[f"{name}: {what}"] for what in (NO_BLOCK, ONE_BLOCK))
    mean = mean_step(plain, sealing, layers.preset.seal)
    return [
        {
            "name": title,
            "who": "longreach",
            "settings": {"impl": layers.impl, "layers": layers.count, "preset": asdict(layers.preset)},
            **timing.recorded(layers.count),
            "tb_per_s": read * layers.count / timing.median / 1e12,
            "bytes_read": read,
            "percent_of_dense": preset["percent_of_dense"],
            "error": verdict.error,
            "check": verdict.recorded(),
        }
        for title, timing in ((name, mean), (f"{name}: {NO_BLOCK}", plain), (f"{name}: {ONE_BLOCK}", sealing))
    ]


def mean_step(plain: Timing, sealing: Timing, every: int) -> Timing:
    """The mean of `every` steps, one of them with a block, replay by replay. Its launches are those without a block."""
    seconds = [a + (b - a) / every for a, b in zip(plain.seconds, sealing.seconds, strict=True)]
    return replace(plain, seconds=tuple(seconds))


def _dense(layers: SampledLayers, timing: Timing) -> dict[str, Any]:
    """The library's dense attention, which appends as well."""
    inputs = layers.inputs
    out = attend_densely(layers.call(0)).partial.out
    return {
        "name": DENSE,
        "who": "longreach",
        "settings": {"impl": layers.impl, "layers": layers.count},
        **timing.recorded(layers.count),
        "tb_per_s": bytes_needed(inputs.case) * layers.count / timing.median / 1e12,
        "error": require_right(DENSE, inputs, inputs.case.memories[0], 1, out),
    }


def _parts(layers: SampledLayers, step: Timing, replays: int) -> dict[str, Any]:
    """Microseconds of a layer's parts, each alone, and seconds to build the tables of one prompt in one layer."""
    device = layers.inputs.device
    times = measure(layers.parts(), device, replays=replays, launches=False)
    took = {name: timing.median * 1e6 for name, timing in times.items()}
    block = took.pop("seal a block")
    rest = step.median * 1e6 / layers.count - sum(took.values())
    built = measure({"build": [layers.build()]}, device, replays=min(BUILDS, replays), warm_up=1, launches=False)
    return {
        "parts_microseconds": {**took, "rest": rest, "(seal a block)": block},
        "build_seconds": built["build"].median,
    }
