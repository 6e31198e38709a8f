"""Multi-head latent attention (MLA, DeepSeek-V2): one vector a token is cached, and queries are moved to its space.

A token's vector has its rotated channels first and its latent c behind them. Keys and values of query head h are linear
in c, k = W_k[h] c and v = W_v[h] c, so

    q . k = (W_k[h]^T q) . c        and        sum p v = W_v[h] sum p c.

A layer therefore attends as one with a single KV head, whose keys are these vectors and whose values are the keys
themselves: of a result the rotated channels are dropped, and the latent ones are expanded by W_v. transformers caches
the same numbers, but expands all of them in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longreach.errors import Unsupported
from longreach.methods.call import ModelShape
from longreach.methods.model_config import latent_width
from longreach.ops.types import KERNEL_GROUP, KERNEL_WIDEST, WIDEST

EXPAND = "expand_kv"  # the method of transformers' modules that makes keys and values of all heads
NEEDED = ("kv_b_proj", EXPAND, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
TOLERANCE = 1e-4  # of expanded keys and values of size 1, in fp32


def check_latent(name: str, config: Any, modules: list[nn.Module]) -> None:
    """Raise Unsupported where layers of MLA are not as transformers' DeepSeek-V3 has them."""
    layers = sorted(n for module in modules if isinstance(n := getattr(module, "layer_idx", None), int))
    if layers != list(range(config.num_hidden_layers)):
        raise Unsupported(
            f"{name} has multi-head latent attention (MLA) in layers {layers}; longreach expects one such layer in "
            f"each of its {config.num_hidden_layers}"
        )
    for module in modules:
        missing = [part for part in NEEDED if not hasattr(module, part)]
        if missing:
            raise Unsupported(
                f"{name}: {type(module).__name__} has no {', '.join(missing)}, so it is no multi-head latent attention "
                f"(MLA) as in DeepSeek-V3; longreach does not implement another one"
            )
        if getattr(module, "indexer", None) is not None or hasattr(module, "skip_topk"):
            raise Unsupported(
                f"{name} chooses keys by an indexer of its own (sparse attention as in DeepSeek-V3.2), which longreach "
                f"does not implement"
            )
    width = latent_width(config)
    if width % 8 or width > WIDEST:
        raise Unsupported(
            f"{name} caches {width} channels a token (kv_lora_rank + qk_rope_head_dim); longreach takes multiples of 8 "
            f"up to {WIDEST}"
        )


def check_kernels(name: str, shape: ModelShape, device: torch.device, impl: str) -> None:
    """Raise Unsupported where the kernels for a GPU do not take the shape of a model's heads. impl: of the session."""
    why = kernels_refusal(name, shape)
    if device.type == "cuda" and impl != "reference" and why is not None:
        raise Unsupported(why)


def kernels_refusal(name: str, shape: ModelShape) -> str | None:
    """Why the kernels for a GPU do not take the shape of a model's heads; None if they do."""
    group, dim = shape.largest
    if dim <= KERNEL_WIDEST and group <= KERNEL_GROUP:
        return None
    return (
        f"{name} attends with up to {group} query heads a KV head and {dim} channels a head; the kernels for a GPU "
        f"take up to {KERNEL_GROUP} and {KERNEL_WIDEST}. Run it on a CPU, or with impl='reference', exact but slow"
    )


def joined(latent: Tensor, rotated: Tensor) -> Tensor:
    """The vectors that a layer caches, [B, 1, T, D]. latent, rotated: [B, 1, T, channels]."""
    return torch.cat([rotated, latent], -1)


def kept_apart(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """For `expand_kv` within a session: nothing is expanded, attention gets the two parts as they are."""
    return latent, rotated


@dataclass(frozen=True)
class LatentQuery:
    """One layer's queries in the space of the cached vectors.

    query: [B, H, T, D], rotated channels first. values: [H, value channels, rank], which expand a result.
    """

    query: Tensor
    values: Tensor

    @classmethod
    def of(cls, module: nn.Module, query: Tensor) -> LatentQuery:
        """query: [B, H, T, channels of a head], the rotated ones last, as the module makes them."""
        keys, values = weights(module)
        plain, rotated = split(module, query)
        return cls(torch.cat([rotated, torch.einsum("bhtn,hnr->bhtr", plain, keys)], -1), values)

    def expand(self, out: Tensor) -> Tensor:
        """[B, T, H, D] of attention to the cached vectors -> [B, T, H, value channels]."""
        rank = self.values.shape[-1]
        return torch.einsum("bthr,hvr->bthv", out[..., -rank:], self.values)


def split(module: nn.Module, query: Tensor) -> tuple[Tensor, Tensor]:
    """(channels that are not rotated, rotated ones) of queries."""
    plain, rotated = query.split([int(module.qk_nope_head_dim), int(module.qk_rope_head_dim)], -1)  # type: ignore[arg-type]
    return plain, rotated


def weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    """W_k [H, key channels that are not rotated, rank] and W_v [H, value channels, rank] of a layer.

    Of a projection that is not plain (LoRA, quantised) they are its outputs for the unit vectors.
    """
    plain, value, rank = (int(getattr(module, n)) for n in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
    project = module.kv_b_proj
    if type(project) is nn.Linear and not project._forward_hooks and not project._forward_pre_hooks:
        weight = project.weight
    else:
        assert callable(project)
        like = next(p for p in module.parameters() if p.is_floating_point())
        weight = project(torch.eye(rank, dtype=like.dtype, device=like.device)).transpose(0, 1)
    keys, values = weight.unflatten(0, (-1, plain + value)).split([plain, value], 1)
    return keys, values


@torch.no_grad()
def check_expansion(module: nn.Module) -> None:
    """Raise Unsupported where a module expands latents to other keys and values than `weights` gives."""
    keys, values = weights(module)
    rank, rotated = keys.shape[-1], int(module.qk_rope_head_dim)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)  # of its own: the user's sampling keeps its seed
    c, r = (torch.randn(1, 1, 3, n, generator=generator).to(keys) for n in (rank, rotated))
    expand: Callable[..., Any] = getattr(type(module), EXPAND)
    k, v = expand(module, c, r)
    turned = r.expand(-1, keys.shape[0], -1, -1)
    want_k = torch.cat([torch.einsum("botr,hnr->bhtn", c, keys), turned], -1)
    want_v = torch.einsum("botr,hvr->bhtv", c, values)
    slack = TOLERANCE if keys.element_size() >= 4 else 2e-2
    for found, want in ((k, want_k), (v, want_v)):
        same = found.shape == want.shape
        if not same or bool((found - want).norm() > slack * want.norm()):
            raise Unsupported(
                f"{type(module).__name__} expands its latents by a formula of its own, not by kv_b_proj alone; "
                f"longreach does not implement that"
            )
