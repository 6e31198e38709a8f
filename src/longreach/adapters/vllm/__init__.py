"""longreach in vLLM: decode attention by a longreach method, inside vLLM's own engine. See docs/vllm.md.

vLLM loads `register` in each of its processes, through an entry point. An engine uses longreach only if its additional
config has the key "longreach". Importing this package imports no part of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longreach.runtime import Report

__all__ = ["register", "report"]


def register() -> None:
    """Register longreach with vLLM in this process. It may be called any number of times."""
    from longreach.adapters.vllm.plugin import install

    install()


def report(llm: Any) -> Report:
    """The bytes that an engine's layers have read, summed over its ranks, as `Session.report` gives them.

    llm: a `vllm.LLM` that decodes by longreach. It must not generate at the same time.
    Raises InvalidInput for anything else.
    """
    from longreach.adapters.vllm.reporting import report as whole

    return whole(llm)
