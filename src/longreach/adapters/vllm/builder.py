"""Metadata of one KV cache group, made on the host before each step."""

from __future__ import annotations

from typing import Any

import torch

from longreach.adapters.vllm.engine import engine_of
from longreach.adapters.vllm.rows import DecodeBuffers, of_requests, prompt_rows
from longreach.adapters.vllm.settings import Settings
from longreach.adapters.vllm.splitting import split
from longreach.adapters.vllm.step import Metadata


class LongreachBuilder:
    """Mixed in before a class of vLLM's, which makes the metadata of its own kernels for prompts."""

    supports_update_block_table = False
    reorder_batch_threshold = 1  # vLLM then puts decoding requests first, so that both kinds are ranges

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.engine = engine = engine_of(vllm_config)
        engine.new_cache()
        engine.find_layers()
        engine.check_pages(kv_cache_spec.block_size, kv_cache_spec.dtype)
        self.buffers = DecodeBuffers(engine.max_requests, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Batches in which each request has one row replay full CUDA graphs; others run piecewise."""
        from vllm.v1.attention.backend import AttentionCGSupport

        if Settings.of(vllm_config) is None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def use_cascade_attention(self, *args: Any, **options: Any) -> bool:
        """No: vLLM 0.26 may otherwise attend to a prefix that requests share in a pass of its own."""
        return False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        batch, engine = common_attn_metadata, self.engine
        engine.allocate()
        some = split(batch, whole=engine.graphs)
        slots = engine.slots_of(batch.num_reqs)
        decode = prompt = own = None
        if len(some.decode):
            decode = self.buffers.fill(batch, some, slots, engine.padded(len(some.decode)))
        if len(some.prompt):
            prompt = prompt_rows(batch, some, slots)
            if self.has_kernels():
                alone = of_requests(batch, some, engine.version.forget_caches())
                own = super().build(0, alone, fast_build)  # type: ignore[misc]
        step = engine.step(
            self, counted=not some.dummy, rows=batch.num_reqs if some.uniform else 0,
            padding=decode.padding if decode is not None else None,
        )  # fmt: skip
        return Metadata(step, decode, prompt, own)

    def has_kernels(self) -> bool:
        """Whether vLLM's kernels can attend for prompts of these layers; longreach's do otherwise."""
        return True

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        return self.build(0, common_attn_metadata)
