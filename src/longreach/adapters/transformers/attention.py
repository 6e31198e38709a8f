"""The function that transformers calls in place of its own attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn

from longreach.adapters.transformers.check_attention import check_attention
from longreach.adapters.transformers.frequencies import frequencies_of
from longreach.adapters.transformers.latent import LatentQuery, check_expansion, joined
from longreach.adapters.transformers.mask import Mask
from longreach.adapters.transformers.rotary import Captured, Rotation, probing
from longreach.adapters.transformers.step import Step, current
from longreach.errors import Unsupported
from longreach.methods.call import LayerCall
from longreach.ops import KVView, RotaryAngles, RotaryFrequencies, Rows
from longreach.runtime import attend_layer
from longreach.runtime.forward import OwnAttention

NAME = "longreach"

USED = ("scaling", "sliding_window", "softcap", "s_aux")
WITHOUT_EFFECT = (  # they change nothing that attention computes
    "position_ids",
    "use_cache",
    "output_router_logits",
    "output_hidden_states",
    "return_dict",
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "tokenizer",  # of stop strings: generate hands it on to the model
)
ONLY = {"dropout": 0.0, "output_attentions": False, "is_causal": True}  # implemented for this value alone


class Levels(OwnAttention, Protocol):
    """Attention of a layer over several levels of keys, of which methods attend to the first (MKA)."""

    @property
    def heads(self) -> int: ...

    def over(self, view: KVView, memory: KVView | None) -> KVView: ...


def longreach_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one layer. query [B, H, T, D], key and value [B, G, T, D], post-RoPE. Returns ([B, T, H, D], None).

    Raises Unsupported for a keyword that is not implemented, CalledOutside without an attached model around it.
    """
    scale, moved = kwargs.get("scaling"), None
    if scale is None:
        scale = query.shape[3] ** -0.5
    own = query
    if hasattr(module, "kv_lora_rank"):  # MLA: key and value are the two parts of the cached vectors
        moved = LatentQuery.of(module, query)
        query = moved.query
    if probing():
        raise Captured(query, key, value, kwargs)
    step = current()
    levels = _levels(step, module, kwargs)
    _refuse_unknown(kwargs)
    layer = _check_layer(step, module, query, key, value)
    if moved is not None:
        key = value = joined(key, value)
    window = _window(step, layer, attention_mask, kwargs.get("sliding_window"))
    view = _view(step, layer, key, value)
    if levels is not None:
        memory = None if step.cache is None else view
        if step.cache is not None and (key.requires_grad or value.requires_grad):
            memory = step.cache.kv.view(layer, step.append)
        view = levels.over(view, memory)
        key, value = key[:, : levels.heads], value[:, : levels.heads]
    if layer not in step.facts.checked:
        if moved is None:
            check_attention(module, query, key, kwargs)
        else:
            check_expansion(module)
            check_attention(module, own, own[:, :: getattr(module, "num_key_value_groups", 1)], kwargs)
        step.facts.checked.add(layer)
    call = _layer_call(step, layer, module, query, key, view, float(scale), kwargs)
    written = _written(step, layer, call) if step.whole is not None and step.layers.observes_tokens else None

    def attend() -> Tensor:  # in a step that is captured in pieces the host runs it again at each replay
        found = attend_layer(step.layers, call.observer(), window=window, written=written, around=levels)
        return step.rectangle(found.partial.out)

    out = attend().to(query.dtype) if step.cut is None else step.cut(attend, query.dtype)
    return out if moved is None else moved.expand(out), None


def _levels(step: Step, module: Any, kwargs: dict[str, Any]) -> Levels | None:
    """The levels of a layer that has several, whose keywords are taken out of kwargs."""
    return module.session_attention(step, kwargs) if hasattr(module, "session_attention") else None


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in USED or name in WITHOUT_EFFECT or value is None:
            continue
        if name not in ONLY:
            raise Unsupported(
                f"the model passes {name}={_short(value)} to attention, which longreach does not implement"
            )
        if value != ONLY[name]:
            raise Unsupported(
                f"the model passes {name}={value!r} to attention; longreach implements {ONLY[name]!r} only"
            )


def _short(value: Any) -> str:
    return f"<{type(value).__name__}>" if hasattr(value, "shape") else repr(value)


