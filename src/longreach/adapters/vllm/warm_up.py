"""vLLM warms up on GPUs by requests of its own, which run as a user's do. No report counts them."""

from __future__ import annotations

import functools
from typing import Any

from longreach.adapters.vllm.engine import engine_of
from longreach.adapters.vllm.settings import Settings

MARK = "_longreach"  # on what has been wrapped


def install() -> None:
    """Forget what an engine has read when its worker has warmed up. Once a process."""
    from vllm.v1.worker.gpu_worker import Worker

    plain = Worker.compile_or_warm_up_model
    if hasattr(plain, MARK):
        return

    @functools.wraps(plain)
    def compile_or_warm_up_model(self: Any) -> Any:
        found = plain(self)
        if Settings.of(self.vllm_config) is not None:  # else another engine of this process
            engine_of(self.vllm_config).forget_reads()
        return found

    setattr(compile_or_warm_up_model, MARK, True)
    Worker.compile_or_warm_up_model = compile_or_warm_up_model
