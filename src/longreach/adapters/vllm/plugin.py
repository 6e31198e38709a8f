"""Registration with vLLM: backends, the check of an engine's configuration, and the workers' report."""

from __future__ import annotations

import functools
from typing import Any

from longreach.adapters.vllm import versions
from longreach.adapters.vllm.checks import CUDA, check_engine
from longreach.adapters.vllm.settings import KEY, Settings
from longreach.errors import UnknownName

CPU = "longreach.adapters.vllm.cpu.CPUBackend"
MARK = "_longreach"  # on what has been wrapped


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

    plain = EngineArgs.create_engine_config
    if hasattr(plain, MARK):
        return

    @functools.wraps(plain)
    def create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
        given = self.additional_config
        if not isinstance(given, dict) or KEY not in given:
            alike = [key for key in given if str(key).lower() == KEY] if isinstance(given, dict) else []
            if alike:
                raise UnknownName("key of the additional config", alike[0], (KEY,))
            return plain(self, *args, **options)
        versions.current().prepare_process()
        Settings.read(given[KEY])
        config = plain(self, *args, **options)
        check_engine(config)
        return config

    setattr(create_engine_config, MARK, True)
    EngineArgs.create_engine_config = create_engine_config
