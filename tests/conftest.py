"""Every test process: one thread, no network, fixed seeds."""

from __future__ import annotations

import functools
import gc
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when loaded, here and in processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="longreach-tests-")  # plans that sessions make are kept there

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
