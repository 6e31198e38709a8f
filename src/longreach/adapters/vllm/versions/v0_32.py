"""vLLM 0.32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from longreach.adapters.vllm.wrapping import wrap_once


def prepare_process() -> None:
    """Let an engine start on a CPU in a process that has loaded Numba, as longreach does when it attends there.

    vLLM 0.32 reads the attributes of every object in every module then, and fails at llvmlite's handle of its library.
    """
    from vllm.triton_utils import dispatcher

    wrap_once(dispatcher, "_rebind_kernels", _without_llvmlite)


def _without_llvmlite(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    def rebind(overrides: Any) -> None:
        held = {name: sys.modules.pop(name) for name in tuple(sys.modules) if name.partition(".")[0] == "llvmlite"}
        try:
            plain(overrides)
        finally:
            sys.modules.update(held)

    return rebind


def cpu_isa(layer: Any) -> str:
    """The metadata builder sets it on the layer."""
    return str(layer.isa)


def forget_caches() -> dict[str, None]:
    return dict.fromkeys(("_num_computed_tokens_cache", "_token_to_req_indices_cache"))
