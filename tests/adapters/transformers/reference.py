"""What transformers' own eager attention answers, in fp32 and fp64, computed once for all tests of a process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longreach import attach
from longreach.testing.tiny import PAD_ID, random_tokens, tiny_model

STEPS = 24
PROMPT = 40
LENGTHS = (40, 23, 9)  # of the sequences of a left-padded batch


@dataclass(frozen=True)
class Generated:
    """tokens [B, steps]; logits [B, steps, V], fp32."""

    tokens: Tensor
    logits: Tensor


@cache
def model_of(family: str) -> PreTrainedModel:
    """One model a family and process. Tests leave it as they found it."""
    return tiny_model(family)


def prompt(length: int = PROMPT, *, seed: int = 1) -> Tensor:
    """int64 [1, length]."""
    return random_tokens(1, length, seed=seed)


def padded_batch(lengths: tuple[int, ...] = LENGTHS, *, right: bool = False) -> tuple[Tensor, Tensor]:
    """(tokens, mask), both [B, longest], padded on the left (or right)."""
    longest = max(lengths)
    tokens = random_tokens(len(lengths), longest, seed=2)
    column = torch.arange(longest)
    limit = torch.tensor(lengths)[:, None]
    mask = column < limit if right else column >= longest - limit
    return tokens.masked_fill(~mask, PAD_ID), mask.long()


def generate(
    model: Any, tokens: Tensor, mask: Tensor | None = None, *, steps: int = STEPS, **options: Any
) -> Generated:
    """Greedy (unless options say otherwise) generation of exactly `steps` tokens."""
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens) if mask is None else mask,
        **{"max_new_tokens": steps, "do_sample": False, **options},
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = len(out.logits)
    return Generated(out.sequences[:, out.sequences.shape[1] - new :], torch.stack(out.logits, 1))


@dataclass(frozen=True)
class Expected:
    """Eager's answer, and the fp64 logits [B, steps, V] of its tokens."""

    answer: Generated
    truth: Tensor


def expect(family: str, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Expected:
    """What eager attention answers."""
    answer = generate(model_of(family), tokens, mask, **options)
    return Expected(answer, exact_logits(family, tokens, torch.ones_like(tokens) if mask is None else mask, answer))


@cache
def eager_one(family: str) -> Expected:
    """Eager's answer to `prompt()`."""
    return expect(family, prompt())


@cache
def eager_batch(family: str) -> Expected:
    """Eager's answer to `padded_batch()`."""
    return expect(family, *padded_batch())


@cache
def exact(family: str) -> PreTrainedModel:
    """The model in fp64, eager."""
    model = copy.deepcopy(model_of(family)).double()
    model.set_experts_implementation("eager")  # the grouped one knows no fp64
    return model


@torch.no_grad()
def exact_logits(family: str, tokens: Tensor, mask: Tensor, generated: Generated) -> Tensor:
    """fp64 logits [B, steps, V] of what was generated after tokens [B, T]: each sequence alone, without padding."""
    steps = generated.tokens.shape[1]
    rows = []
    for row, real, new in zip(tokens, mask.bool(), generated.tokens, strict=True):
        whole = torch.cat([row[real], new[:-1]])[None]
        rows.append(exact(family)(whole, use_cache=False).logits[0, -steps:])
    return torch.stack(rows)


def assert_same_answer(got: Generated, want: Expected) -> None:
    """Equal tokens; logits as close to fp64 as eager's, to a factor of 2 and the rounding of the output itself."""
    assert torch.equal(got.tokens, want.answer.tokens)
    rounding = 8 * torch.finfo(torch.float32).eps * want.truth.abs().max()
    error, theirs = ((x.logits - want.truth).abs().max() for x in (got, want.answer))
    assert error <= 2 * theirs + rounding, f"error {error:.2e}, eager's {theirs:.2e}"


def assert_same_steps(family: str, layers: set[int] | None = None) -> None:
    """64 greedy steps of an attached model are those of the plain one. layers: those in the report, if given."""
    with attach(model_of(family)) as session:
        got = generate(model_of(family), prompt(), steps=64)
        report = session.report().layers
        assert layers is None or {r.layer for r in report} == layers
        assert {r.phase for r in report} == {"prefill", "decode"}
    want = generate(model_of(family), prompt(), steps=64)
    assert torch.equal(got.tokens, want.tokens)
    assert (got.logits - want.logits).abs().max() < 1e-3 * want.logits.abs().max()
