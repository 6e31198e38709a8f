"""Attention layers in plain torch, one interface for all variants and baselines: for models of one's own, and studies.

Models of transformers are converted instead (`longreach.convert`): their own projections, norms and cache stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from longreach.errors import InvalidInput, UnknownName
from longreach.mka.baselines import BASELINES, LatentKV, MLAConfig, attend_dense, fastest_channels
from longreach.mka.block import Blocks, Reach, block_attention, choose, recalled_keys
from longreach.mka.config import VARIANTS, MKAConfig, is_count
from longreach.mka.fast import FastMemory, fuse
from longreach.mka.full import combine
from longreach.mka.layout import Layout, block_positions
from longreach.mka.levels import Levels
from longreach.mka.session import session
from longreach.mka.tokens import Tokens
from longreach.ops.attend import attend
from longreach.ops.rope import RotaryFrequencies, angles, rotate
from longreach.ops.selection import Span, Spans, absolute, relative
from longreach.ops.types import KVView, Partial, Rows, accumulator, describe, require

KINDS = (*VARIANTS, *BASELINES)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention layer: width of the model, query heads, KV heads, channels of a head, base of RoPE."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("width", "heads", "kv_heads", "dim"):
            require(is_count(getattr(self, name)), f"{name}: expected a count >= 1, got {getattr(self, name)!r}")
        require(self.dim % 8 == 0, f"dim: expected a multiple of 8, got {self.dim}")
        ok = self.heads % self.kv_heads == 0
        require(ok, f"kv_heads: expected a divisor of the {self.heads} query heads, got {self.kv_heads}")

    @property
    def frequencies(self) -> RotaryFrequencies:
        """Of the layer's rotation: all channels, in halves."""
        even = torch.arange(0, self.dim, 2, dtype=torch.float64)
        return RotaryFrequencies(self.theta ** (-even / self.dim), "half")


@dataclass
class LayerState:
    """What a layer keeps between passes over the same sequences: keys and values, and a variant's own memory.

    length: tokens of each sequence so far. Pass a new one (`LayerState()`) with the first tokens.
    """

    length: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    memory: FastMemory | None = None

    def check(self, batch: int, kv_heads: int, dim: int) -> None:
        """Raise InvalidInput where the state holds keys of another shape than [batch, kv_heads, N, dim]."""
        if (k := self.tensors.get("k")) is None:
            return
        found = len(k), k.shape[1], k.shape[3]
        require(
            found == (batch, kv_heads, dim),
            lambda: (
                f"state: expected {batch} sequences, {kv_heads} KV heads and {dim} channels a head, got "
                f"{found[0]}, {found[1]} and {found[2]}; give each batch and layer a LayerState of its own"
            ),
        )

    def extend(self, name: str, new: Tensor) -> Tensor:
        """[B, G, N, D] of all tokens, the new ones [B, G, T, D] last."""
        old = self.tensors.get(name)
        self.tensors[name] = new if old is None else torch.cat([old, new], 2)
        return self.tensors[name]


def attention(kind: str, shape: AttentionShape, *, layer_idx: int = 0, gate: float = 1.0, **options: Any) -> Attention:
    """An attention layer: "fastmka", "mka", "block_mka" (options of MKAConfig; gate: first value of every gate), "mha",
    "gqa", "mqa" (by the shape's KV heads, which "mha" and "mqa" set), "mla" (options of MLAConfig).

    Raises UnknownName and InvalidInput for kinds and options that do not exist or fit.
    """
    if kind in VARIANTS:
        return MemoryAttention(shape, MKAConfig.make(kind, **options), layer_idx, gate)
    if kind not in BASELINES:
        raise UnknownName("attention", kind, KINDS)
    require(gate == 1.0, f"gate: without effect in {kind}; leave it out")
    known = [f.name for f in fields(MLAConfig)] if kind == "mla" else []
    for name in options:
        if name not in known:
            raise UnknownName(f"option of {kind}", name, known)
    if kind == "mla":
        return LatentAttention(shape, MLAConfig(**options), layer_idx)
    heads = {"mha": shape.heads, "mqa": 1}.get(kind, shape.kv_heads)
    return Attention(AttentionShape(shape.width, shape.heads, heads, shape.dim, shape.theta), layer_idx)


