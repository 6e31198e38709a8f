"""The most memory that tensors took on the CPU at any time, buffers inside of operators counted."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.profiler import profile


def peak(work: Callable[[], object]) -> int:
    """Bytes beyond what was allocated when the work began."""
    with profile(profile_memory=True) as found:
        work()
    held = most = 0
    assert found.kineto_results is not None
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
