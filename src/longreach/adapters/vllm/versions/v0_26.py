"""vLLM 0.26."""

from __future__ import annotations

from typing import Any


def prepare_process() -> None:
    """Nothing has to be done before an engine starts."""


def cpu_isa(layer: Any) -> str:
    """The layer's implementation chooses it when it is made."""
    return str(layer.impl.isa)


def forget_caches() -> dict[str, None]:
    return dict.fromkeys(
        ("_seq_lens_cpu", "_num_computed_tokens_cpu", "_num_computed_tokens_cache", "_token_to_req_indices_cache")
    )
