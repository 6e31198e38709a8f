"""The shape of a model from its configuration alone, as transformers and vLLM have it. Needs neither of them.

In a hybrid model longreach counts the layers that attend: its layer n is the model's n-th layer with attention.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from longreach.errors import Unsupported
from longreach.methods.call import ModelShape

STATE = ("linear_attention", "conv")  # types of layers that keep a state and do not attend
BOTH = ("hybrid",)  # of layers that do both
NEITHER = ("mlp", "moe")
PLANNED_FOR = (  # fields of a configuration that identify a model in all versions of transformers
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
)
PLANNED_FOR_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")  # of models with MLA
SIZES = ("head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")


def layer_types(config: Any) -> tuple[str, ...]:
    """The types of a model's layers; () if all of them attend alike."""
    return tuple(getattr(config, "layer_types", None) or ())


def is_hybrid(config: Any) -> bool:
    """Whether a model has layers that keep a recurrent state. config: of its language model."""
    return not {*STATE, *BOTH}.isdisjoint(layer_types(config))


def attention_layers(config: Any) -> tuple[int, ...]:
    """Numbers of the model's layers that attend, ascending: all, except in a hybrid model."""
    if not is_hybrid(config):
        return tuple(range(config.num_hidden_layers))
    return tuple(n for n, kind in enumerate(layer_types(config)) if kind not in (*STATE, *NEITHER))


def is_latent(config: Any) -> bool:
    """Whether a model has multi-head latent attention (MLA). config: of its language model."""
    return getattr(config, "kv_lora_rank", None) is not None


def latent_width(config: Any) -> int:
    """Channels of the vector that MLA keeps of a token: the rotated ones and the latent."""
    return int(config.qk_rope_head_dim + config.kv_lora_rank)


def shape_of_config(config: Any) -> ModelShape:
    """The shape of a language model. Raises Unsupported where layers have different shapes."""
    differ = {*SIZES} & {*(getattr(config, "per_layer_attributes", None) or ())}
    if not differ <= {"head_dim", "num_key_value_heads"}:
        raise Unsupported(
            f"{type(config).__name__}: {', '.join(sorted(differ))} differ by layer; longreach supports that of "
            f"head_dim and num_key_value_heads (as in Gemma-4)"
        )
    heads = config.num_attention_heads
    if differ:
        layers = [config.per_layer_config[layer] for layer in attention_layers(config)]
        each = tuple((layer.num_key_value_heads or heads, layer.head_dim) for layer in layers)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(each)
        full = {shape for shape, kind in zip(each, kinds, strict=True) if kind != "sliding_attention"} or {*each}
        if len(full) > 1:
            raise Unsupported(
                f"{type(config).__name__}: {', '.join(sorted(differ))} differ between layers without a sliding window; "
                f"longreach supports one shape for these, as plans have it"
            )
        ((kv_heads, dim),) = full
        by_layer = each if len(set(each)) > 1 else ()
        return ModelShape(len(each), heads, kv_heads, dim, config_hash(config), by_layer=by_layer)
    if is_latent(config):
        return ModelShape(
            layers=config.num_hidden_layers,
            query_heads=heads,
            kv_heads=1,
            head_dim=latent_width(config),
            config=config_hash(config),
            values_in_keys=True,
        )
    return ModelShape(
        layers=len(attention_layers(config)),
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        config=config_hash(config),
    )


def config_hash(config: Any) -> str:
    """Identifies the models that a plan was made for: another shape or rotary embedding gives another hash."""
    names = PLANNED_FOR + (PLANNED_FOR_LATENT if is_latent(config) else ())
    differ = {*(getattr(config, "per_layer_attributes", None) or ())}  # not to be read from the whole configuration
    fields = {name: None if name in differ else getattr(config, name, None) for name in names}
    if differ:
        fields |= {name: [getattr(layer, name, None) for layer in config.per_layer_config] for name in sorted(differ)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
