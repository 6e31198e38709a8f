"""Settings of transformers' generate that change answers: which the loop has by itself, by transformers, or lacks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from longreach.adapters.transformers.generate import OTHER_SEARCHES, refuse_search
from longreach.errors import Unsupported

SHAPING: dict[str, Any] = {  # settings of transformers' generate without an option here -> value without effect
    "guidance_scale": 1,
    "sequence_bias": None,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
    "max_time": None,
    "stop_strings": None,
}
SAMPLING: dict[str, Any] = {"min_p": None, "top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
SEARCHING: dict[str, Any] = {"num_beams": 1, **dict.fromkeys(OTHER_SEARCHES)}
OF_A_DRAW: dict[str, Any] = {"top_k": 0, "top_p": 1}  # in addition to the temperature


def unapplied(model: Any, *, sampled: bool, applied: Collection[str] = ()) -> dict[str, Any]:
    """Settings that transformers' generate would apply, but greedy or temperature-only sampling here does not.

    Settings by name, as JSON takes them. applied: those that the caller applies itself.
    """
    idle = SHAPING | SEARCHING | (SAMPLING | OF_A_DRAW if sampled else {"do_sample": False})
    found = {name: value for name, value in _active(model, idle).items() if name not in applied}
    return {name: value if isinstance(value, (str, int, float)) else repr(value) for name, value in found.items()}


def _active(model: Any, idle: dict[str, Any]) -> dict[str, Any]:
    values = {name: getattr(model.generation_config, name, None) for name in idle}
    return {name: value for name, value in values.items() if value not in (None, False, idle[name])}


LACKING = {
    "guidance_scale": "it runs the model twice for a token",
    "stop_strings": "it needs stop_strings= and tokenizer=",
}
# arguments of transformers' generate that longreach.generate hands on
HANDED_ON = (
    *(name for name in (*SHAPING, *SAMPLING) if name != "guidance_scale"),
    "tokenizer",
    "logits_processor",
    "stopping_criteria",
    "num_return_sequences",
)


def by_transformers(model: Any, *, sampled: bool, given: Collection[str] = ()) -> bool:
    """Whether the model's generation config holds a setting that transformers has to apply.

    given: arguments of the call, which replace the config's. Raises Unsupported for those that the loop lacks.
    """
    refuse_search(model, {})
    found = _active(model, SHAPING | SAMPLING if sampled else SHAPING)
    for name, why in LACKING.items():
        if name in found and name not in given:
            raise Unsupported(
                f"{name}={found[name]!r} in the model's generation config: longreach.generate does not apply it, as "
                f"{why}; use model.generate with longreach attached, or set model.generation_config.{name} = None"
            )
    return bool(found)
