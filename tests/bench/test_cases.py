"""Cases say which of our implementations compete."""

from __future__ import annotations

import pytest

from longreach.bench.case import Case
from longreach.bench.cases import CASES
from longreach.ops.attend.api import IMPLEMENTATIONS

PREFILL = [case for case in CASES.values() if case.group == "prefill"]


@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.name)
def test_prefill_is_measured_by_every_implementation_that_can(case: Case) -> None:
    assert set(case.impls) == set(IMPLEMENTATIONS.names()) - {"reference", "numba", "sdpa_cpu"}


def test_by_another_implementation_a_case_has_another_name_and_no_targets() -> None:
    case = CASES["dense-128k-b1"].by("reference")
    assert (case.name, case.impls, case.targets) == ("dense-128k-b1 impl=reference", ("reference",), ())