class Attention(nn.Module):
    """Causal attention with rotary embedding and grouped KV heads: MHA, GQA, MQA."""

    def __init__(self, shape: AttentionShape, layer_idx: int = 0):
        super().__init__()
        self.shape, self.layer_idx, self.scale = shape, layer_idx, shape.dim**-0.5
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.dim, shape.width, bias=False)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, position_ids: Tensor | None = None,
                state: LayerState | None = None) -> Tensor:  # fmt: skip
        """[B, T, width] -> [B, T, width].

        mask: [B, T], 0 for padding, whose outputs are 0. position_ids: int [1 or B, T], by which tokens are rotated;
        positions that restart at 0 begin another document. state: continues sequences of one length, unpadded and
        unpacked.
        Raises InvalidInput for x of another shape, a mask or position ids together with a state, and a state of other
        sizes.
        """
        ok = x.ndim == 3 and x.shape[1] > 0 and x.shape[2] == self.shape.width
        require(ok, lambda: f"x: expected [B, T >= 1, width={self.shape.width}], got {describe(x)}")
        require(
            state is None or (mask is None and position_ids is None),
            "state: continues unpadded sequences of one length; leave out mask and position_ids",
        )
        batch, length = x.shape[:2]
        if state is not None:
            state.check(batch, self.shape.kv_heads, self.shape.dim)
        past = None
        if state is not None and state.length:
            past = torch.full((batch,), state.length, dtype=torch.int64, device=x.device)
        tokens = Tokens.of((batch, length), x.device, mask=mask, position_ids=position_ids, past=past)
        rows = tokens.rows(x)
        q = self.q_proj(rows).unflatten(-1, (self.shape.heads, self.shape.dim))
        k, v = (y.unflatten(-1, (-1, self.shape.dim)) for y in self._keys_and_values(rows))
        out = self._attend(q, k, v, tokens, state)
        if state is not None:
            state.length += length
        return tokens.rectangle(self.o_proj(out.to(x.dtype).flatten(1)))

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_proj(rows), self.v_proj(rows)

    def _turn(self, x: Tensor, pos: Tensor) -> Tensor:
        frequencies = self.shape.frequencies
        cos, sin = angles(pos, frequencies.inv_freq.to(x.device))
        return rotate(x, cos[:, None], sin[:, None], layout=frequencies.layout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: LayerState | None) -> Tensor:
        """[R, H, D] of queries [R, H, D], keys and values [R, G, D] before rotation."""
        pos = tokens.rotary_pos
        return self._dense(self._turn(q, pos), self._turn(k, pos), v, tokens, state)

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: LayerState | None, name: str = ""
    ) -> Tensor:
        """Causal attention over all tokens. name: of these keys, where a layer keeps several."""
        if tokens.rectangular:
            batch = tokens.shape[0]
            q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
            if state is not None:
                k, v = state.extend("k" + name, k), state.extend("v" + name, v)
            return attend_dense(q, k, v, self.scale).transpose(1, 2).flatten(0, 1)
        layout = Layout.of(tokens, 1)
        assert layout.start is not None
        span = Spans((Span(absolute(layout.start[:, None]), relative(1)),))
        return attend(layout.rows(q), layout.view(k, v), span, scale=self.scale).out


