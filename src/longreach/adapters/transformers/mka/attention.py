"""A family's attention with MKA: keys and values are mixed between its projections and all that follows them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longreach.adapters.transformers.mka.memory import Memory, PassMemory, StepMemory, tokens_of
from longreach.adapters.transformers.rotary import probing
from longreach.adapters.transformers.shard import shard_of
from longreach.adapters.transformers.step import running
from longreach.errors import CalledOutside
from longreach.mka.fast import fuse
from longreach.mka.levels import Levels
from longreach.mka.tokens import Tokens
from longreach.ops import HeadShard

TOKENS = "mka_tokens"  # the keyword by which layers get their Tokens
# the projections' results, for the attention module that is under way
_RESULTS: ContextVar[tuple[nn.Module, dict[str, Tensor]] | None] = ContextVar("longreach_mka_results", default=None)

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


class MemoryAttention(_Base):
    """Mixin of attention modules, before a family's own class. mka: what MKA adds to the layer.

    The projections run once, whatever modules they are by then (LoRA replaces them); the family's forward then finds
    the mixed keys and values in their place. So its norms, rotation, cache and attention stay.
    """

    mka: Levels
    head_dim: int
    num_key_value_groups: int
    scaling: float
    layer_idx: int

    def __getattr__(self, name: str) -> Any:
        found = _RESULTS.get()
        if found is not None and found[0] is self and name in found[1]:
            result = found[1][name]
            return lambda hidden_states: result
        return super().__getattr__(name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.pop(TOKENS, None)
        results: dict[str, Tensor] = {}
        if not probing():
            results = self._mixed(hidden_states, tokens, kwargs.get("past_key_values"))
        token = _RESULTS.set((self, results))
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            _RESULTS.reset(token)

    def _mixed(self, hidden_states: Tensor, tokens: Tokens | None, cache: Any) -> dict[str, Tensor]:
        """Name of a projection -> its result, [B, T, ...], with mixed keys and values."""
        config, number, step = self.mka.config, self.layer_idx, running()
        memory: Memory
        if tokens is not None:
            memory = PassMemory.of(config, number, tokens, cache)
        elif step is not None:
            tokens, memory = tokens_of(step), StepMemory(config, number, step)
        else:
            raise CalledOutside(
                f"{type(self).__name__} was called without the tokens of a pass; call the whole model, or its decoder"
            )
        q, k, v = self._projected(hidden_states)
        q1, k1, v1 = (tokens.rows(x).unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        heads = k1.shape[1]
        shard = shard_of(self, heads) if step is None else step.facts.shard(number, self, heads)
        impl = "auto" if step is None else step.layers.impl
        k, v = (tokens.rectangle(x.flatten(1)) for x in self._fused(q1, k1, v1, tokens, memory, shard, impl))
        if self._one_projection:
            return {"qkv_proj": torch.cat([q, k, v], -1)}
        return {"q_proj": q, "k_proj": k, "v_proj": v}

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, memory: Memory, shard: HeadShard,
               impl: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Mixed keys and values [R, G, D]."""
        with torch.autocast(k.device.type, enabled=False):  # which would round sums that are kept in fp32
            k, v, after, _ = fuse(
                self.mka, q, k, v, tokens.seq, tokens.pos, tokens.counts, memory.before(k), scale=self.scaling,
                shard=shard, impl=impl if impl in ("reference", "triton") else "auto",
            )  # fmt: skip
        memory.after(after)
        return k, v

    @property
    def _one_projection(self) -> bool:
        """Whether one projection makes queries, keys and values (Phi-3)."""
        return "qkv_proj" in self._modules

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads x D], of the modules that are the layer's projections now."""
        names: dict[str, Any] = self._modules
        if not self._one_projection:
            return names["q_proj"](hidden_states), names["k_proj"](hidden_states), names["v_proj"](hidden_states)
        qkv = names["qkv_proj"](hidden_states)
        width = qkv.shape[-1] // (self.num_key_value_groups + 2)
        return qkv.split((self.num_key_value_groups * width, width, width), -1)
