"""The backend on CUDA GPUs: `--attention-backend CUSTOM`. FlashAttention's kernels attend for prompts."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from longreach.adapters.vllm.builder import LongreachBuilder
from longreach.adapters.vllm.impl import LongreachImpl
from longreach.adapters.vllm.settings import EXAMPLE, Settings
from longreach.errors import InvalidInput

KV_DTYPES = ("auto", "float16", "bfloat16")


class FlashBackend(FlashAttentionBackend):
    """FlashAttention's cache and layout. vLLM checks by the methods below whether the backend fits a model."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        if Settings.of(get_current_vllm_config()) is None:
            raise InvalidInput(
                f"--attention-backend CUSTOM is longreach's, and the additional config has no key 'longreach': add "
                f"--additional-config '{EXAMPLE}', or name another backend"
            )
        return FlashImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return FlashBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, *KV_DTYPES)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


class FlashBuilder(LongreachBuilder, FlashAttentionMetadataBuilder):
    """Full CUDA graphs are of decoding rows, which FlashAttention does not attend for."""


class FlashImpl(LongreachImpl, FlashAttentionImpl):
    """Keys and values are written by FlashAttention's own kernel."""

    kernels = "FLASH_ATTN"
    supports_dcp = False
    supports_quant_query_input = False
