from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.methods.planned import planned, write_plans
from tests.poison import nan_memory


@pytest.fixture(autouse=True)
def _nan_memory() -> Iterator[None]:
    with nan_memory():
        yield


@pytest.fixture(scope="session")
def plans_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where plans for the models of these tests lie."""
    return write_plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(autouse=True)
def _planned(plans_of_tests: Path) -> Iterator[None]:
    with planned(plans_of_tests):
        yield
