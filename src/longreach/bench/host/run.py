"""Run a case of the group "host": one captured step of a model whose keys and values lie in host memory.

Each method has a cache of its own, as layers that it reads whole stay in GPU memory first. An entry is one method's
captured step with one number of sequences, with attention to host memory by the GPU, over the link, or by the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from longreach.bench.case import Case, Preset
from longreach.bench.check import WrongResult
from longreach.bench.check_method import UNSTEADY, LayerErrors, judge_method
from longreach.bench.decoding import WARM, Decoding, entry_of
from longreach.bench.format import host_line
from longreach.bench.host import check, reads
from longreach.bench.host.cases import DENSE, MAGICPIG, entry_name
from longreach.bench.host.fill import fill_host
from longreach.bench.host.tokens import run_tokens
from longreach.bench.inputs import WIDTHS
from longreach.bench.memory import release
from longreach.bench.methods import method_for
from longreach.bench.targets import judge
from longreach.cache import CacheConfig, HostAttend
from longreach.cache.tiers import STAGING
from longreach.errors import CapacityError, OutOfMemory
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape
from longreach.methods.magicpig import MagicPIG

Way = Literal["link", "cpu"]
Measured = tuple[dict[str, Any], dict[str, Any], dict[str, float]]


class Wanted(NamedTuple):
    """Entries to be measured over one cache. names: who attends -> an entry's name. preset: MagicPIG's, else None."""

    names: dict[Way, str]
    method: str
    preset: Preset | None
    batch: int


def wanted(case: Case) -> Iterator[Wanted]:
    """The entries of a case: every method with the shape's batch, and all but dense attention with the others."""
    assert case.host is not None and case.sampling is not None
    several = bool(case.host.batches)
    for batch in dict.fromkeys((case.shape.batch, *case.host.batches)):
        for method in case.methods:
            presets: tuple[Preset | None, ...] = case.sampling.presets if method == MAGICPIG else (None,)
            if method != DENSE or batch == case.shape.batch:
                for preset in presets:
                    shown = batch if several and method != DENSE else None
                    ways = case.host.ways if method != DENSE else ("link",)
                    names = {way: entry_name(method, preset, shown, way) for way in ways}
                    yield Wanted(names, method, preset, batch)


