"""Hooks on attention's contribution to the residual stream, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach.adapters.transformers.checks import decoder_of, text_config
from longreach.adapters.transformers.rotary import attention_modules
from longreach.errors import Unsupported
from longreach.methods.model_config import attention_layers

See = Callable[[int, Tensor, Tensor], None]


@contextmanager
def residuals(model: PreTrainedModel, see: See) -> Iterator[None]:
    """Within this block, `see(layer, x, out)` is called in each layer of each pass.

    x [B, T, width]: the residual stream before the layer, and before its norm; out [B, T, width]: what attention adds
    to it, after a norm of its own where the layer has one (Gemma 2, OLMo 2, GLM 4) and a factor where the model has one
    (Granite). Raises Unsupported for a model whose layers cannot be asked.
    """
    decoder = decoder_of(model)
    factor = getattr(text_config(model), "residual_multiplier", None) or 1.0
    number = {layer: n for n, layer in enumerate(attention_layers(text_config(model)))}
    names = {id(module): name for name, module in decoder.named_modules()}
    handles = []
    try:
        for attention in attention_modules(decoder):
            block = decoder.get_submodule(names[id(attention)].rpartition(".")[0])
            if block is decoder or isinstance(block, nn.ModuleList):
                raise Unsupported(
                    f"{type(attention).__name__} of {type(model).__name__} stands in no layer of its own, so its part "
                    f"in the residual stream is not known"
                )
            layer = number[int(attention.layer_idx)]  # type: ignore[arg-type]
            handles += _Layer(layer, factor, see).hooks(block, attention)
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Layer:
    """Notes of one layer in one pass."""

    def __init__(self, layer: int, factor: float, see: See):
        self.layer, self.factor, self.see = layer, factor, see
        self.x: Tensor | None = None
        self.out: Tensor | None = None

    def hooks(self, block: nn.Module, attention: nn.Module) -> list[Any]:
        norms = [m for m in block.children() if m is not attention and "norm" in type(m).__name__.lower()]
        return [
            block.register_forward_pre_hook(self._begin, with_kwargs=True),
            attention.register_forward_hook(self._attended),
            *(norm.register_forward_hook(self._normed) for norm in norms),
            block.register_forward_hook(self._end),
        ]

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.x, self.out = args[0] if args else kwargs["hidden_states"], None

    def _attended(self, attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.out = output[0] if isinstance(output, tuple) else output

    def _normed(self, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if args and args[0] is self.out:  # a norm of attention's own output, before it is added
            self.out = output

    def _end(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x, out = self.x, self.out
        self.x = self.out = None
        if x is None or out is None:
            raise Unsupported(f"layer {self.layer} ({type(block).__name__}) ran without its attention")
        self.see(self.layer, x, out if self.factor == 1.0 else out * self.factor)
