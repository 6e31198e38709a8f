"""Refusal, by name and before weights are loaded, of engines with features that longreach does not support."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.vllm.memory import Needs
from longreach.adapters.vllm.settings import Settings
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.model_config import shape_of_config
from longreach.ops import HeadShard, KVView, Rows
from longreach.runtime.state import check_blocks

logger = logging.getLogger("vllm.longreach")  # a child of vLLM's, so that it is shown as vLLM's are
PLAIN_CACHES = ("auto", "float16", "bfloat16")
CUDA = "longreach.adapters.vllm.cuda.FlashBackend"  # registered as CUSTOM


def shape_of(config: Any) -> ModelShape:
    """The shape of an engine's model. config: a VllmConfig."""
    return shape_of_config(config.model_config.hf_text_config)


def check_engine(config: Any) -> None:
    """Raise Unsupported, InvalidInput or UnknownName for an engine that has the key and cannot use longreach."""
    settings = Settings.of(config)
    assert settings is not None
    refused = next(_refusals(config), None)
    if refused is not None:
        raise Unsupported(f"longreach in vLLM does not work with {refused}")
    _check_backend(config)
    shape = shape_of(config)
    if shape.by_layer:
        raise Unsupported(
            "longreach in vLLM does not work with heads that differ by layer (as in Gemma-4); use longreach.generate"
        )
    settings.decode.check(shape)
    _check_ranks(config, shape)
    _check_requests(config, settings)
    if config.cache_config.block_size is not None:  # else the worker chooses pages, and checks them
        _check_state(config, settings.decode, shape)
        _tell_memory(config, settings.decode, shape)