class LatentAttention(Attention):
    """MLA in its training form: keys and values of all heads are expanded from the latent, and kept expanded."""

    def __init__(self, shape: AttentionShape, config: MLAConfig, layer_idx: int = 0):
        super().__init__(shape, layer_idx)
        rank, rotated = config.sizes(shape.kv_heads, shape.dim, shape.dim)
        self.rotated = rotated
        self.kv_proj = LatentKV(
            shape.width, shape.kv_heads, shape.dim, rank, fastest_channels(shape.dim, rotated, "half")
        )
        del self.k_proj, self.v_proj

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.kv_proj(rows)
        return k, v

    def _turn(self, x: Tensor, pos: Tensor) -> Tensor:
        frequencies = self.shape.frequencies.inv_freq.to(x.device).clone()
        frequencies[self.rotated // 2 :] = 0.0  # pairs in the latent do not turn
        cos, sin = angles(pos, frequencies)
        return rotate(x, cos[:, None], sin[:, None])


class MemoryAttention(Attention):
    """FastMKA, MKA or Block-MKA, with its own projections.

    The state keeps keys, values, and the session level's carry. Codes and summaries of blocks are computed from the
    keys in each pass; `longreach.generate` on a converted model keeps them.
    """

    def __init__(self, shape: AttentionShape, config: MKAConfig, layer_idx: int = 0, gate: float = 1.0):
        super().__init__(shape, layer_idx)
        if config.share:
            raise InvalidInput("share: a layer alone shares no blocks with others; leave it out")
        if config.layers is not None:
            raise InvalidInput("layers: without effect in a layer alone; leave it out")
        config.check_head_dim(shape.dim)
        self.config = config
        self.mka = Levels(config, layer_idx, shape.heads, shape.kv_heads, shape.dim, gate)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: LayerState | None) -> Tensor:
        config, pos = self.config, tokens.pos
        if config.variant != "block_mka":
            memory = self._memory(tokens, state, q)
        if config.variant == "fastmka":
            k, v, memory, _ = fuse(self.mka, q, k, v, tokens.seq, pos, tokens.counts, memory, scale=self.scale)
            if state is not None:
                state.memory = memory
            return super()._attend(q, k, v, tokens, state)
        turn = tokens.rotary_pos
        turned = self._turn(q, turn)
        rows, kv, start, first = self._memory_of_keys(turned, self._turn(k, turn), v, tokens, state)
        reach = Reach.of(rows.pos, start, config)
        weights = self.mka.router(q, reach.has_blocks)
        frequencies = RotaryFrequencies(self.shape.frequencies.inv_freq.to(q.device), "half")
        code = self.mka.code(frequencies) if 3 in config.tiers else None
        summaries = config.variant == "block_mka" and 2 in config.tiers
        blocks = Blocks.of(kv, first, code, frequencies, config.block, summaries=summaries)
        recalled = None
        if code is not None:
            recalled = choose(rows, turn, self.shape.kv_heads, blocks, reach, code, config, self.scale)
        if config.variant == "block_mka":
            return block_attention(rows, kv, reach, blocks, recalled, weights, config, self.scale).out
        outs = [self._level(rows, kv, start)]
        if 2 in config.tiers:
            assert memory.carry is not None
            k2, v2, carry = session(k, v, self.mka.rate(), tokens.seq, pos, memory.carry)
            rows2, kv2, _, _ = self._memory_of_keys(turned, self._turn(k2, turn), v2, tokens, state, "2")
            outs.append(self._level(rows2, kv2, start))
            if state is not None:
                state.memory = FastMemory(carry, memory.sums)
        if recalled is not None:
            outs.append(attend(*recalled_keys(rows, kv, recalled, config.block), scale=self.scale))
        return combine(outs, weights, config.mode)

    def _level(self, rows: Rows, kv: KVView, start: Tensor | None) -> Partial:
        """Attention to all keys of a level so far. In mode "softmaxes" lse may be 0: nothing needs it."""
        if self.config.mode == "softmaxes" and start is None:  # torch's exact kernels, which give no lse
            q = rows.q.unflatten(0, (kv.sequences, -1)).transpose(1, 2)
            out = attend_dense(q, kv.k, kv.v, self.scale).transpose(1, 2).flatten(0, 1).to(accumulator(q.dtype))
            return Partial(out, out.new_zeros(out.shape[:2]))
        dense = Spans.dense() if start is None else Spans((Span(absolute(start[:, None]), relative(1)),))
        return attend(rows, kv, dense, scale=self.scale)

    def _memory(self, tokens: Tokens, state: LayerState | None, q: Tensor) -> FastMemory:
        """The memory before the pass, with room for the blocks that it touches."""
        units = -(-tokens.longest // self.config.block)
        sizes = tokens.sequences, units, self.shape.kv_heads, self.shape.dim
        fresh = FastMemory.empty(self.config, *sizes, q.dtype, q.device)
        if state is None or state.memory is None:
            return fresh
        old = state.memory.sums
        if old is None or fresh.sums is None:
            return state.memory
        return FastMemory(state.memory.carry, torch.cat([old, fresh.sums[:, old.shape[1] :]], 1))

    def _memory_of_keys(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, state: LayerState | None, name: str = ""
    ) -> tuple[Rows, KVView, Tensor | None, Tensor]:
        """Rows, keys and values, the slot where each row's sequence starts (None: 0), the blocks' first positions."""
        layout = Layout.of(tokens, self.config.block) if tokens.fresh else None
        if layout is not None and state is None:
            return layout.rows(q), layout.view(k, v), layout.start, layout.first
        k, v = (x.unflatten(0, tokens.shape).transpose(1, 2) for x in (k, v))
        if state is not None:
            k, v = state.extend("k" + name, k), state.extend("v" + name, v)
        lens = torch.full((k.shape[0],), k.shape[2], dtype=torch.int64, device=k.device)
        first = block_positions(len(k), k.shape[2], self.config.block, tokens.first_position, k.device)
        return Rows(q, tokens.seq, tokens.pos), KVView(k, v, lens), None, first
