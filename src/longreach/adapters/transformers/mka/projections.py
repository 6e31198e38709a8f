"""Attention modules whose projections' results are given: the family's own forward finds them in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

# the projections' results, for the attention module that is under way
_RESULTS: ContextVar[tuple[nn.Module, Mapping[str, Tensor]] | None] = ContextVar("longreach_mka_results", default=None)

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


class GivenProjections(_Base):
    """Mixin of attention modules, before a family's own class."""

    def __getattr__(self, name: str) -> Any:
        found = _RESULTS.get()
        if found is not None and found[0] is self and name in found[1]:
            result = found[1][name]
            return lambda hidden_states: result
        return super().__getattr__(name)

    @contextmanager
    def given(self, results: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, the projections named in `results` give these, whatever they are called with."""
        token = _RESULTS.set((self, results))
        try:
            yield
        finally:
            _RESULTS.reset(token)
