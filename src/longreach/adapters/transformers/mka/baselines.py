"""Baselines made from a pretrained model, in place: other numbers of KV heads, and MLA.

MHA, GQA and MQA stay models of their family. MLA gets classes of its own, as its weights have other names. Its keys and
values are expanded from the latent and cached expanded, which any cache and attention can read. `LatentKV.cached` is
the size that a cache of latents would have.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from longreach.adapters.transformers.checks import shape_of
from longreach.adapters.transformers.mka.families import FAMILIES
from longreach.adapters.transformers.mka.layers import attention_layers
from longreach.adapters.transformers.mka.loaded import check_loaded
from longreach.adapters.transformers.mka.projections import GivenProjections
from longreach.adapters.transformers.mka.rotation import layout_of
from longreach.errors import UnknownName, Unsupported
from longreach.mka.baselines import LatentKV, MLAConfig, fastest_channels, regroup
from longreach.mka.config import is_count
from longreach.ops.types import require

PREFIX = "longreach_mla_"  # of model types
MLA_FAMILIES = tuple(name for name in FAMILIES if name != "phi3")  # whose projections are one matrix


def convert_baseline(
    model: PreTrainedModel, kind: str, *, kv_heads: int | None = None, rank: int | None = None,
    rotated: int | None = None, **unknown: Any,
) -> PreTrainedModel:  # fmt: skip
    """`convert` to a baseline, of a model that it has checked.

    Raises UnknownName (kind, family), InvalidInput (options that do not fit), Unsupported. After an error the model is
    unchanged.
    """
    for option in unknown:
        raise UnknownName(f"option of {kind}", option, {"gqa": ("kv_heads",), "mla": ("rank", "rotated")}.get(kind, ()))
    name = str(model.config.model_type)
    known = MLA_FAMILIES if kind == "mla" else FAMILIES
    if name not in known:
        raise UnknownName(f"family of models for {kind}", name, known)
    if kind == "mla":
        require(kv_heads is None, "kv_heads: an option of gqa; mla keeps the model's")
        return _to_latent(model, MLAConfig(rank, rotated))
    require(rank is None and rotated is None, f"rank, rotated: options of mla, not of {kind}")
    shape = shape_of(model)
    wanted = {"mha": shape.query_heads, "mqa": 1}.get(kind, kv_heads)
    fixed = kind == "gqa" or kv_heads is None
    require(fixed, f"kv_heads: {kind} has {wanted}; leave it out, or use gqa")
    require(wanted is not None, "kv_heads: gqa needs a number of KV heads, such as kv_heads=2")
    ok = is_count(wanted) and shape.query_heads % int(wanted or 1) == 0
    require(ok, f"kv_heads: expected a divisor of the {shape.query_heads} query heads, got {wanted!r}")
    assert wanted is not None
    _regroup(model, shape.kv_heads, wanted)
    return model


@torch.no_grad()
def _regroup(model: PreTrainedModel, heads: int, wanted: int) -> None:
    made = dict[nn.Module, dict[str, nn.Linear]]()
    for module in attention_layers(model).values():
        if "qkv_proj" in module._modules:
            made[module] = {"qkv_proj": _qkv(module, heads, wanted)}
        else:
            made[module] = {
                n: _linear(getattr(module, n), lambda x: regroup(x, heads, wanted)) for n in ("k_proj", "v_proj")
            }
    config: Any = model.config
    for module, projections in made.items():
        for name, projection in projections.items():
            setattr(module, name, projection)
        any_module: Any = module
        any_module.num_key_value_groups = config.num_attention_heads // wanted
        if hasattr(module, "num_key_value_heads"):
            any_module.num_key_value_heads = wanted
    _change_config(model, type(config), num_key_value_heads=wanted)


def _linear(projection: Any, change: Any) -> nn.Linear:
    """A projection with changed weight and bias [out, in] and [out]."""
    if not isinstance(projection, nn.Linear) or not projection.weight.dtype.is_floating_point:
        raise Unsupported(f"expected plain linear projections, got {type(projection).__name__} (quantised? LoRA?)")
    weight = change(projection.weight)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=projection.bias is not None, device="meta")
    made.weight = nn.Parameter(weight.clone())
    if projection.bias is not None:
        made.bias = nn.Parameter(change(projection.bias[:, None])[:, 0].clone())
    return made


def _qkv(module: Any, heads: int, wanted: int) -> nn.Linear:
    width = heads * module.head_dim

    def change(x: Tensor) -> Tensor:
        q, k, v = x.split((x.shape[0] - 2 * width, width, width))
        return torch.cat([q, regroup(k, heads, wanted), regroup(v, heads, wanted)])

    return _linear(module.qkv_proj, change)


def _change_config(model: PreTrainedModel, kind: type, **fields: Any) -> None:
    """Other models that share the config object keep it as it is."""
    old = model.config
    new = copy.copy(old)
    new.__class__ = kind
    for name, value in fields.items():
        setattr(new, name, value)
    parts: list[Any] = list(model.modules())
    for module in parts:
        if module.__dict__.get("config") is old:
            module.config = new
    if new.architectures:
        new.architectures = [type(model).__name__]


# MLA


class LatentAttention(GivenProjections):
    """Mixin of attention modules, before a family's own class. mla: makes keys and values in place of projections."""

    mla: LatentKV
    rotated: int  # channels of a head that keep their rotation

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = still(cos, sin, self.rotated // 2)
        k, v = self.mla(hidden_states)
        with self.given({"k_proj": k, "v_proj": v}):
            return super().forward(hidden_states, *args, **kwargs)


def still(cos: Tensor, sin: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """cos and sin [..., rotary], two halves, with all pairs but the first `pairs` unrotated. Their scaling stays."""
    half = cos.shape[-1] // 2
    turns = (torch.arange(cos.shape[-1], device=cos.device) % half) < pairs
    size = (cos.float().square() + sin.float().square()).sqrt().to(cos.dtype)
    return torch.where(turns, cos, size), torch.where(turns, sin, torch.zeros_like(sin))


@cache
def latent_classes(name: str) -> tuple[type, type[PreTrainedModel]]:
    """Config and model classes of a family with MLA, by its model type."""
    base_config: Any = CONFIG_MAPPING[name]
    base_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    config = _made(base_config, model_type=PREFIX + name, mla=None, __annotations__={"mla": "dict | None"})
    return config, _made(base_model, LatentModel, config_class=config)


def register_baselines() -> None:
    """Let AutoConfig and AutoModelForCausalLM load models with MLA. May be called again."""
    for name in MLA_FAMILIES:
        config, model = latent_classes(name)
        AutoConfig.register(PREFIX + name, config, exist_ok=True)  # type: ignore[arg-type]
        AutoModelForCausalLM.register(config, model, exist_ok=True)


class LatentModel:
    """Mixin of models with MLA, before a family's own class."""

    config_class: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model: Any = self
        options = config.mla
        require(isinstance(options, dict), lambda: f"config.mla: expected rank, rotated and layout, got {options!r}")
        shape = shape_of(model)
        for module in attention_layers(model).values():
            k: Any = module.k_proj
            channels = fastest_channels(options["rotary"], options["rotated"], options["layout"])
            latent = LatentKV(
                k.in_features, shape.kv_heads, shape.head_dim, options["rank"], channels, k.bias is not None
            )
            _install(module, latent.to(k.weight), options["rotated"])
        model.post_init()

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As the family's own. Raises ModelFileError where the checkpoint has other weights of MLA than the model."""
        parent: Any = super()
        model, info = parent.from_pretrained(path, *args, output_loading_info=True, **kwargs)
        check_loaded(path, info, "MLA", ".mla.")
        return (model, info) if output_loading_info else model


def _to_latent(model: PreTrainedModel, config: MLAConfig) -> PreTrainedModel:
    shape, layers = shape_of(model), attention_layers(model)
    layout, rotary = layout_of(model.get_decoder())
    rank, rotated = config.sizes(shape.kv_heads, shape.head_dim, rotary)
    made = dict[nn.Module, LatentKV]()
    for layer, module in layers.items():
        k, v = module.k_proj, module.v_proj
        if not isinstance(k, nn.Linear) or not isinstance(v, nn.Linear):
            raise Unsupported(f"mla: layer {layer} has no plain linear projections (quantised? LoRA?)")
        made[module] = LatentKV.of(k, v, shape.kv_heads, rank, fastest_channels(rotary, rotated, layout))
    for module, latent in made.items():
        _install(module, latent, rotated)
    kind, own = latent_classes(str(model.config.model_type))
    model.__class__ = own
    _change_config(model, kind, mla={"rank": rank, "rotated": rotated, "layout": layout, "rotary": rotary})
    return model


def _install(module: Any, latent: LatentKV, rotated: int) -> None:
    module.mla, module.rotated = latent.train(module.training), rotated
    del module.k_proj, module.v_proj
    kind: Any = type(module)
    module.__class__ = latent_attention(kind)


@cache
def latent_attention(base: type[nn.Module]) -> Any:
    """A family's attention class with MLA; `base` is the family's own."""
    return _made(base, LatentAttention)


def _made(base: type, *mixins: type, **fields: Any) -> Any:
    """A class named after `base` that pickle finds in this module."""
    name = f"LongreachMLA{base.__name__}"
    own = {"__module__": __name__, "__qualname__": name, "__doc__": f"{base.__name__} with MLA"}
    made = globals()[name] = type(name, (*mixins, base), {**own, **fields})
    return made
