"""The fast tier leaves out repetitions, never a value."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.tiers import COVERING, fewest

pytest_plugins = ["pytester"]


def test_few_combinations_hold_every_value() -> None:
    product = [frozenset(enumerate(values)) for values in itertools.product(range(3), range(5), range(2))]
    kept = fewest(product)
    assert len(kept) == 5 and set().union(*(product[n] for n in kept)) == set().union(*product)
    assert fewest([]) == set() and fewest(product[:1]) == {0}


def test_what_marks_select(pytester: Any) -> None:
    pytester.makeconftest(
        "from tests.tiers import mark\n"
        "import pytest\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'sweep'), config.addinivalue_line('markers', 'covering')\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark(items)\n"
    )
    pytester.makepyfile("""
        import pytest
        @pytest.mark.covering
        @pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.sweep)])
        @pytest.mark.parametrize("b", "xyz")
        def test_both(a, b): pass
        @pytest.mark.covering("a")
        @pytest.mark.parametrize("a", [1, 2])
        @pytest.mark.parametrize("b", "xyz")
        def test_one(a, b): pass
        @pytest.mark.covering(a=type)
        @pytest.mark.parametrize("a", [1, 2, "x", 3, "y"])
        def test_kinds(a): pass
        @pytest.mark.sweep
        def test_none(): pass
        @pytest.mark.parametrize("a", [1, 2])
        def test_all(a): pass
    """)
    run = pytester.runpytest("-q", "--collect-only", "-m", "not sweep")
    assert [line for line in run.outlines if "::" in line] == [
        "test_what_marks_select.py::" + name
        for name in (
            "test_both[x-1]",
            "test_both[y-2]",
            "test_both[z-1]",
            "test_one[x-1]",
            "test_one[x-2]",
            "test_kinds[1]",
            "test_kinds[x]",
            "test_all[1]",
            "test_all[2]",
        )
    ]
    assert pytester.runpytest("-q", "-m", "sweep").parseoutcomes()["passed"] == 6 + 4 + 3 + 1


def test_a_name_that_is_no_parameter_is_an_error(pytester: Any) -> None:
    pytester.makeconftest("from tests.tiers import mark\ndef pytest_collection_modifyitems(items): mark(items)\n")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.covering('b')\n@pytest.mark.parametrize('a', [1])\ndef test(a): pass"
    )
    run = pytester.runpytest("-q")
    assert run.ret == pytest.ExitCode.USAGE_ERROR and "covering names no parameter of it: b" in "".join(
        run.errlines + run.outlines
    )


def test_the_table_names_tests_that_exist(pytestconfig: pytest.Config) -> None:
    for file, name in COVERING:
        assert f"def {name}(" in (pytestconfig.rootpath / file).read_text(), (
            f"{file}::{name} is gone; mend tests/tiers.py"
        )
