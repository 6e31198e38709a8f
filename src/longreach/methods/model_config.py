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


def shape_of_config(config: Any) -> ModelShape:
    """The shape of a language model. Raises Unsupported where layers have different shapes."""
    differ = sorted({*SIZES} & {*(getattr(config, "per_layer_attributes", None) or ())})
    if differ:
        raise Unsupported(
            f"{type(config).__name__}: {', '.join(differ)} differ by layer (as in Gemma-4), and longreach's cache has "
            f"one shape for all layers"
        )
    heads = config.num_attention_heads
    return ModelShape(
        layers=len(attention_layers(config)),
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        config=config_hash(config),
    )


def config_hash(config: Any) -> str:
    """Identifies the models that a plan was made for: another shape or rotary embedding gives another hash."""
    fields = {name: getattr(config, name, None) for name in PLANNED_FOR}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
