"""The backend for GPUs, as far as it can be tested without one: that it fits vLLM's classes, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longreach.errors import InvalidInput, Unsupported
from tests.adapters.vllm.test_refusals import configure

pytestmark = pytest.mark.vllm


def test_the_classes_are_whole() -> None:
    """Every abstract method of vLLM's is there, and the mixed-in methods come before FlashAttention's."""
    from longreach.adapters.vllm.builder import LongreachBuilder
    from longreach.adapters.vllm.cuda import FlashBackend, FlashBuilder, FlashImpl
    from longreach.adapters.vllm.impl import LongreachImpl

    assert FlashBackend.get_name() == "CUSTOM" and FlashBackend.get_builder_cls() is FlashBuilder
    for made in (FlashBackend, FlashBuilder, FlashImpl):
        assert not made.__abstractmethods__
    assert FlashImpl.forward is LongreachImpl.forward and FlashBuilder.build is LongreachBuilder.build
    assert not FlashBuilder.supports_update_block_table and FlashBuilder.reorder_batch_threshold == 1
    assert FlashImpl.do_kv_cache_update.__qualname__.startswith("FlashAttentionImpl")


def test_what_vllm_asks_the_backend() -> None:
    from longreach.adapters.vllm.cuda import FlashBackend

    assert FlashBackend.supports_kv_cache_dtype("auto") and not FlashBackend.supports_kv_cache_dtype("fp8")
    assert FlashBackend.supports_attn_type("decoder") and not FlashBackend.supports_attn_type("encoder_only")
    assert not FlashBackend.supports_mm_prefix() and not FlashBackend.supports_kv_connector()


def test_batches_of_one_row_replay_graphs() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from longreach.adapters.vllm.cuda import FlashBuilder

    config = configure({"decode": "dense"})
    assert FlashBuilder.get_cudagraph_support(config, None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_the_backend_without_the_key() -> None:
    from vllm.config import set_current_vllm_config

    from longreach.adapters.vllm.cuda import FlashBackend, FlashImpl

    config = configure({"decode": "dense"})
    with set_current_vllm_config(config):
        assert FlashBackend.get_impl_cls() is FlashImpl
    config.additional_config = {}
    with (
        set_current_vllm_config(config),
        pytest.raises(InvalidInput, match="CUSTOM is longreach's, and the additional"),
    ):
        FlashBackend.get_impl_cls()


@pytest.mark.parametrize(
    ("cuda", "backend", "error"),
    [
        (True, None, InvalidInput),
        (True, "FLASH_ATTN", InvalidInput),
        (True, "CUSTOM", None),
        (False, None, Unsupported),
    ],
)
def test_the_key_without_the_backend(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, backend: str | None, error: type[Exception] | None
) -> None:
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from longreach.adapters.vllm.checks import CUDA, check_engine

    config = configure({"decode": "dense"})
    config.attention_config.backend = None if backend is None else AttentionBackendEnum[backend]
    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM, CUDA)
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: cuda, device_name="xpu")
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    if error is None:
        check_engine(config)
        monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM, "other.Backend")
        with pytest.raises(InvalidInput, match=r"CUSTOM is other\.Backend, of another plug-in"):
            check_engine(config)
        return
    with pytest.raises(error, match="add --attention-backend CUSTOM" if cuda else "runs on CPUs and CUDA GPUs"):
        check_engine(config)


def test_requests_are_told_apart_by_a_model_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of engines that decode by MAC get a ModelState of ours, which vLLM asks them for; others do not."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from longreach.adapters.vllm import requests

    def plain(config: Any, model: Any, cache: Any, device: Any) -> Any:
        return model.get_model_state_cls() if hasattr(model, "get_model_state_cls") else DefaultModelState

    monkeypatch.setattr(model_runner, "init_model_state", plain)
    requests.install()
    requests.install()
    found = [
        model_runner.init_model_state(SimpleNamespace(additional_config=given), SimpleNamespace(), None, None)
        for given in ({"longreach": {"decode": "mac"}}, {"longreach": {"decode": "quest"}}, {})
    ]
    assert issubclass(found[0], (requests.RequestSlots,)) and issubclass(found[0], DefaultModelState)
    assert found[1:] == [DefaultModelState, DefaultModelState]
