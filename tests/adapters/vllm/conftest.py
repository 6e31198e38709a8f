"""Tests of longreach in vLLM. Those that need vLLM are skipped where it is not installed (`make test-vllm`)."""

from __future__ import annotations

import importlib.util
import os

import pytest

# read by vLLM when it is loaded: an engine in the test's own process, 1 GiB of cache, one thread
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

HERE = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `vllm` without vLLM."""
    for item in items:
        if item.get_closest_marker("vllm") is not None and not HERE:
            item.add_marker(pytest.mark.skip(reason="needs vLLM (make test-vllm)"))
