"""Attention of MKA and Block-MKA in a layer of plain transformers, in the place of the family's attention function."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longreach.adapters.transformers.attach import ATTENTION
from longreach.mka.block import Blocks, Reach, Recalled, block_attention, choose, recalled_keys
from longreach.mka.config import MKAConfig
from longreach.mka.full import combine, weighted_sum
from longreach.mka.layout import Layout, block_positions
from longreach.mka.tokens import Tokens
from longreach.ops import HeadShard, Partial, Span, Spans, absolute, relative
from longreach.ops.attend import attend
from longreach.ops.rope import RotaryFrequencies
from longreach.ops.types import KVView, Rows

NAME = "longreach_mka"  # of the attention function
PASS, QUERIES, SHARD = "mka_pass", "mka_queries", "mka_shard"  # its keywords


@dataclass
class LevelsPass:
    """One pass of a model, for all of its layers.

    real: bool [B, N], which columns of the cache and of the pass are tokens; None if all are. frequencies: of the
    model's rotation. recalled: layer -> the blocks that it has recalled, for layers that share them.
    """

    tokens: Tokens
    real: Tensor | None
    frequencies: RotaryFrequencies | None
    recalled: dict[int, Recalled] = field(default_factory=dict)


def register_attention() -> None:
    """Let transformers find the function by its name. May be called again."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, levels_attention)