def _check_layer(step: Step, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> int:
    """The layer's number, after a check that its keys are the new tokens' and belong to that layer."""
    name, named = type(module).__name__, getattr(module, "layer_idx", None)
    if not isinstance(named, int):
        raise Unsupported(f"{name} has no layer_idx, so its keys have no place in the cache")
    layer = step.facts.layer(named)
    if layer < 0:
        raise Unsupported(f"{name} attends in layer {named}, which has no keys by the model's config (layer_types)")
    if query.shape[2] != step.shape[1] or key.shape[2] != step.shape[1]:
        raise Unsupported(
            f"{name} attends with {query.shape[2]} queries to {key.shape[2]} keys in a pass of {step.shape[1]} tokens "
            f"(cross-attention?); longreach implements self-attention only"
        )
    if value.shape[3] != key.shape[3] and not step.facts.latent:
        raise Unsupported(
            f"{name} has values of {value.shape[3]} channels and keys of {key.shape[3]}; longreach needs them equal"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise Unsupported(
            f"{name} has queries, keys and values of {query.dtype}, {key.dtype} and {value.dtype} (autocast?); "
            f"load the model in the dtype that it runs in"
        )
    if layer in step.layers.layers:
        raise Unsupported(f"{name} attends twice in layer {named} of one pass; longreach implements one")
    if step.cache is not None:
        k, v = step.written.pop(layer, (None, None))  # held no longer: all layers' would be a second copy of the cache
        if k is not key or v is not value:
            raise Unsupported(
                f"{name} attends to other keys in layer {named} than it put into the cache there "
                f"(shared or changed after caching); longreach does not implement that"
            )
    return layer


def _window(step: Step, layer: int, mask: Any, keyword: Any) -> int | None:
    """The window of the layer. Its mask, its keyword and its configuration must agree."""
    if not isinstance(mask, Mask):
        what = "no mask at all" if mask is None else "a mask of its own"
        raise Unsupported(f"the model gives attention {what}; longreach handles 2-D padding masks [B, T] only")
    pattern = mask.pattern
    if pattern.window is not None and keyword in (None, pattern.window):
        return pattern.window
    limits = {"passes sliding_window": keyword, "caches a window": step.facts.cache_windows.get(layer)}
    for how, limit in limits.items():
        if limit is not None and step.columns > limit:
            raise Unsupported(f"layer {layer} {how} of {limit} tokens, but its mask is {pattern}; which one is meant?")
    return pattern.window


def _layer_call(
    step: Step, layer: int, module: nn.Module, query: Tensor, key: Tensor, view: KVView, scale: float,
    kwargs: dict[str, Any],
) -> LayerCall:  # fmt: skip
    def known() -> Rotation:
        rotation = step.facts.rotations.get(layer, "no layer of this model gets a rotary embedding")
        if not isinstance(rotation, Rotation):
            raise Unsupported(f"queries before rotation, or its frequencies, are needed: {rotation}")
        return rotation

    def rotary() -> RotaryAngles:
        rotation, (cos, sin) = known(), step.rotary[layer]
        pairs = (rotation.pairs(x).expand(*step.shape, -1) for x in (cos, sin))
        cos, sin = (x.flatten(0, 1) if step.real is None else x[step.real] for x in pairs)
        return RotaryAngles(cos, sin, rotation.layout)

    def pre_rope() -> tuple[Tensor, Tensor]:
        rotation, (cos, sin) = known(), step.rotary[layer]
        return step.rows(rotation.undo(query, cos, sin)), step.rows(rotation.undo(key, cos, sin))

    def frequencies() -> RotaryFrequencies:
        facts = step.facts
        if layer not in facts.frequencies:
            assert facts.decoder is not None
            layout, pos = known().layout, step.append.pos
            facts.frequencies[layer] = frequencies_of(facts.decoder, facts.layer_types, layer, layout, rotary(), pos)
        return facts.frequencies[layer]

    place = step.append.at(layer)
    return step.layers.call(
        layer,
        Rows(step.rows(query), step.append.seq, place.slot, place.runs),
        view,
        step.append.slots,
        scale,
        softcap=kwargs.get("softcap"),
        sink_logit=kwargs.get("s_aux"),
        shard=step.facts.shard(layer, module, key.shape[1]),
        pre_rope=pre_rope,
        rotary=rotary,
        frequencies=frequencies,
        evicted=step.cache is not None and step.cache.kv.evicted(layer),
    )


def _written(step: Step, layer: int, call: LayerCall) -> LayerCall:
    """Rows, with queries of zeros, for all tokens of a pass when only some run in this layer."""
    assert step.whole is not None
    place, q = step.whole.at(layer), call.rows.q
    zeros = q.new_zeros(()).expand(place.slot.shape[0], *q.shape[1:])
    rows = Rows(zeros, step.whole.seq, place.slot, place.runs)
    return replace(call, rows=rows, pre_rope=None, rotary=None)


def _view(step: Step, layer: int, key: Tensor, value: Tensor) -> KVView:
    if step.cache is None:
        return step.view_of(key, value)
    if key.requires_grad or value.requires_grad:
        if step.cache.columns:
            raise Unsupported("gradients do not flow into a KV cache; call the model under torch.no_grad()")
        return step.view_of(key, value)
    return step.cache.kv.view(layer, step.append)
