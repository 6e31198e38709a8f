"""Choice of the next token, and the end of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longreach.errors import InvalidInput


@dataclass(frozen=True)
class Ends:
    """eos: tokens that end an answer, none for an answer of full length; pad: the token after an end in a batch."""

    eos: tuple[int, ...]
    pad: int


def ends_of(model: Any, eos: int | Sequence[int] | None, pad: int | None, vocabulary: int) -> Ends:
    """The caller's settings, else the model's generation config; pad: else the first end. Raises InvalidInput."""
    own = model.generation_config
    ids = own.eos_token_id if eos is None else eos
    found = () if ids is None else tuple(ids) if isinstance(ids, (Sequence, set)) else (ids,)
    if eos is None:  # a token the model cannot make ends nothing
        found = tuple(t for t in found if t < vocabulary)
    filler = own.pad_token_id if pad is None else pad
    filler = (found[0] if found else 0) if filler is None else filler
    for name, token in (*(("eos_token_id", t) for t in found), ("pad_token_id", filler)):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise InvalidInput(f"{name}: expected a token in [0, {vocabulary}), got {token!r}")
    return Ends(found, filler)


class Sampler:
    """Draws tokens as transformers' sampling does: temperature, then top-k, then top-p, then one draw a sequence."""

    def __init__(
        self,
        model: Any,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        generator: torch.Generator | None,
    ):
        """None: the model's generation config, else transformers' own default (1.0, 50, 1.0)."""
        own = model.generation_config
        values = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
        for name, default in defaults.items():
            found = getattr(own, name, None)
            values[name] = values[name] if values[name] is not None else default if found is None else found
        heat, most, share = values["temperature"], values["top_k"], values["top_p"]
        if not isinstance(heat, (int, float)) or isinstance(heat, bool) or not 0 < heat < float("inf"):
            raise InvalidInput(
                f"temperature: expected a finite number > 0, got {heat!r}; for greedy leave do_sample out"
            )
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise InvalidInput(f"top_k: expected a count >= 0 (0: no limit), got {most!r}")
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
            raise InvalidInput(f"top_p: expected a number in (0, 1], got {share!r}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InvalidInput(f"generator: expected a torch.Generator, got {type(generator).__name__}")
        if generator is not None and generator.device.type != model.device.type:
            raise InvalidInput(f"generator: expected one on {model.device} like the model, got {generator.device}")
        self.generator: torch.Generator | None = generator
        self.warpers: LogitsProcessorList = LogitsProcessorList()
        if heat != 1.0:
            self.warpers.append(TemperatureLogitsWarper(float(heat)))
        if most:
            self.warpers.append(TopKLogitsWarper(most))
        if share < 1.0:
            self.warpers.append(TopPLogitsWarper(float(share)))

    def __call__(self, logits: Tensor) -> Tensor:
        """int64 [B] from logits [B, V]; no device sync."""
        scores = self.warpers(torch.empty(0, dtype=torch.int64), logits.float())  # type: ignore[arg-type]
        return torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]


def greedy(logits: Tensor) -> Tensor:
    """int64 [B] from logits [B, V]."""
    return logits.argmax(-1)
