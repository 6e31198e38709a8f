"""Every test process: one thread, no network, fixed seeds."""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when loaded, here and in processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests import interpreter, tiers

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels then run in Python, on the CPU
    interpreter.make_faster()

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_kept_plans(monkeypatch: pytest.MonkeyPatch, _caches: Iterator[str]) -> None:
    """Each test has a cache folder of its own for plans that sessions make."""
    monkeypatch.setenv("XDG_CACHE_HOME", next(_caches))


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Folders, which are not made yet."""
    base = tmp_path_factory.mktemp("caches")
    return (str(base / str(number)) for number in itertools.count())


@pytest.fixture(scope="session", autouse=True)
def _invented_once() -> None:
    """Invented people are made once for all tests: a hundred tests ask for them, and they take half a second."""
    from longreach.tasks.ruler import invented

    invented.questions = functools.cache(invented.questions)


def pytest_collection_finish() -> None:
    """Later garbage collections pass over the modules that are loaded by now, a million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)
