"""Which tests the fast tier runs (`make test`), and which are left to the sweeps (`make test-sweeps`).

A test is in the fast tier unless it is marked. `@pytest.mark.sweep`, on a test or on one of its parameters, leaves it
to the sweeps. `@pytest.mark.covering` is for a test with several parameters: the fast tier runs as few combinations as
hold every value of each, the sweeps run all others. `covering("impl")` asks that of these parameters alone,
`covering(method=type)` of what a function makes of a value: one of each class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Covering = pytest.Mark | pytest.MarkDecorator
# tests of files that hold no markers: (file, test) -> what would mark them
_CONTRACT = "tests/methods/test_contract.py"
COVERING: dict[tuple[str, str], pytest.MarkDecorator] = {
    (_CONTRACT, "test_implementations_agree"): pytest.mark.covering(method=type),
    (_CONTRACT, "test_batches_of_a_model"): pytest.mark.covering(method=type),
    (_CONTRACT, "test_everything_is_dense"): pytest.mark.covering,
    (_CONTRACT, "test_sequences_do_not_affect_each_other"): pytest.mark.covering("config", method=type),
    (_CONTRACT, "test_a_slot_forgets"): pytest.mark.covering("config", method=type),
    (_CONTRACT, "test_chunks_make_no_difference"): pytest.mark.covering("config", method=type),
    (_CONTRACT, "test_nothing_stays_behind"): pytest.mark.covering(method=type),
    (_CONTRACT, "test_what_the_report_calls_unread_is_unread"): pytest.mark.covering,
    (_CONTRACT, "test_what_the_report_calls_read_is_read"): pytest.mark.covering("config", method=type),
    (_CONTRACT, "test_bytes_are_those_of_the_slots_read"): pytest.mark.covering,
    (_CONTRACT, "test_a_session_reports_what_its_layers_read"): pytest.mark.covering(method=type),
}


def mark(items: Iterable[pytest.Item]) -> None:
    """Add `sweep` to those that the fast tier leaves out."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if covering(item) is not None and item.get_closest_marker("sweep") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for combinations in tests.values():
        kept = fewest([values_of(item) for item in combinations])
        for number, item in enumerate(combinations):
            if number not in kept:
                item.add_marker(pytest.mark.sweep)


def covering(item: pytest.Item) -> Covering | None:
    """The marker of a test that has parameters."""
    if not hasattr(item, "callspec"):
        return None
    name = getattr(item, "originalname", item.name)
    return item.get_closest_marker("covering") or COVERING.get((item.nodeid.partition("::")[0], name))


def values_of(item: Any) -> frozenset[Any]:
    """What a combination covers: (parameter, its value)."""
    values, marker = item.callspec.params, covering(item)
    assert marker is not None
    keys: dict[str, Callable[[Any], Any]] = {**dict.fromkeys(marker.args, id), **marker.kwargs}
    if unknown := keys.keys() - values.keys():
        raise pytest.UsageError(f"{item.nodeid}: covering names no parameter of it: {', '.join(sorted(unknown))}")
    return frozenset((name, key(values[name])) for name, key in (keys or dict.fromkeys(values, id)).items())


def fewest(combinations: Sequence[frozenset[Any]]) -> set[int]:
    """Numbers of combinations that together hold every value: each time the first of those that add most."""
    left, kept = frozenset[Any]().union(*combinations), set[int]()
    while left:
        best = max(range(len(combinations)), key=lambda n: (len(combinations[n] & left), -n))
        kept.add(best)
        left -= combinations[best]
    return kept


def swept(values: Iterable[Any], fast: int) -> list[Any]:
    """Values of a parameter (tuples: of several), of which the fast tier takes the first `fast`."""
    sets = [pytest.param(*(value if isinstance(value, tuple) else (value,))) for value in values]
    return [*sets[:fast], *(pytest.param(*s.values, marks=pytest.mark.sweep) for s in sets[fast:])]


def families(fast: int) -> list[Any]:
    """Every family of tiny models, of which the fast tier takes the first `fast`, those that differ most."""
    from longreach.testing.tiny import FAMILIES  # which loads transformers

    first = ("gemma2", "gpt_oss", "glm4", "llama")  # soft caps and windows; sinks and experts; half rotated; plain
    return swept([*first, *(name for name in FAMILIES if name not in first)], fast)
