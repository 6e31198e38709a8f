"""vLLM 0.32."""

from __future__ import annotations

from typing import Any


def cpu_isa(layer: Any) -> str:
    """The metadata builder sets it on the layer."""
    return str(layer.isa)


def forget_caches() -> dict[str, None]:
    return dict.fromkeys(("_num_computed_tokens_cache", "_token_to_req_indices_cache"))
