"""The supported versions of vLLM. Each has one file, with everything that differs between versions."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from longreach.errors import Unsupported

FILES = {"0.26": "longreach.adapters.vllm.versions.v0_26", "0.32": "longreach.adapters.vllm.versions.v0_32"}


class Version(Protocol):
    """The names that a version's file defines."""

    def prepare_process(self) -> None:
        """Called before an engine with longreach starts. It may be called again."""

    def cpu_isa(self, layer: Any) -> str:
        """The instruction set whose cache layout CPU_ATTN uses for an attention layer."""

    def forget_caches(self) -> dict[str, None]:
        """Cached fields of CommonAttentionMetadata, set to None in a copy for some of its requests."""


def found() -> str:
    """The version of vLLM in this environment, as "0.32.0"."""
    import vllm

    return str(vllm.__version__)


def supported(version: str) -> str | None:
    """The name in FILES of a version; None if it is not supported."""
    name = ".".join(version.split(".")[:2])
    return name if name in FILES else None


def check() -> None:
    """Raise Unsupported for a version of vLLM that is not supported."""
    version = found()
    if supported(version) is None:
        raise Unsupported(
            f"vLLM {version}: longreach works with vLLM {' and '.join(FILES)}; install one of them, or leave the key "
            f"'longreach' out of the additional config"
        )


def current() -> Version:
    """The file of the installed version. Raises Unsupported if there is none."""
    check()
    name = supported(found())
    assert name is not None
    return import_module(FILES[name])  # type: ignore[return-value]