def _check_state(config: Any, method: AttentionMethod, shape: ModelShape) -> None:
    """Raise Unsupported for pages that do not fit the method, or a head map that crosses ranks."""
    ranks = config.parallel_config.tensor_parallel_size
    shard = HeadShard(0, shape.kv_heads // ranks, shape.kv_heads)
    page, dtype = config.cache_config.block_size, config.model_config.dtype
    with contextlib.suppress(InvalidInput):  # a layer outside a plan has a window: the worker knows which have
        check_pages(method, shape, page, dtype, range(shape.layers), shard)


def _tell_memory(config: Any, method: AttentionMethod, shape: ModelShape) -> None:
    """Write the memory that the method takes to vLLM's log."""
    needs = Needs.of_engine(config, method, shape)
    logger.info(
        "longreach decodes by %s. For max_num_seqs=%d requests of max_model_len=%d tokens it takes %.2f GiB of a GPU, "
        "%.2f GiB more while a layer attends, and %.0f%% as much again as keys and values",
        method.name, config.scheduler_config.max_num_seqs, config.model_config.max_model_len,
        (needs.sequences + needs.captured) / 2**30, needs.workspace / 2**30, 100 * needs.page / needs.keys,
    )  # fmt: skip


def bare_call(layer: int, k: Tensor, shape: ModelShape, shard: HeadShard | None) -> LayerCall:
    """A call without rows over keys [P, G, page, D] of this rank, of which a method makes its state."""
    none = torch.empty(0, dtype=torch.int64, device=k.device)
    group = shape.query_heads // shape.kv_heads
    rows = Rows(k.new_empty(0, k.shape[1] * group, k.shape[3]), none, none)
    kv = KVView(k, k, none, torch.empty(0, 1, dtype=torch.int32, device=k.device))
    return LayerCall(layer, rows, kv, none, 1.0, shard=shard, model=shape)


def check_pages(
    method: AttentionMethod, shape: ModelShape, page: int, dtype: torch.dtype, layers: Iterable[int],
    shard: HeadShard | None,
) -> None:  # fmt: skip
    """Raise Unsupported if the method's blocks of keys do not divide pages of `page` slots, or its plan needs what
    another rank chooses."""
    own = shard or HeadShard.whole(shape.kv_heads)
    for layer in layers:
        k = torch.empty(1, own.count, page, shape.head_dim, dtype=dtype, device="meta")
        call = bare_call(layer, k, shape, shard)
        state = method.new_state(call, 1)
        try:
            check_blocks(method, state, call.kv)
        except Unsupported as error:
            raise Unsupported(f"{error}. In vLLM --block-size sets the slots of a page") from error


def _refusals(config: Any) -> Iterator[str]:
    """Features of the engine that are not supported, and the way out."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    if model.use_mla:
        yield "multi-head latent attention (MLA); use another model"
    if model.is_encoder_decoder:
        yield "encoder-decoder models, which attend across; use a decoder-only model"
    if model.is_hybrid or model.is_attention_free:
        yield "models that have recurrent layers; use longreach.generate for them"
    if model.is_mm_prefix_lm:
        yield "models that attend to images in both directions; use another model"
    if model.rswa_window is not None:
        yield "reference sliding-window attention; use another model"
    if model.runner_type != "generate":
        yield f"runner={model.runner_type}, which decodes nothing; leave the key 'longreach' out"
    if config.speculative_config is not None:
        yield "speculative decoding, whose steps have several rows a sequence; leave speculative_config out"
    if config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        yield (
            "KV connectors and KV offloading: other engines would take keys of a sparse method for exact ones; "
            "leave kv_transfer_config and kv_offloading_size out"
        )
    if getattr(model.hf_text_config, "attention_chunk_size", None):
        yield "attention within chunks (as in Llama-4); use another model"
    if cache.cache_dtype not in PLAIN_CACHES:
        yield f"a quantised KV cache (kv_cache_dtype={cache.cache_dtype}); use one of {', '.join(PLAIN_CACHES)}"
    elif cache.cache_dtype != "auto" and getattr(torch, cache.cache_dtype) != model.dtype:
        yield (
            f"keys in another dtype than the model's (kv_cache_dtype={cache.cache_dtype}, dtype={model.dtype}); leave "
            f"kv_cache_dtype out"
        )
    if cache.prefix_match_unit not in (None, cache.block_size):
        yield (
            f"cached prefixes that end within a page (prefix_match_unit={cache.prefix_match_unit}): vLLM copies such "
            f"pages without the state of a method; leave prefix_match_unit out"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism; leave decode_context_parallel_size and prefill_context_parallel_size out"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism, as layers choose keys for layers of other ranks; use tensor_parallel_size"
    if parallel.use_ubatching:
        yield "micro-batches; leave enable_dbo and ubatch_size out"
    if config.attention_config.backend_per_kind:
        yield "a backend for each kind of layer; leave attention_config.backend_per_kind out"


def _check_backend(config: Any) -> None:
    """Raise where vLLM would attend by another backend than longreach's."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return  # vLLM attends by CPU_ATTN there, which longreach has replaced
    if not current_platform.is_cuda():
        raise Unsupported(f"longreach in vLLM runs on CPUs and CUDA GPUs, and this is {current_platform.device_name}")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = config.attention_config.backend
    name = getattr(backend, "name", backend)
    if name != "CUSTOM":
        raise InvalidInput(
            f"additional config: the key 'longreach' needs --attention-backend CUSTOM, and it is "
            f"{name or 'not given'}: add --attention-backend CUSTOM, or leave the key out"
        )
    path = AttentionBackendEnum.CUSTOM.get_path()
    if path != CUDA:
        raise InvalidInput(
            f"--attention-backend CUSTOM is {path}, of another plug-in: name the plug-ins to load in VLLM_PLUGINS, "
            f"with longreach and without that one"
        )


def _check_ranks(config: Any, shape: ModelShape) -> None:
    ranks = config.parallel_config.tensor_parallel_size
    if shape.kv_heads % ranks:
        raise Unsupported(
            f"tensor_parallel_size={ranks}: longreach needs as many KV heads on each rank, and the model has "
            f"{shape.kv_heads}; use a divisor of {shape.kv_heads}"
        )


def _check_requests(config: Any, settings: Settings) -> None:
    """Raise for a method that keeps state of sequences where requests have no stable index."""
    if settings.decode.keeps == "sequences" and not config.use_v2_model_runner:
        raise Unsupported(
            f"decode={settings.decode.name}: it keeps state of each sequence, and vLLM's model runner V1, which this "
            f"engine uses, gives requests no stable index; use model runner V2 (on a GPU), or another method"
        )
