"""Attention of one layer: prompt rows by vLLM's own kernels, decoding rows by the method."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longreach.adapters.vllm import requests, warm_up
from longreach.adapters.vllm.engine import engine_of, keys_of, values_of
from longreach.adapters.vllm.rows import BatchRows
from longreach.adapters.vllm.step import Metadata
from longreach.errors import Unsupported
from longreach.methods.call import LayerCall
from longreach.ops import KVView, RotaryAngles, Rows
from longreach.runtime import Pass, attend_layer, note_attended


class LongreachImpl:
    """Mixed in before a class of vLLM's, whose kernels attend for prompts. kernels: their name, for reports."""

    kernels: str

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        from vllm.config import get_current_vllm_config

        if attn_type != "decoder":
            raise Unsupported(f"longreach in vLLM attends in decoders only, and this layer is of type {attn_type!r}")
        if alibi_slopes is not None:
            raise Unsupported("longreach in vLLM has no ALiBi; use a model with rotary embeddings")
        if kv_sharing_target_layer_name is not None:
            raise Unsupported(
                f"this layer shares the keys of {kv_sharing_target_layer_name}; longreach in vLLM needs keys in each"
            )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, sinks,
        )  # type: ignore[call-arg]  # fmt: skip
        self.engine = engine_of(get_current_vllm_config())
        if self.engine.method.keeps == "sequences":
            requests.install()
        if self.engine.device.type == "cuda":
            warm_up.install()
        self.window, self.softcap, self.sink_logit = sliding_window, logits_soft_cap or None, sinks
        self.scale = float(scale)
        self.number: int | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of a batch to `output` [R, H, D]. The batch's keys are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("longreach in vLLM does not quantise its output; leave fused output quantisation off")
        if attn_metadata is None:  # vLLM measures the memory of a pass
            self.engine.reservation.take(query.device)
            return output.fill_(0)
        number, step = self._number(layer), attn_metadata.step
        kv = keys_of(kv_cache), values_of(kv_cache)
        if attn_metadata.prompt is not None:
            self._read_prompts(layer, query, kv_cache, attn_metadata, attn_metadata.prompt, output)
        if attn_metadata.decode is not None:
            rows = attn_metadata.decode
            call = self._call(step.decode, number, rows, rows.of(query), *kv)
            rows.put(output, attend_layer(step.decode, call, window=self.window).partial.out)
        if number == len(self.engine.layers) - 1:
            self.engine.finish(step)
        return output

    def _read_prompts(
        self, layer: Any, query: Tensor, kv_cache: Tensor, metadata: Metadata, rows: BatchRows, output: Tensor
    ) -> None:
        some, p = rows.of(query), metadata.step.prompt
        call = self._call(p, self._number(layer), rows, some, keys_of(kv_cache), values_of(kv_cache))
        if metadata.batch is None:
            rows.put(output, attend_layer(p, call, window=self.window).partial.out)
            return
        if isinstance(rows.rows, slice):
            self.attend_prompts(layer, some, kv_cache, metadata, output[rows.rows])
        else:
            found = some.new_empty(some.shape)
            self.attend_prompts(layer, some, kv_cache, metadata, found)
            rows.put(output, found)
        note_attended(p, call, self.kernels, window=self.window)

    def attend_prompts(self, layer: Any, query: Tensor, kv_cache: Tensor, metadata: Metadata, output: Tensor) -> None:
        """Attend for prompt rows [R, H, D] by vLLM's kernels."""
        super().forward(layer, query, None, None, kv_cache, metadata.batch, output)  # type: ignore[misc]

    def _call(self, p: Pass, number: int, rows: BatchRows, query: Tensor, k: Tensor, v: Tensor) -> LayerCall:
        engine = self.engine
        rotation = engine.rotations.get(number)

        def rotary() -> RotaryAngles:
            assert rotation is not None
            key = ("angles", id(rotation.table), id(rows.pos))
            if key not in p.shared:
                p.shared[key] = rotation.angles(rows.pos)
            found: RotaryAngles = p.shared[key]
            return found

        return p.call(
            number, Rows(query, rows.seq, rows.pos, rows.runs), KVView(k, v, rows.seq_lens, rows.table), rows.slots,
            self.scale, softcap=self.softcap, sink_logit=self.sink_logit, shard=engine.shard,
            rotary=None if rotation is None else rotary,
        )  # fmt: skip

    def _number(self, layer: Any) -> int:
        if self.number is None:
            from vllm.model_executor.models.utils import extract_layer_index

            self.number = extract_layer_index(layer.layer_name)
        return self.number