def levels_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one converted layer: [B, T, H, D].

    query [B, H, T, D], key and value [B, G, N, D] after rotation; in `mka` with level 2, 2 G heads: those of level 1,
    then those of level 2. Keywords: the LevelsPass, and queries before rotation [R, H, D].
    """
    p: LevelsPass = kwargs.pop(PASS)
    raw, shard = kwargs.pop(QUERIES), kwargs.pop(SHARD)
    config: MKAConfig = module.mka.config
    if torch.is_autocast_enabled(query.device.type):  # rotation leaves queries and keys wider than values
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    heads = key.shape[1] // (2 if config.caches_level_2 else 1)
    with torch.autocast(query.device.type, enabled=False):
        layer = _Layer(module, p, raw, shard, query, key[:, :heads], value[:, :heads])
        if config.variant == "block_mka":
            return p.tokens.rectangle(layer.block_attention()).to(query.dtype), None
        if config.mode == "gated":
            sets = [layer.dense(key[:, :heads], value[:, :heads])]
            if 2 in config.tiers:
                sets.append(layer.dense(key[:, heads:], value[:, heads:]))
            out = combine([*sets, *layer.recalled_part()], layer.weights, config.mode)
            return p.tokens.rectangle(out).to(query.dtype), None
    own = family_attention(module)
    outs = [own(module, query, key[:, :heads], value[:, :heads], attention_mask, **kwargs)[0]]
    if 2 in config.tiers:
        outs.append(own(module, query, key[:, heads:], value[:, heads:], attention_mask, **kwargs)[0])
    with torch.autocast(query.device.type, enabled=False):
        outs += [p.tokens.rectangle(one.out) for one in layer.recalled_part()]
        weights = p.tokens.rectangle(layer.weights)
        if p.tokens.real is not None:  # rows of padding are what the family makes of them
            start = weights.new_tensor(config.start)
            weights = torch.where(p.tokens.real[..., None], weights, start)
        out = weighted_sum([x.flatten(0, 1) for x in outs], weights.flatten(0, 1))
        return out.unflatten(0, p.tokens.shape).to(query.dtype), None


def family_attention(module: Any) -> Callable[..., Any]:
    """The attention function of the model that a converted layer belongs to."""
    name = module.family_config._attn_implementation
    eager = getattr(sys.modules[type(module).own.__module__], "eager_attention_forward")  # noqa: B009
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)  # type: ignore[no-any-return]


def give_attention(module: Any) -> None:
    """Let a converted layer call `levels_attention`, unless a longreach session takes its place."""
    module.family_config = module.config
    module.config = copy.copy(module.config)
    setattr(module.config, ATTENTION, NAME)


def take_attention(module: Any) -> None:
    """Undo `give_attention`."""
    module.config = module.__dict__.pop("family_config", module.config)


class _Layer:
    """One layer of a pass: rows, keys and values of level 1, and the levels' weights."""

    def __init__(self, module: Any, p: LevelsPass, raw: Tensor, shard: HeadShard, query: Tensor, k: Tensor, v: Tensor):
        self.levels, self.config, self.p = module.mka, module.mka.config, p
        self.scale, self.number, self.heads = float(module.scaling), int(module.layer_idx), k.shape[1]
        self.q, self.shard = p.tokens.rows(query.transpose(1, 2)), shard
        self.rows, self.kv, self.start, self.first = self._memory(k, v)
        self.reach = Reach.of(self.rows.pos, self.start, self.config)
        self.weights = self.levels.router(raw, self.reach.has_blocks, shard)
        self.blocks, self.recalled = self._recall()

    def block_attention(self) -> Tensor:
        """[R, H, D]."""
        return block_attention(
            self.rows, self.kv, self.reach, self.blocks, self.recalled, self.weights, self.config, self.scale
        ).out

    def recalled_part(self) -> list[Partial]:
        """Level 3's result, if it is in use."""
        if self.recalled is None:
            return []
        return [attend(*recalled_keys(self.rows, self.kv, self.recalled, self.config.block), scale=self.scale)]

    def dense(self, k: Tensor, v: Tensor) -> Partial:
        """Attention to all keys so far, of memory like level 1's."""
        rows, kv, start, _ = self._memory(k, v)
        span = Spans.dense() if start is None else Spans((Span(absolute(start[:, None]), relative(1)),))
        return attend(rows, kv, span, scale=self.scale)

    def _memory(self, k: Tensor, v: Tensor) -> tuple[Rows, KVView, Tensor | None, Tensor]:
        """Rows, keys and values, the slot where each row's sequence starts (None: 0), the blocks' first positions.

        k, v: [B, G, N, D], all columns of the cache and the pass.
        """
        tokens, block = self.p.tokens, self.config.block
        if tokens.fresh:
            layout = Layout.of(tokens, block)
            k, v = (tokens.rows(x.transpose(1, 2)) for x in (k, v))
            return layout.rows(self.q), layout.view(k, v), layout.start, layout.first
        lens = torch.full((k.shape[0],), k.shape[2], dtype=torch.int64, device=k.device)
        if self.p.real is not None:  # tokens to the front
            order = torch.argsort(~self.p.real, dim=1, stable=True)[:, None, :, None]
            k, v = (x.gather(2, order.expand_as(x)) for x in (k, v))
            lens = self.p.real.sum(1)
        first = block_positions(len(k), k.shape[2], block, tokens.first_position, k.device)
        return Rows(self.q, tokens.seq, tokens.pos), KVView(k.contiguous(), v.contiguous(), lens), None, first

    def _recall(self) -> tuple[Blocks, Recalled | None]:
        config, p = self.config, self.p
        summaries = config.variant == "block_mka" and 2 in config.tiers
        if 3 not in config.tiers and not summaries:
            return Blocks(None, None), None
        assert p.frequencies is not None
        own = 3 in config.tiers and config.recalls(self.number)
        code = self.levels.code(p.frequencies, 0 if self.shard is None else self.shard.first) if own else None
        blocks = Blocks.of(self.kv, self.first, code, p.frequencies, config.block, summaries=summaries)
        if code is not None:
            found = choose(self.rows, p.tokens.rotary_pos, self.heads, blocks, self.reach, code, config, self.scale)
            p.recalled[self.number] = replace(found, summaries=None)  # other layers have other summaries
            return blocks, found
        if 3 not in config.tiers:
            return blocks, None
        anchor = max(n for n in p.recalled if n <= self.number)  # not the last: layers are repeated for gradients
        return blocks, p.recalled[anchor]
