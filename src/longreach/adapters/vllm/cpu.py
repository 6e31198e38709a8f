"""The backend on a CPU, in the place of vLLM's CPU_ATTN, whose kernels attend for prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from longreach.adapters.vllm.builder import LongreachBuilder
from longreach.adapters.vllm.engine import keys_of, values_of
from longreach.adapters.vllm.impl import LongreachImpl
from longreach.adapters.vllm.rows import BatchRows
from longreach.adapters.vllm.settings import Settings
from longreach.adapters.vllm.step import Metadata
from longreach.ops.append import append


class CPUBackend(CPUAttentionBackend):
    """CPU_ATTN itself for engines without the key."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        asked = Settings.of(get_current_vllm_config()) is not None
        return CPUImpl if asked else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return CPUBuilder


class CPUBuilder(LongreachBuilder, CPUAttentionMetadataBuilder):
    """vLLM's own builder for engines without the key."""

    def __new__(cls, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> Any:
        if Settings.of(vllm_config) is None:
            return CPUAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
        return super().__new__(cls)

    def has_kernels(self) -> bool:
        return self.kv_cache_spec.head_size in CPUAttentionBackend.get_supported_head_sizes()


class CPUImpl(LongreachImpl, CPUAttentionBackendImpl):
    """CPU_ATTN's kernels read a layout of their own, with keys transposed within a page.

    longreach keeps keys and values as rows, which methods read in place. The keys and values of prompts are copied to
    CPU_ATTN's layout in every pass that attends to them. With short chunks of long prompts that takes time.
    """

    kernels = "CPU_ATTN"

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a batch's keys and values [R, G, D] to their slots; rows without one pad the batch."""
        page = kv_cache.shape[2]
        rows = slot_mapping.shape[0]
        key, value, slot = key[:rows], value[:rows], slot_mapping.long()
        if bool((slot < 0).any()):
            some = slot >= 0
            key, value, slot = key[some], value[some], slot[some]
        append(keys_of(kv_cache), values_of(kv_cache), key, value, slot // page, slot % page)

    def attend_prompts(self, layer: Any, query: Tensor, kv_cache: Tensor, metadata: Metadata, output: Tensor) -> None:
        assert metadata.prompt is not None
        copied, table = self._copied(layer, kv_cache, metadata.prompt)
        batch = dataclasses.replace(metadata.batch, block_table=table)
        CPUAttentionBackendImpl.forward(self, layer, query, None, None, copied, batch, output)

    def _copied(self, layer: Any, kv_cache: Tensor, rows: BatchRows) -> tuple[Tensor, Tensor]:
        """The prompts' keys and values in CPU_ATTN's layout, and the block table that finds them."""
        page, lengths = kv_cache.shape[2], rows.seq_lens.long()
        pages = (lengths + page - 1) // page
        first = torch.cumsum(pages, 0) - pages
        table = (first[:, None] + torch.arange(rows.table.shape[1])).clamp(max=int(pages.sum()) - 1)
        seq = torch.repeat_interleave(lengths)
        slot = torch.arange(len(seq)) - (torch.cumsum(lengths, 0) - lengths)[seq]
        held, offset = rows.table[seq, slot // page].long(), slot % page
        copied = kv_cache.new_zeros(int(pages.sum()), *kv_cache.shape[1:])
        k, v = copied.view(*copied.shape[:2], 2 * page, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys_of(kv_cache)[held, :, offset],
            values_of(kv_cache)[held, :, offset],
            k,
            v,
            (first[seq] * page + slot).to(torch.int64),
            self.engine.version.cpu_isa(layer),
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return copied, table.to(rows.table.dtype)
