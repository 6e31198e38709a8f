"""The training model in plain PyTorch; its state dict has transformers' Llama names, so it is exported as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longreach.train.mini.config import ModelShape


class Linear(nn.Linear):
    """fp32 weights, used in the input's dtype (bf16 on the GPU); no bias."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Llama's RMSNorm: normalised in fp32, returned in the input's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in Llama's half-split layout; x [B, H, T, D], cos and sin [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = Linear(shape.hidden_size, self.heads * self.head_dim)
        self.k_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(b, t, self.heads * self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer; compiled once per shape and shared by all layers."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """The causal language model; the output projection is the embedding."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        residual = (2 * shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=shape.initializer_range * scale)

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Hidden states [B, T, hidden] in `dtype` (also that of the residual stream) of tokens int64 [B, T]."""
        x = self.model.embed_tokens(tokens).to(dtype)
        cos, sin = self.rope(tokens.shape[1], tokens.device, dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def rope(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [length, D]; angles in fp32."""
        even = torch.arange(0, self.shape.head_dim, 2, device=device, dtype=torch.float32)
        rates = self.shape.rope_theta ** (-even / self.shape.head_dim)
        angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), rates)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def token_losses(hidden: Tensor, embedding: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy fp32 [N] and whether the greedy choice is right, bool [N]; hidden [N, width], targets [N]."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    loss = torch.logsumexp(logits, -1) - logits.gather(-1, targets[:, None]).squeeze(-1)
    return loss, logits.detach().argmax(-1) == targets
