"""Who computes attention to layers in host memory: `CacheConfig(host_attend="auto")`, by measurement."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.decoder import WARM, Decoder
from longreach.adapters.transformers.loop.sampling import Ends
from longreach.cache import HostAttend
from longreach.errors import Unsupported
from longreach.ops.impl import has_numba
from longreach.runtime import Ledger

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session

STEPS = 5  # captured steps that are timed each way
NEEDED = WARM + 1 + STEPS


def choose_host_attend(
    session: Session, cache: LongreachCache, room: int, tokens: Tensor, make: Callable[[], Decoder], *, captured: bool
) -> None:
    """Set `cache.kv.attend` for the session's decode method, once for each method and cache.

    room: tokens to come. tokens: int64 [B] on the device, the next ones. make: the step for the cache as it is. Both
    steps are captured and run a few times, then rolled back and not counted.
    """
    kv = cache.kv
    if kv.config.host_attend != "auto" or kv.device.type != "cuda" or not kv.in_host:
        return
    chosen = cache.attends.get(session.decode)
    if chosen is None:
        why = _not_measured(session, room, captured)
        chosen = HostAttend(why=why) if why is not None else _measured(session, cache, tokens, make)
        if why is None:
            cache.attends[session.decode] = chosen
    kv.attend = chosen


def _not_measured(session: Session, room: int, captured: bool) -> str | None:
    """Why the two ways cannot be compared; None if they can."""
    if not captured:
        return "not measured, as the step is not captured"
    if session.impl != "auto":
        return f"not measured, as impl={session.impl!r} was asked for"
    if not has_numba():
        return "not measured, as Numba is not installed"
    if room < NEEDED:
        return f"not measured, as that takes {NEEDED} tokens, and {room} were asked for"
    return None


def _measured(session: Session, cache: LongreachCache, tokens: Tensor, make: Callable[[], Decoder]) -> HostAttend:
    """Both steps are dropped afterwards: they count into a ledger of their own, which ends here."""
    milliseconds = dict[str, float]()
    decoders, cache.decoders = cache.decoders, {}
    ledger, session.ledger = session.ledger, Ledger()
    try:
        for way in (HostAttend("link"), HostAttend("cpu")):
            cache.kv.attend = way
            try:
                with cache.rollback():
                    milliseconds[way.by] = _milliseconds(make(), tokens)
            except Unsupported as error:
                if way.by == "link":
                    raise
                return HostAttend(why=f"the CPU cannot: {error}")
    finally:
        session.ledger = ledger
        cache.kv.attend = HostAttend()
        cache.decoders = decoders
    link, cpu = milliseconds["link"], milliseconds["cpu"]
    return HostAttend("cpu" if cpu < link else "link", link_ms=link, cpu_ms=cpu)


def _milliseconds(decoder: Decoder, tokens: Tensor) -> float:
    """The median time of a captured step."""
    marks: list[Any] = []
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
    return median(a.elapsed_time(b) for a, b in pairwise(marks))