def run_host(bench: Decoding, case: Case, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a case; the result as a record's part, also given to `save` after each entry.

    An entry that does not fit into host or GPU memory is named under left_out. Raises WrongResult, once all were
    measured, for those whose step is wrong, and OutOfMemory if nothing fits.
    """
    from longreach.adapters.transformers import shape_of

    if case.generated is not None:
        return run_tokens(bench, case)
    assert case.host is not None
    model, seconds = bench.model(case)
    weights, kv = bench.bytes(case, model)
    bench.say(f"{case.name}: {case.shape.context} keys a sequence, {case.host.device_bytes / 2**30:.3g} GiB on the GPU")
    most = check.rounding_error(bench, case, model)
    entries, checks, setup = list[dict[str, Any]](), dict[str, Any](), dict[str, Any]()
    left_out, wrong = dict[str, str](), list[str]()

    def result() -> dict[str, Any]:
        return {
            "shape": asdict(case.shape),
            "model": asdict(case.model) if case.model else None,
            "host": asdict(case.host) if case.host else None,
            "bytes": {"weights": weights, "kv": kv, "how": reads.HOW},
            "seed": bench.seed,
            "check": {"how": check.HOW, "of_logits": most, **checks},
            "left_out": dict(left_out),
            "setup_seconds": {"model": seconds, **setup},
            "timing": {"how": entries[0]["how"] if entries else None, "replays": bench.steps, "warm_up": WARM},
            "baselines": {"versions": {}, "left_out": [], "tried": {}},
            "entries": list(entries),
            "targets": judge(case, entries),
        }

    for one in wanted(case):
        release(bench.device)
        mine = replace(case, shape=replace(case.shape, batch=one.batch))
        left = list(one.names.values())
        try:
            with _method(one, mine, shape_of(model), bench.seed) as method:
                for name, measure in _over_one_cache(bench, mine, model, method, most, one.names):
                    entry, verdict, took = measure()
                    entries.append({**entry, "name": name})
                    checks[name], setup[name] = verdict, took
                    left.remove(name)
                    bench.say(f"  {host_line(entries[-1])}")
                    save(result())
        except (CapacityError, OutOfMemory, torch.OutOfMemoryError) as error:
            for name in left:
                left_out[name] = f"does not fit: {' '.join(str(error).split())[:400]}"
                bench.say(f"  {name}: {left_out[name]}")
        except WrongResult as error:
            wrong.append(str(error))
            bench.say(f"  {left[0]}: {error}")
    if wrong:
        raise WrongResult("; ".join(wrong))
    if not entries:
        raise OutOfMemory(f"{case.name}: nothing fits into memory: {left_out}; measure it on a machine with more")
    return result()


@contextmanager
def _method(one: Wanted, case: Case, model: ModelShape, seed: int) -> Iterator[AttentionMethod | None]:
    """The method, None for dense attention; its plan is on disk within the block."""
    if one.preset is not None:
        yield MagicPIG(**asdict(one.preset))
    else:
        with method_for(one.method, case, model, seed) as method:
            yield method


@torch.no_grad()
def _over_one_cache(
    bench: Decoding, case: Case, model: Any, method: AttentionMethod | None, most: float, names: dict[Way, str]
) -> Iterator[tuple[str, Callable[[], Measured]]]:
    """For each way to attend the entry's name, and a function that measures it before the next one is asked for.

    Nothing of the cache is left afterwards.
    """
    from longreach.adapters.transformers import attach

    shape, tokens, impl = case.shape, case.shape.context, case.impls[0]
    ids = bench.tokens(case, model, tokens + 2)
    with attach(model, decode=method, impl=impl) as session, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* layers? whole at each step")  # which is what is measured
        limit = device_limit(case, tokens + bench.rows, len(session.resident_layers()))
        config = CacheConfig(capacity=tokens + bench.rows, host=True, device_bytes=limit, host_attend="link")
        cache = session.new_cache(shape.batch, config)
        seconds = fill_host(cache, model, session.decode, tokens, bench.seed, impl, bench.now)
        for way, name in names.items():
            cache.decoders.clear()
            cache.drop_columns(cache.columns - tokens)
            cache.kv.attend = HostAttend(way)
            session.impl = impl if way == "link" else "auto"  # who computes then follows from the view
            session.reset_report()
            mine = replace(case, name=f"{case.name}: {name}")
            yield name, partial(_measured, bench, mine, model, session, cache, ids, seconds, most, limit)


@torch.no_grad()
def _measured(
    bench: Decoding, case: Case, model: Any, session: Any, cache: Any, ids: torch.Tensor, seconds: dict[str, float],
    most: float, limit: int,
) -> Measured:  # fmt: skip
    """An entry, how it was checked, and the seconds of setting it up."""
    assert case.model is not None
    decode, shape, way = session.decode, case.shape, cache.kv.attend.by
    layers = LayerErrors(check.keys_of(case.name, cache, decode))
    stepped = bench.filled_step(case, session, cache, ids, seconds, layers)
    report, memory = session.report(), reads.memory_of(cache, model)
    assert stepped.eager is not None
    verdict = judge_method(
        case.name, layers, stepped.eager, stepped.done.logits[:, 0], most, case.model.layers,
        steady=decode.name not in UNSTEADY, uncompiled=stepped.uncompiled,
    )  # fmt: skip
    captured, median = stepped.entries[0], stepped.timing.median
    options = {key: value for key, value in decode.to_json().items() if key != "plan"}  # it was made up and is gone
    captured["settings"] = {**captured["settings"], "method": options, "device_bytes": limit, "attend": way}
    captured["memory"] = {**captured["memory"], **memory}
    more: dict[str, Any] = {
        "batch": shape.batch,
        "tokens_per_second": shape.batch / median,
        **reads.step_bytes(report, decode, cache.kv.memory_use.host_layers, median),
        **reads.sampled_shares(report),
    }
    weights, kv = bench.bytes(case, model)
    entry = entry_of(weights, kv, **captured, error=verdict.error, error_bound=verdict.error_bound, **more)
    return entry, verdict.recorded(), stepped.setup


def device_limit(case: Case, capacity: int, whole: int) -> int:
    """The case's limit on GPU memory for keys, values and staging, raised to what a batch needs.

    capacity: tokens that a sequence has room for. whole: layers that stay in GPU memory as the method reads them whole.
    """
    assert case.host is not None
    shape = case.shape
    layer = 2 * shape.batch * capacity * shape.kv_heads * shape.dim * WIDTHS[shape.dtype]
    return max(case.host.device_bytes, (STAGING + whole) * layer)
