from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.poison import nan_memory


@pytest.fixture(autouse=True)
def _nan_memory() -> Iterator[None]:
    with nan_memory():
        yield
