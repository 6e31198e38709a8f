"""attend_sampled by the CPU for rows on a GPU: the sample is found first, the compiled program weighs and attends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.cache.host import allocate
from longreach.errors import HostCallFailed
from longreach.ops.host_calls import HostCalls
from longreach.ops.simhash import NUMBERS, triton_attention
from longreach.ops.simhash.attention import ATTENDING
from tests.ops.attend.kernels import on_cpu
from tests.ops.simhash.cases import Case
from tests.ops.simhash.test_attend import agree, last_rows, most, one_call

pytestmark = on_cpu


def called(case: Case) -> Case:
    return case._replace(kv=replace(case.kv, calls=HostCalls(torch.device("cpu"), allocate)))


def equals_numba(case: Case, limit: torch.Tensor, share: Any, **given: Any) -> None:
    """The four ops' result, and Numba's numbers of what was read."""
    held = called(case)
    assert ATTENDING.choose("auto", torch.device("cpu"), held.rows, held.kv) == "cpu"
    got = agree(held, limit, share, "auto", **given)
    want = one_call(case, limit, share, "numba", **given)
    assert got.lists is None
    for column in NUMBERS:
        assert torch.equal(got.number(column), want.number(column)), column


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("group", [1, 2, 5, 16])  # of 16 heads the last one is the sign of an entry
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter gets bf16 wrong
def test_equals_the_four_ops(share: Any, group: int, page: int | None, dtype: torch.dtype, workers: int) -> None:
    case = last_rows([60, 33, 7, 2], group=group, page=page, dtype=dtype)
    equals_numba(case, most(case), share)


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize(
    "given",
    [{"least": 1}, {"least": 3}, {"floor": 0.3}, {"softcap": 1.5}, {"sink_logit": torch.arange(4.0) - 1}],
    ids=str,
)
def test_terms(share: Any, given: dict[str, Any]) -> None:
    case = last_rows([150, 40])
    equals_numba(case, most(case), share, **given)


@pytest.mark.parametrize("share", ["own", "group"])
def test_lists_in_pieces_and_lists_that_overflow(share: Any, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = triton_attention.Tuning
    monkeypatch.setattr(
        triton_attention, "Tuning", lambda: tuned(room=64, scanned=64, in_turn=2, pieces=32, buckets=32)
    )
    case = last_rows([400, 90])
    equals_numba(case, most(case), share)
    equals_numba(case, torch.tensor([8, 9]), share)


def test_a_sample_of_slots_that_are_not_in_use_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case, search = called(last_rows([60, 33])), triton_attention.search

    def wrong(*given: Any, **options: Any) -> Any:
        found, *rest = search(*given, **options)
        return found + 60, *rest

    monkeypatch.setattr(triton_attention, "search", wrong)
    with pytest.raises(HostCallFailed, match="names slots that are not in use"):
        one_call(case, most(case), "group", "auto")


def test_no_rows() -> None:
    case = called(last_rows([60]))
    none = case._replace(rows=replace(case.rows, q=case.rows.q[:0], seq=case.rows.seq[:0], pos=case.rows.pos[:0]))
    assert one_call(none, most(none), "group", "auto").partial.out.shape == (0, 4, 16)
