"""Registration with vLLM: backends, the check of an engine's configuration, and the workers' report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longreach.adapters.vllm import versions
from longreach.adapters.vllm.checks import CUDA, check_engine
from longreach.adapters.vllm.settings import KEY, Settings
from longreach.adapters.vllm.wrapping import wrap_once
from longreach.errors import UnknownName

CPU = "longreach.adapters.vllm.cpu.CPUBackend"


def install() -> None:
    """Register everything, once a process. Engines without the key are as they were.

    With a version of vLLM that is not supported, only the check is installed; it refuses engines that have the key.
    """
    _check_engines()
    if versions.supported(versions.found()) is None:
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.worker.worker_base import WorkerBase

    from longreach.adapters.vllm.reporting import report_of_worker

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU)  # the only one that vLLM uses on a CPU
    elif not AttentionBackendEnum.CUSTOM.is_overridden():  # else by another plug-in; `checks` then refuses the key
        register_backend(AttentionBackendEnum.CUSTOM, CUDA)
    WorkerBase.longreach_report = report_of_worker


def _check_engines() -> None:
    """Check each configuration that this process makes for an engine, before a model is loaded."""
    from vllm.engine.arg_utils import EngineArgs

    wrap_once(EngineArgs, "create_engine_config", _checking)


def _checking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
        given = self.additional_config
        if not isinstance(given, dict):
            return plain(self, *args, **options)
        if KEY not in given:
            for key in given:
                if str(key).lower() == KEY:
                    raise UnknownName("key of the additional config", key, (KEY,))
            return plain(self, *args, **options)
        versions.current().prepare_process()
        Settings.read(given[KEY])
        config = plain(self, *args, **options)
        check_engine(config)
        return config

    return create_engine_config
