"""vLLM 0.32."""

from __future__ import annotations

import functools
import sys
from typing import Any


def prepare_process() -> None:
    """Let an engine start on a CPU in a process that has loaded Numba, as longreach does when it attends there.

    vLLM 0.32 reads the attributes of every object in every module then, and fails at llvmlite's handle of its library.
    """
    from vllm.triton_utils import dispatcher

    plain = dispatcher._rebind_kernels
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def rebind(overrides: Any) -> None:
        held = {name: sys.modules.pop(name) for name in tuple(sys.modules) if name.partition(".")[0] == "llvmlite"}
        try:
            plain(overrides)
        finally:
            sys.modules.update(held)

    dispatcher._rebind_kernels = rebind


def cpu_isa(layer: Any) -> str:
    """The metadata builder sets it on the layer."""
    return str(layer.isa)


def forget_caches() -> dict[str, None]:
    return dict.fromkeys(("_num_computed_tokens_cache", "_token_to_req_indices_cache"))
