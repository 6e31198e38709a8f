"""What options mean, from docstrings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from longreach.methods.base import Configured
from longreach.methods.explain import explained, options_of, summary
from longreach.methods.registry import EVICTIONS, FUSIONS, METHODS, eviction_class, fusion_class, method_class

KINDS: list[Any] = [*map(method_class, METHODS), *map(fusion_class, FUSIONS), *map(eviction_class, EVICTIONS)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_option_of_every_method_is_explained(kind: Any) -> None:
    assert [*explained(kind)] == [*kind.options()]
    assert all(text and text[-1] in ".)" for text in explained(kind).values())


def test_what_counts_as_an_explanation() -> None:
    @dataclass(frozen=True)
    class Some(Configured):
        """What it does.

        Note: this explains nothing, and neither does other: it.

        size: a count
            of rows.
        first, last: rows.

        More about size: nothing.
        """

        size: int = 1
        first: int = 2
        last: int = 3
        other: int = 4

        name = "some"

    assert summary(Some) == "What it does."
    assert explained(Some) == {"size": "a count of rows.", "first": "rows.", "last": "rows."}
    assert options_of(Some)[0] == {"name": "size", "default": 1, "meaning": "a count of rows."}
    assert options_of(Some)[3]["meaning"] == ""
