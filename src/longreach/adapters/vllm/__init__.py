"""longreach in vLLM: decode attention by a longreach method, inside vLLM's own engine. See docs/vllm.md.

vLLM loads `register` in each of its processes, through an entry point. An engine attends by longreach only if its
additional config has the key "longreach". Importing this package imports no part of vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register", "report"]


def register() -> None:
    """Make longreach known to vLLM in this process. It may be called any number of times."""
    from longreach.adapters.vllm.plugin import install

    install()


def report(llm: Any) -> Any:
    """The bytes that an engine's layers have read, summed over its ranks: a `longreach.runtime.Report`.

    llm: a `vllm.LLM` whose decode attention is longreach's. It must not be generating meanwhile.
    Raises InvalidInput for anything else.
    """
    from longreach.adapters.vllm.reporting import report as whole

    return whole(llm)
