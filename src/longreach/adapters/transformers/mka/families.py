"""Config and model classes with MKA's layers, made from each family's own. No code per family."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longreach.adapters.transformers.mka.attention import MemoryAttention
from longreach.adapters.transformers.mka.inputs import add_hook
from longreach.adapters.transformers.mka.layers import attention_layers, check_options, levels_for
from longreach.adapters.transformers.mka.levels import give_attention, register_attention
from longreach.adapters.transformers.mka.loaded import check_loaded
from longreach.errors import UnknownName
from longreach.mka.config import MKAConfig
from longreach.mka.levels import Levels
from longreach.ops.types import require

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "glm", "glm4")
PREFIX = "longreach_mka_"  # of model types
MODULE = ".mka."  # in the names of all weights that MKA adds


@dataclass(frozen=True)
class Family:
    """The classes of a family: its own config and model, and those with MKA's layers."""

    base_config: type
    base_model: type[PreTrainedModel]
    config: type
    model: type[PreTrainedModel]


@cache
def family(name: str) -> Family:
    """The classes of a family by its model type. Raises UnknownName."""
    if name not in FAMILIES:
        raise UnknownName("family of models for MKA", name, FAMILIES)
    base_config: Any = CONFIG_MAPPING[name]
    base_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    fields = {"model_type": PREFIX + name, "mka": None, "__annotations__": {"mka": "dict | None"}}
    config = _made(base_config, f"{base_config.__name__} with a field `mka`, the JSON of MKAConfig", **fields)
    model = _made(base_model, f"{base_model.__name__} with MKA's layers", MemoryModel, config_class=config)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PREFIX + name] = model.__name__  # Trainer shifts labels to smooth by this table
    return Family(base_config, base_model, config, model)


@cache
def attention_class(own: Any) -> Any:
    """A family's attention class with MKA; `own` is the family's."""
    return _made(own, f"{own.__name__} with MKA", MemoryAttention, own=own)


def families() -> Iterator[Family]:
    """All families."""
    return (family(name) for name in FAMILIES)


def register_families() -> None:
    """Let AutoConfig and AutoModelForCausalLM load and make models with MKA's layers. May be called again."""
    register_attention()
    for one in families():
        AutoConfig.register(one.config.model_type, one.config, exist_ok=True)  # type: ignore[attr-defined]
        AutoModelForCausalLM.register(one.config, one.model, exist_ok=True)
        name = one.base_config.model_type  # type: ignore[attr-defined]
        mapping = get_checkpoint_conversion_mapping(
            name
        )  # such as that of experts, whose weights files hold one by one
        if mapping:
            register_checkpoint_conversion_mapping(PREFIX + name, mapping, overwrite=True)


class MemoryModel:
    """Mixin of models with MKA's layers, before a family's own class."""

    config_class: Any
    _keep_in_fp32_modules_strict = frozenset({"planes"})  # a cast would choose other blocks

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model: Any = self
        options = options_of(config)
        check_options(model, options)
        install(model, levels_for(model, options, gate=1.0))
        model.post_init()

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As the family's own. Raises ModelFileError where the checkpoint has other weights of MKA than the model."""
        parent: Any = super()
        model, info = parent.from_pretrained(path, *args, output_loading_info=True, **kwargs)
        check_loaded(path, info, "MKA", MODULE)
        return (model, info) if output_loading_info else model


def options_of(config: Any) -> MKAConfig:
    """The options of MKA that a model's config holds. Raises InvalidInput, UnknownName."""
    given = getattr(config, "mka", None)
    require(
        isinstance(given, dict),
        lambda: (
            f"config.mka: expected the options of MKA, such as {{'variant': 'fastmka'}}, got {given!r}; pass "
            f"mka=MKAConfig.make(...).to_json() to the config"
        ),
    )
    return MKAConfig.from_json(given)  # type: ignore[arg-type]


def install(model: PreTrainedModel, levels: dict[int, Levels]) -> None:
    """Put Levels into a model's layers, by number, and let its passes describe their tokens."""
    for layer, attention in attention_layers(model).items():
        if layer in levels:
            attention.mka = levels[layer]
            attention.__class__ = attention_class(cast(Any, type(attention)))
            if levels[layer].config.variant != "fastmka":
                give_attention(attention)
    register_attention()
    add_hook(model.get_decoder())


def _made(base: type, doc: str, *mixins: type, **fields: Any) -> Any:
    """A class named after `base` that pickle finds in this module."""
    name = f"LongreachMKA{base.__name__}"
    names = {"__module__": __name__, "__qualname__": name, "__doc__": doc}
    made = globals()[name] = type(name, (*mixins, base), {**names, **fields})
    return made


def __getattr__(name: str) -> Any:
    """Classes that pickle looks up before they are made."""
    if name.startswith("LongreachMKA"):
        for one in families():
            own = one.base_model
            attention_class(getattr(sys.modules[own.__module__], own.__name__.replace("ForCausalLM", "Attention")))
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
