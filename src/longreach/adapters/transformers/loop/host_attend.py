"""Who computes attention to layers in host memory: `CacheConfig(host_attend="auto")`, by measurement."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.decoder import WARM, Capture, Decoder
from longreach.adapters.transformers.loop.sampling import Ends
from longreach.cache import HostAttend, KVCache
from longreach.errors import HostCallFailed, Unsupported
from longreach.ops.impl import has_numba
from longreach.runtime import Ledger

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session

STEPS = 5  # captured steps that are timed each way
NEEDED = WARM + 1 + STEPS
LEAST = 64  # tokens of an answer for which a measurement pays: it takes 2 x NEEDED steps and two captures


@contextmanager
def host_attend(
    session: Session, cache: LongreachCache, new: int, tokens: Tensor, make: Callable[[], Decoder], *,
    capture: Capture | None,
) -> Iterator[None]:  # fmt: skip
    """Within this block `cache.kv.attend` is the way chosen for the session's decode method; then it is as before.

    new: tokens of the answer. tokens: int64 [B] on the device, the next ones. make: the step for the cache as it is.
    capture: how it is captured. With `CacheConfig(host_attend="auto")` both ways are captured, run a few times, rolled
    back and not counted. The choice is kept for the cache, the method, the kind of capture, and sequences of similar
    length. If the block raises HostCallFailed, the cache's choices of the CPU are dropped: the next answer measures
    again.
    """
    kv = cache.kv
    if not _to_be_chosen(kv):
        yield
        return
    before = kv.attend
    kv.attend = _chosen(session, cache, new, tokens, make, capture)
    try:
        yield
    except HostCallFailed:
        cache.attends = {key: way for key, way in cache.attends.items() if way.by != "cpu"}
        raise
    finally:
        kv.attend = before


def _to_be_chosen(kv: KVCache) -> bool:
    return kv.config.host_attend == "auto" and kv.device.type == "cuda" and bool(kv.in_host)


def _chosen(
    session: Session, cache: LongreachCache, new: int, tokens: Tensor, make: Callable[[], Decoder],
    capture: Capture | None,
) -> HostAttend:  # fmt: skip
    why = _link_only(session, capture)
    if why is not None:
        return HostAttend(why=why)
    key: Hashable = (session.decode, capture, max(cache.kv.lengths).bit_length())
    if key in cache.attends:
        return cache.attends[key]
    if new < LEAST:
        return HostAttend(why=f"not measured for answers below {LEAST} tokens, and max_new_tokens is {new}")
    cache.attends[key] = _measured(session, cache, tokens, make)
    return cache.attends[key]


def _link_only(session: Session, capture: Capture | None) -> str | None:
    """Why only the link can be used; None if the CPU can be too."""
    if capture is None:
        return "not measured, as the step is not captured"
    if session.impl != "auto":
        return f"not measured, as impl={session.impl!r} was asked for"
    if not has_numba():
        return "not measured, as Numba is not installed"
    return None


def _measured(session: Session, cache: LongreachCache, tokens: Tensor, make: Callable[[], Decoder]) -> HostAttend:
    """The faster way, or the link if the CPU raises an error, which a warning names. Errors of the link are raised.

    Each step is dropped before the next is made. They count into ledgers of their own, and call no hook.
    """
    milliseconds = dict[str, float]()
    kept, ledger, hook = cache.decoders, session.ledger, session.on_layer
    session.on_layer = None
    try:
        for way in (HostAttend("link"), HostAttend("cpu")):
            cache.kv.attend, cache.decoders, session.ledger = way, {}, Ledger()
            why, invalid = None, cache.invalid
            with cache.rollback():  # whose own errors end the answer
                try:
                    milliseconds[way.by] = _milliseconds(make(), tokens)
                except Exception as error:  # a broken Numba raises errors of many types, and the link serves without it
                    if way.by == "link":
                        raise
                    why = f"the CPU cannot: {type(error).__name__}: {error}"
                    if not isinstance(error, Unsupported):
                        warnings.warn(f"keys in host memory are read over the link; {why}", stacklevel=2)
            if why is not None:
                cache.kv.calls.clear()
                cache.invalid = invalid  # the failed step could not be undone alone, but was rolled back
                return HostAttend(why=why)
    finally:
        session.ledger, session.on_layer = ledger, hook
        cache.kv.attend, cache.decoders = HostAttend(), kept
    link, cpu = milliseconds["link"], milliseconds["cpu"]
    return HostAttend("cpu" if cpu < link else "link", link_ms=link, cpu_ms=cpu)


def _milliseconds(decoder: Decoder, tokens: Tensor) -> float:
    """The median time of a captured step."""
    marks: list[Any] = []
    try:
        with decoder.run(Ends((), 0), NEEDED):
            decoder.take(tokens)
            for number in range(NEEDED):
                if number >= NEEDED - STEPS:
                    marks.append(torch.cuda.Event(enable_timing=True))
                    marks[-1].record()
                decoder.step(capture=True)
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            torch.cuda.synchronize(decoder.token.device)
    finally:
        decoder.graph = decoder.logits = decoder._recorded = None  # its memory goes before another graph is captured
    return median(a.elapsed_time(b) for a, b in pairwise(marks))
