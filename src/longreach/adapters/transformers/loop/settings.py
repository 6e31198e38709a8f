"""Settings of a generation config that change answers and that the loop lacks: refused or listed by name."""

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


def refuse_settings(model: Any, *, sampled: bool) -> None:
    """Raise Unsupported where transformers' generate would choose other tokens than the loop can."""
    refuse_search(model, {})
    for name, value in _active(model, SHAPING | SAMPLING if sampled else SHAPING).items():
        raise Unsupported(
            f"{name}={value!r} in the model's generation config: longreach.generate does not have it, and its "
            f"answers would differ from transformers'; use model.generate with longreach attached, or set "
            f"model.generation_config.{name} = None"
        )
