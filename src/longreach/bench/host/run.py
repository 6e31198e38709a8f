"""Run a case of the group "host": one captured step of a model whose keys and values lie in host memory.

Each method has a cache of its own, as layers that it reads whole stay in GPU memory first; MagicPIG's presets share
one. Caches take their host memory from one pool, also those of the next case. An entry is one method's captured step
with one number of sequences, with attention to host memory by the GPU, over the link, or by the CPU.

Entries over one cache read the same keys, as a step writes only slots after the context. Before each entry the cache
is cut to the context, which cuts MagicPIG's tables to the same end; for another preset they are dropped and built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch

from longreach.bench.case import Case, Preset
from longreach.bench.check import WrongResult
from longreach.bench.check_method import UNSTEADY, LayerErrors, judge_method
from longreach.bench.decoding import ENOUGH, LEAST, SLOW, SLOW_REPLAYS, WARM, Decoding, entry_of
from longreach.bench.filled import note_filled
from longreach.bench.format import host_line, show_seconds
from longreach.bench.host import check, reads
from longreach.bench.host.cases import DENSE, MAGICPIG, entry_name
from longreach.bench.host.fill import fill_host
from longreach.bench.host.prompts import run_prompts
from longreach.bench.host.tokens import run_tokens
from longreach.bench.inputs import WIDTHS
from longreach.bench.memory import release
from longreach.bench.methods import method_for
from longreach.bench.targets import judge
from longreach.cache import CacheConfig, HostAttend
from longreach.cache.host_pool import HostPool
from longreach.cache.tiers import STAGING
from longreach.errors import CapacityError, OutOfMemory
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape
from longreach.methods.magicpig import MagicPIG

Way = Literal["link", "cpu"]
REPLAYS = (
    f"as many as take {ENOUGH:g} s, at least {LEAST}; {SLOW_REPLAYS} of a step that takes longer than {SLOW * 1e3:g} ms"
)
Measured = tuple[dict[str, Any], dict[str, Any], dict[str, float]]


class Wanted(NamedTuple):
    """Entries of a method with its options. names: who attends -> an entry's name. preset: MagicPIG's, else None."""

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
    if case.host.prompt:
        return run_prompts(bench, case, device_limit(case, case.shape.context + bench.rows, 0))
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
            "timing": {"how": entries[0]["how"] if entries else None, "replays": REPLAYS, "warm_up": WARM // 2},
            "baselines": {"versions": {}, "left_out": [], "tried": {}},
            "entries": list(entries),
            "targets": judge(case, entries),
        }

    pool = bench.shared.setdefault("host memory", HostPool(bench.device))
    for (_, batch), group in groupby(wanted(case), lambda one: (one.method, one.batch)):
        over_one = list(group)
        release(bench.device)
        mine = replace(case, shape=replace(case.shape, batch=batch))
        left = [name for one in over_one for name in one.names.values()]
        try:
            with ExitStack() as methods:
                each = [(methods.enter_context(_method(one, mine, shape_of(model), bench.seed)), one.names)
                        for one in over_one]  # fmt: skip
                for name, measure in _over_one_cache(bench, mine, model, each, pool, most):
                    try:
                        entry, verdict, took = measure()
                    except WrongResult as error:
                        wrong.append(str(error))
                        left.remove(name)
                        bench.say(f"  {name}: {error}")
                        continue
                    left.remove(name)
                    entries.append({**entry, "name": name})
                    checks[name], setup[name] = verdict, took
                    bench.say(f"  {host_line(entries[-1])}")
                    show_seconds(name, took)
                    save(result())
        except (CapacityError, OutOfMemory, torch.OutOfMemoryError) as error:
            for name in left:
                left_out[name] = f"does not fit: {' '.join(str(error).split())[:400]}"
                bench.say(f"  {name}: {left_out[name]}")
        finally:
            pool.reclaim()
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
    bench: Decoding, case: Case, model: Any, methods: Sequence[tuple[AttentionMethod | None, dict[Way, str]]],
    pool: HostPool, most: float,
) -> Iterator[tuple[str, Callable[[], Measured]]]:  # fmt: skip
    """For each method and way to attend the entry's name, and a function that measures it before the next is requested.

    The methods read the same layers whole. Nothing of the cache is left afterwards.
    """
    from longreach.adapters.transformers import attach, shape_of

    shape, tokens, impl = case.shape, case.shape.context, case.impls[0]
    ids, cache, limit = bench.tokens(case, model, tokens + 2), None, 0
    for method, names in methods:
        with attach(model, decode=method, impl=impl) as session, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* layers? whole at each step")  # which is what is measured
            decode, whole = session.decode, session.resident_layers()
            if cache is None:
                limit = device_limit(case, tokens + bench.rows, len(whole))
                config = CacheConfig(capacity=tokens + bench.rows, host=True, device_bytes=limit, host_attend="link")
                cache, before = session.new_cache(shape.batch, config), pool.seconds
                cache.kv.use_pool(pool)
                seconds = fill_host(cache, model, decode, tokens, bench.seed, impl, bench.now)
                allocated = pool.seconds - before
                seconds = {"allocate": allocated, **seconds, "fill": seconds["fill"] - allocated}
            else:
                assert cache.resident == whole
                cache.owner = session
                _restore(cache, tokens, "link")
                started = bench.now()
                note_filled(cache, decode, shape_of(model), impl)
                seconds = {"allocate": 0.0, "fill": 0.0, "state": bench.now() - started}
            for way, name in names.items():
                _restore(cache, tokens, way)
                session.impl = impl if way == "link" else "auto"  # who computes then follows from the view
                session.reset_report()
                mine = replace(case, name=f"{case.name}: {name}")
                yield name, partial(_measured, bench, mine, model, session, cache, ids, seconds, most, limit)
                seconds = dict.fromkeys(seconds, 0.0)
            cache.decoders.clear()  # whose graphs read the tables
            cache.states.drop(decode)
            release(bench.device)


def _restore(cache: Any, tokens: int, way: Way) -> None:
    """Cut a cache, and the state of methods, to what they held before any step; steps are captured again."""
    cache.decoders.clear()
    cache.drop_columns(cache.columns - tokens)
    cache.kv.attend = HostAttend(way)


@torch.no_grad()
def _measured(
    bench: Decoding, case: Case, model: Any, session: Any, cache: Any, ids: torch.Tensor, seconds: dict[str, float],
    most: float, limit: int,
) -> Measured:  # fmt: skip
    """An entry, how it was checked, and the seconds of setting it up."""
    assert case.model is not None
    decode, shape, way = session.decode, case.shape, cache.kv.attend.by
    layers = LayerErrors(check.keys_of(case.name, cache, decode))
    stepped = bench.filled_step(case, session, cache, ids, seconds, layers, loop=False)
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
