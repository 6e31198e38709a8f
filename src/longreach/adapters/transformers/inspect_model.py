"""What longreach can do with a model, from its configuration alone: no weights are read or allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longreach.adapters.transformers.automatic_plans import planned_shape
from longreach.adapters.transformers.checks import (
    cache_windows,
    check_levels,
    check_model,
    decoder_of,
    shape_of,
    text_config,
)
from longreach.adapters.transformers.hybrid import recurrent_layers
from longreach.adapters.transformers.latent import kernels_refusal
from longreach.adapters.transformers.load import broken_config, model_path, quiet, register_variants
from longreach.errors import LongreachError, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape
from longreach.methods.registry import METHODS, method_class
from longreach.plans import KINDS, default_file

CONFIG = "config.json"
ELEMENT = 2  # bytes of a number of the cache in bf16 and fp16


@dataclass(frozen=True)
class ModelFit:
    """What longreach can do with a model.

    name: the model's class. parameters: how many. refused: why longreach does not attach to it, None if it does.
    shape: None where the model is refused before it is known. windows: layer -> window, of layers with sliding windows.
    limit: the longest context in tokens that the configuration states, None if it states none.
    methods: attention method -> why it does not fit with its default options, None if it does.
    plans: method -> the plan that is shipped for the model. automatic: methods whose plan a session makes of its first
    prompt, as none is shipped. recurrent: how many layers keep a recurrent state; shape and windows count those that
    attend. gpu: why a GPU does not compute the model's attention but with impl="reference"; None if it does.
    """

    name: str
    parameters: int
    refused: str | None
    shape: ModelShape | None
    windows: dict[int, int]
    limit: int | None
    methods: dict[str, str | None]
    plans: dict[str, str]
    automatic: tuple[str, ...] = ()
    recurrent: int = 0
    gpu: str | None = None

    def kv_bytes(self, tokens: int, batch: int = 1, element: int = ELEMENT) -> int:
        """Bytes of keys and values of a context. Layers with a sliding window keep all tokens too; the state of
        recurrent layers, whose size no context changes, is not included."""
        assert self.shape is not None
        return batch * tokens * self.shape.token_numbers * element


def inspect_model(model: str | Path) -> ModelFit:
    """What longreach can do with the model of a folder, of a config.json, or with "mini".

    Checks what `attach` checks, on a model without memory. What only a pass shows, such as an unknown mask, is refused
    there. Raises ModelFileError where there is no configuration, or transformers cannot read it.
    """
    try:
        made = without_weights(model)
    except Unsupported as error:
        return ModelFit(str(model), 0, str(error), None, {}, None, {}, {})
    name, parameters = type(made).__name__, sum(p.numel() for p in made.parameters())
    try:
        decoder = decoder_of(made)
        check_model(made, decoder, rotary=False, placed=False)
        shape = shape_of(made)
    except LongreachError as error:
        return ModelFit(name, parameters, str(error), None, {}, None, {}, {})
    planned = planned_shape(made)
    methods = {known: _reason(made, method_class(known)()) for known in METHODS}
    automatic = tuple(known for known in METHODS if method_class(known)().plan_maker(planned) is not None)
    plans = {kind: path.stem for kind in KINDS if (path := default_file(kind, shape)) is not None}
    limit = getattr(text_config(made), "max_position_embeddings", None)
    recurrent = len(recurrent_layers(text_config(made)))
    gpu = kernels_refusal(name, shape)
    windows = cache_windows(made)
    return ModelFit(name, parameters, None, shape, windows, limit, methods, plans, automatic, recurrent, gpu)


def unfit_methods(model: PreTrainedModel) -> dict[str, str]:
    """Name -> reason, for methods that a model cannot use with their default options: no plan fits, or no rotation is
    there to undo.

    Raises Unsupported for a model that longreach does not attach to.
    """
    check_model(model, decoder_of(model), rotary=False)
    reasons = {name: _reason(model, method_class(name)()) for name in METHODS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def without_weights(model: str | Path) -> PreTrainedModel:
    """The model of a folder, of a config.json, or "mini", on the meta device: its modules, but no memory.

    Raises ModelFileError, and Unsupported where transformers has no causal language model of this kind.
    """
    path = Path(model)
    path = path.parent if path.name == CONFIG and path.is_file() else model_path(model)
    register_variants(path)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a malformed file makes transformers raise anything at all
        raise broken_config(path, error) from error
    try:
        with quiet(), torch.device("meta"):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Unsupported(
            f"transformers cannot make a causal language model of type {config.model_type!r}: {reason[:200]}"
        ) from error
    return made


def check_method(model: PreTrainedModel, method: AttentionMethod, slot: str = "decode") -> None:
    """Raise what `attach` raises for a model and a method of a slot, without attaching."""
    decoder = decoder_of(model)
    check_model(model, decoder, rotary=method.needs_pre_rope, frequencies=method.needs_frequencies, placed=False)
    check_levels(model, evicts=False, **{slot: method.name})
    method.check(planned_shape(model))


def _reason(model: PreTrainedModel, method: AttentionMethod) -> str | None:
    try:
        check_method(model, method)
    except LongreachError as error:
        return str(error)
    return None
