"""Baselines that the paper compares with, made from a pretrained layer: MHA, GQA, MQA and MLA.

Weights are those of projections: [heads x D, width], biases [heads x D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longreach.mka.config import is_count
from longreach.ops.types import require

BASELINES = ("mha", "gqa", "mqa", "mla")


def repeat_heads(weight: Tensor, heads: int, wanted: int) -> Tensor:
    """A projection to `heads` KV heads as one to `wanted`, each head repeated: the same function (MHA from GQA)."""
    ok = wanted % heads == 0
    require(ok, f"kv_heads: expected a multiple of the model's {heads} KV heads, or a divisor, got {wanted}")
    return weight.unflatten(0, (heads, -1)).repeat_interleave(wanted // heads, 0).flatten(0, 1)


def average_heads(weight: Tensor, heads: int, wanted: int) -> Tensor:
    """A projection to fewer KV heads: the mean of neighbouring ones (Ainslie et al., 2023, uptraining to GQA)."""
    ok = heads % wanted == 0
    require(ok, f"kv_heads: expected a divisor of the model's {heads} KV heads, or a multiple, got {wanted}")
    return weight.unflatten(0, (wanted, heads // wanted, -1)).mean(1).flatten(0, 1)


def regroup(weight: Tensor, heads: int, wanted: int) -> Tensor:
    """Repeated or averaged, whichever leads to `wanted` KV heads."""
    return repeat_heads(weight, heads, wanted) if wanted > heads else average_heads(weight, heads, wanted)


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention from a pretrained layer.

    rank: width of the latent that keys and values share. None: keys and values then take half of the cache.
    rotated: channels of each KV head's key that keep their rotation, even; they stay outside the latent. None: a
        quarter, the pairs that turn fastest. The other channels lose their rotation, in queries too.
    """

    rank: int | None = None
    rotated: int | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "rotated"):
            value = getattr(self, name)
            require(value is None or is_count(value), f"{name}: expected a count >= 1, or None, got {value!r}")
        require((self.rotated or 0) % 2 == 0, f"rotated: expected an even number of channels, got {self.rotated}")

    def sizes(self, kv_heads: int, dim: int, rotary: int) -> tuple[int, int]:
        """(rank, rotated channels of a head) of a layer with `rotary` rotated channels a head."""
        rotated = max(2, dim // 8 * 2) if self.rotated is None else self.rotated
        require(rotated <= rotary, f"rotated: expected at most the {rotary} rotated channels of a head, got {rotated}")
        rank = kv_heads * (dim - rotated) if self.rank is None else self.rank
        most = kv_heads * (2 * dim - rotated)
        require(1 <= rank <= most, f"rank: expected 1 to {most}, got {rank}")
        return rank, rotated


class LatentKV(nn.Module):
    """Keys and values of one layer through a shared latent (MLA, DeepSeek-V2), before key norm and rotation.

        c = down x                      [rank]: a cache of MLA holds it and k[rotated]
        k[rotated] = direct x           the channels that are rotated
        k[others], v = up c

    direct: [G x rotated, width], down: [rank, width], up: [G x (D - rotated) + G x D, rank]. Channels of a key keep
    their places. A cache takes rank + G x rotated numbers a token, where keys and values take 2 G D.
    """

    channels: Tensor

    def __init__(self, width: int, kv_heads: int, dim: int, rank: int, rotated: Tensor, bias: bool = False):
        """rotated: int [n], channels of a head that keep their rotation."""
        super().__init__()
        self.kv_heads, self.dim = kv_heads, dim
        self.direct = nn.Linear(width, kv_heads * len(rotated), bias=bias)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, kv_heads * (2 * dim - len(rotated)), bias=bias)
        rest = [n for n in range(dim) if n not in set(rotated.tolist())]
        order = torch.tensor(rotated.tolist() + rest, device="cpu")  # channels in the order in which they are computed
        self.register_buffer("channels", order.argsort())

    @classmethod
    @torch.no_grad()
    def of(cls, k: nn.Linear, v: nn.Linear, kv_heads: int, rank: int, rotated: Tensor) -> LatentKV:
        """The layer whose projections are k and v, at rank `rank`: the best in the least squares sense (joint SVD)."""
        width, dim = k.in_features, k.out_features // kv_heads
        made = cls(width, kv_heads, dim, rank, rotated, bias=k.bias is not None).to(k.weight.device, k.weight.dtype)
        rest = [n for n in range(dim) if n not in set(rotated.tolist())]
        heads = k.weight.unflatten(0, (kv_heads, dim))
        made.direct.weight.copy_(heads[:, rotated].flatten(0, 1))
        u, s, vh = torch.linalg.svd(torch.cat([heads[:, rest].flatten(0, 1), v.weight]).double(), full_matrices=False)
        root = s[:rank].sqrt()
        made.up.weight[:, : len(root)].copy_(u[:, :rank] * root)
        made.down.weight[: len(root)].copy_(root[:, None] * vh[:rank])
        made.up.weight[:, len(root) :], made.down.weight[len(root) :] = 0.0, 0.0
        if k.bias is not None and v.bias is not None:
            biases = k.bias.unflatten(0, (kv_heads, dim))
            made.direct.bias.copy_(biases[:, rotated].flatten())
            made.up.bias.copy_(torch.cat([biases[:, rest].flatten(), v.bias]))
        return made

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [..., G D] of hidden states [..., width]."""
        direct = self.direct(x).unflatten(-1, (self.kv_heads, -1))
        own = self.kv_heads * (self.dim - direct.shape[-1])
        rest, v = self.up(self.down(x)).split((own, self.kv_heads * self.dim), -1)
        k = torch.cat([direct, rest.unflatten(-1, (self.kv_heads, -1))], -1)
        return k[..., self.channels].flatten(-2), v

    @property
    def cached(self) -> int:
        """Numbers that a cache of MLA holds for a token."""
        return self.down.out_features + self.direct.out_features


def fastest_channels(rotary: int, count: int, layout: str) -> Tensor:
    """The `count` channels of the pairs that turn fastest, of a head whose first `rotary` channels turn: int64."""
    pairs = torch.arange(count // 2, device="cpu")  # also where models are made on another device
    return torch.cat([pairs, pairs + rotary // 2]) if layout == "half" else torch.arange(count, device="cpu")


def attend_dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of whole sequences: q [B, H, T, D], k, v [B, G, N, D], the last T of N tokens are the rows."""
    past = k.shape[2] - q.shape[2]
    if not past:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(past)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
