"""A family's attention with MKA: keys and values are mixed between its projections and all that follows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers.cache_name import CACHE, renamed
from longreach.adapters.transformers.mka.attached import SessionLevels
from longreach.adapters.transformers.mka.levels import PASS, QUERIES, SHARD, LevelsPass
from longreach.adapters.transformers.mka.memory import Memory, PassMemory, StepMemory, check_positions, tokens_of
from longreach.adapters.transformers.mka.projections import GivenProjections
from longreach.adapters.transformers.rotary import probing
from longreach.adapters.transformers.shard import shard_of
from longreach.adapters.transformers.step import Step, running
from longreach.errors import CalledOutside
from longreach.mka.fast import FastMemory, fuse
from longreach.mka.levels import Levels
from longreach.mka.session import session
from longreach.mka.tokens import Tokens
from longreach.ops import HeadShard

TOKENS = "mka_tokens"  # the keyword by which layers get their Tokens


class MemoryAttention(GivenProjections):
    """Mixin of attention modules, before a family's own class. mka: what MKA adds to the layer.

    The projections run once, also where LoRA has replaced them; the family's forward then finds
    other keys and values in their place, those that `fastmka` has mixed or those of two levels as further heads. So its
    norms, rotation and cache stay. Its attention stays in `fastmka`; else it is `levels_attention`.
    """

    mka: Levels
    head_dim: int
    num_key_value_groups: int
    scaling: float
    layer_idx: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens, p = kwargs.pop(TOKENS, None), kwargs.pop(PASS, None)
        if probing():
            return super().forward(hidden_states, *args, **kwargs)
        results, more = self._results(hidden_states, tokens, p, renamed(kwargs).get(CACHE), kwargs.get("position_ids"))
        wider = self.mka.config.caches_level_2 and self._one_projection
        with self.given(results), _twice(self) if wider else nullcontext():
            return super().forward(hidden_states, *args, **kwargs, **more)

    def _results(
        self, hidden_states: Tensor, tokens: Tokens | None, p: LevelsPass | None, cache: Any, position_ids: Any
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Name of a projection -> its result, [B, T, ...]; keywords for the attention function."""
        config, number, step = self.mka.config, self.layer_idx, running()
        memory: Memory
        if tokens is not None:
            memory = PassMemory.of(config, number, tokens, cache)
        elif step is not None:
            tokens, memory = tokens_of(step), StepMemory(config, number, step)
            if config.unrotates:
                check_positions(step, position_ids)
        else:
            raise CalledOutside(
                f"{type(self).__name__} was called without the tokens of a pass; call the whole model, or its decoder"
            )
        q, k, v = self._projected(hidden_states)
        q1, k1, v1 = (tokens.rows(x).unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        heads = k1.shape[1]
        shard = shard_of(self, heads) if step is None else step.facts.shard(number, self, heads)
        impl = "auto" if step is None else step.layers.impl
        more: dict[str, Any] = {}
        if config.variant != "fastmka":
            more = {PASS: p, QUERIES: q1, SHARD: shard}
        if config.variant == "fastmka" or config.caches_level_2:
            k1, v1 = self._fused(q1, k1, v1, tokens, memory, shard, impl)
            k, v = (tokens.rectangle(x.flatten(1)) for x in (k1, v1))
        elif step is None:  # counts the tokens
            memory.after(memory.before(k1))
        if self._one_projection:
            return {"qkv_proj": torch.cat([q, k, v], -1)}, more
        return {"q_proj": q, "k_proj": k, "v_proj": v}, more

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, memory: Memory, shard: HeadShard,
               impl: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Mixed keys and values [R, G, D]; in `mka` those of levels 1 and 2 [R, 2 G, D]."""
        impl = impl if impl in ("reference", "triton") else "auto"
        with torch.autocast(k.device.type, enabled=False):  # which would round sums that are kept in fp32
            before = memory.before(k)
            if self.mka.config.variant == "fastmka":
                k, v, after, _ = fuse(
                    self.mka, q, k, v, tokens.seq, tokens.pos, tokens.counts, before, scale=self.scaling, shard=shard,
                    impl=impl,
                )  # fmt: skip
            else:
                assert before.carry is not None
                decay = self.mka.rate(shard.first, shard.count)
                k2, v2, carry = session(k, v, decay, tokens.seq, tokens.pos, before.carry, impl=impl)
                k, v, after = torch.cat([k, k2], 1), torch.cat([v, v2], 1), FastMemory(carry, before.sums)
        memory.after(after)
        return k, v

    def session_attention(self, step: Step, kwargs: dict[str, Any]) -> SessionLevels | None:
        """The levels of this layer in a pass of a session, else None (`fastmka`). Their keywords leave kwargs."""
        raw, shard, _ = (kwargs.pop(name, None) for name in (QUERIES, SHARD, PASS))
        return None if raw is None else SessionLevels(self.mka, self.layer_idx, step, raw, shard)

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


@contextmanager
def _twice(module: Any) -> Iterator[None]:
    """Within, a module whose forward counts KV heads finds those of two levels."""
    heads = module.num_key_value_heads
    module.num_key_value_heads = 2 * heads
    try:
        yield
    finally:
        module.num_key_value_heads = heads
