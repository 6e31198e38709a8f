"""Who computes: names are resolved by one rule, and what is slow says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from longreach.errors import UnknownName
from longreach.ops import KVView, Rows, simhash
from longreach.ops import impl as module
from longreach.ops.attend import IMPLEMENTATIONS
from longreach.ops.impl import Implementations, _warn_slow
from longreach.ops.pooled_scores import IMPLEMENTATIONS as pooled

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    _warn_slow.cache_clear()
    yield
    _warn_slow.cache_clear()


@pytest.mark.parametrize("op", [IMPLEMENTATIONS, pooled])
def test_the_reference_is_always_there(op: Implementations) -> None:
    assert "reference" in op.names()
    assert op.choose("reference", CPU) == "reference"
    assert op.choose("auto", CPU) in op.names()
    assert callable(op.get("auto", CPU))


def test_numba_takes_few_rows_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 8 rows for each sequence of a view, all together: above, matrix products serve them better."""
    monkeypatch.setattr(module, "_installed", lambda package: True)
    for sequences in (1, 3):
        for count, name in ((8 * sequences, "numba"), (8 * sequences + 1, "reference")):
            kv = KVView(*torch.zeros(2, sequences, 2, 40, 16), torch.full((sequences,), 40))
            seq = torch.arange(count).clamp(max=sequences - 1)  # most rows are of one sequence
            rows = Rows(torch.zeros(count, 4, 16), seq, torch.arange(count))
            assert IMPLEMENTATIONS.choose("auto", CPU, rows, kv) == name
            assert simhash.CODES.implementations.choose("auto", CPU, rows, kv) == "numba"  # as fast for any number


@pytest.mark.parametrize("op", [IMPLEMENTATIONS, pooled])
def test_an_unknown_name_lists_the_known_ones(op: Implementations) -> None:
    with pytest.raises(UnknownName, match=f"unknown impl of {op.op} 'fast'; known: auto, reference"):
        op.choose("fast", CPU)


def test_the_reference_off_the_cpu_warns_once() -> None:
    with pytest.warns(UserWarning, match="attend runs its reference implementation on cuda: exact, but slow"):
        assert IMPLEMENTATIONS.choose("reference", CUDA) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IMPLEMENTATIONS.choose("reference", CUDA)
        IMPLEMENTATIONS.choose("reference", CPU)
    with pytest.warns(UserWarning, match="pooled_scores"):
        pooled.choose("reference", CUDA)


def test_an_implementation_is_imported_when_it_is_first_asked_for() -> None:
    op = Implementations("op", {"reference": "math:sqrt", "missing": "longreach.ops.nowhere:f"})
    assert op.get("reference", CPU)(9.0) == 3.0
    assert op.choose("missing", CPU) == "missing"
    with pytest.raises(ModuleNotFoundError):
        op.get("missing", CPU)
