"""vLLM warms up on GPUs by requests of its own, which run as a user's do. No report counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longreach.adapters.vllm.engine import engine_of
from longreach.adapters.vllm.settings import Settings
from longreach.adapters.vllm.wrapping import wrap_once


def install() -> None:
    """Let workers forget what they read to warm up. Once a process."""
    from vllm.v1.worker.gpu_worker import Worker

    wrap_once(Worker, "compile_or_warm_up_model", _forgetting)


def _forgetting(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def compile_or_warm_up_model(self: Any) -> Any:
        result = plain(self)
        if Settings.of(self.vllm_config) is not None:  # else it is an engine without longreach in the same process
            engine_of(self.vllm_config).forget_reads()
        return result

    return compile_or_warm_up_model
