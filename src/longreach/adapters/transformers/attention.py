"""The function that transformers calls in place of its own attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from longreach.adapters.transformers.rotary import before_rotation
from longreach.adapters.transformers.shard import shard_of
from longreach.adapters.transformers.step import Step, current
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import LayerCall, Outcome, Reads
from longreach.ops import Rows, Spans

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
)
ONLY = {"dropout": 0.0, "output_attentions": False, "is_causal": True}  # implemented for this value alone


def longreach_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one layer. query [B, H, T, D], key and value [B, G, T, D], post-RoPE. Returns ([B, T, H, D], None).

    Raises Unsupported for a keyword that is not implemented, CalledOutside without an attached model around it.
    """
    step = current()
    _refuse_unknown(kwargs, attention_mask)
    call = _layer_call(step, module, query, key, value, kwargs)
    window = kwargs.get("sliding_window")
    if window is None:
        outcome = step.method.run(call, _state(step, call))
        method, dense = step.method.name, Spans.dense()
    else:
        dense = Spans.window(int(window))
        outcome = Outcome(call.attend(dense), Reads((dense,), (dense,)), f"sliding window of {window}")
        method = "dense"
    step.layers_seen += 1
    step.ledger.add(step.phase, call, method, step.impl, outcome, dense)
    if step.observe is not None:
        step.observe(step.phase, call, outcome)
    return step.rectangle(outcome.partial.out.to(query.dtype)), None


def _refuse_unknown(kwargs: dict[str, Any], attention_mask: Tensor | None) -> None:
    if attention_mask is not None:
        raise Unsupported("the model built an attention mask of its own; longreach handles 2-D padding masks only")
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


def _layer_call(
    step: Step, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> LayerCall:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise Unsupported(f"{type(module).__name__} has no layer_idx, so its keys have no place in the cache")
    if query.shape[2] != step.shape[1] or key.shape[2] != step.shape[1]:
        raise InvalidInput(
            f"expected {step.shape[1]} tokens in attention, got {query.shape[2]} queries, {key.shape[2]} keys"
        )
    append = step.append
    rows = Rows(step.rows(query), append.seq, append.pos)
    kv = step.view_of(key, value) if step.cache is None else step.cache.kv.view(layer, append)
    if step.cache is not None and key.requires_grad:
        if step.cache.columns:
            raise Unsupported("gradients do not flow into a KV cache; call the model under torch.no_grad()")
        kv = step.view_of(key, value)
    scale = kwargs.get("scaling")

    def pre_rope() -> tuple[Tensor, Tensor]:
        if layer not in step.rotary:
            raise Unsupported(
                f"{step.method.name} needs queries before rotation, and layer {layer} of this model gets no "
                f"rotary embedding (position_embeddings)"
            )
        cos, sin = step.rotary[layer]
        return step.rows(before_rotation(module, query, cos, sin)), step.rows(before_rotation(module, key, cos, sin))

    return LayerCall(
        layer=layer,
        rows=rows,
        kv=kv,
        slots=append.slots,
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=kwargs.get("softcap"),
        sink_logit=kwargs.get("s_aux"),
        shard=shard_of(module, key.shape[1]),
        impl=step.impl,
        pre_rope=pre_rope,
    )


def _state(step: Step, call: LayerCall) -> Any:
    """The method's state for this layer: it lives in the cache and dies with it."""
    if step.cache is None:
        return step.method.new_state(call, len(step.append.host_slots))
    held = step.cache.kv.state
    place = (step.method.name, call.layer)
    if place not in held:
        fresh = step.method.new_state(call, step.cache.batch)
        if fresh is None:
            return None
        held[place] = fresh
    return held[place]
