"""Settings of a model's generation config that shape answers and that the loop does not have: refused by name."""

from __future__ import annotations

from typing import Any

from longreach.adapters.transformers.generate import refuse_search
from longreach.errors import Unsupported

SHAPING: dict[str, Any] = {  # what transformers' generate reads besides what the loop's own options say -> no effect
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


def refuse_settings(model: Any, *, sampled: bool) -> None:
    """Raise Unsupported where transformers' generate would choose other tokens than the loop can."""
    refuse_search(model, {})
    for name, idle in (SHAPING | SAMPLING if sampled else SHAPING).items():
        value = getattr(model.generation_config, name, None)
        if value is not None and value != idle:
            raise Unsupported(
                f"{name}={value!r} in the model's generation config: longreach.generate does not have it, and its "
                f"answers would differ from transformers'; use model.generate with longreach attached, or set "
                f"model.generation_config.{name} = None"
            )
