"""Read prompts that contain stored chunks. If a pass fails, the cache is restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.checks import decoder_of
from longreach.adapters.transformers.fusing.one_pass import FusedPass, FusionReport
from longreach.adapters.transformers.fusing.prompt import FusedPrompt
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.prompt_tokens import context_limit
from longreach.adapters.transformers.ranks import ranks_of, together
from longreach.errors import ConcurrentUse, InvalidInput
from longreach.methods.base import is_count


def read(session: Session, cache: LongreachCache, prompt: FusedPrompt, *, then: int = 0) -> tuple[Tensor, FusionReport]:
    """Put a prompt into an empty cache by the session's fusion method; logits [V] in fp32 after it, and what was done.

    then: tokens that the answer will take; the cache makes room for them at once. Decode methods observe all tokens.
    After any error the cache is empty again. Raises InvalidInput (no fusion method; a cache that is not empty; a chunk
    with other layers, heads or dtype than the model; a token id outside the model's vocabulary; prompt and answer
    longer than its context; more tokens that must stay than the eviction method keeps), Unsupported (a model whose
    layers get no pair (cos, sin), or that is not its kind of decoder), OutOfMemory, ConcurrentUse. This function does
    not check that chunks come from this model: their keys contain its fingerprint.
    Under tensor parallelism every rank must read the same prompt; the first rank chooses the tokens for all. An
    error on one rank before a pass, while tokens are chosen or after a pass makes all raise (OtherRankFailed). An error
    within a pass does not: the other ranks wait in the model's collectives until the process group's timeout.
    """
    logits, reports = read_batch(session, cache, [prompt], then=then)
    return logits[0], reports[0]


def read_batch(
    session: Session, cache: LongreachCache, prompts: Sequence[FusedPrompt], *, then: int = 0
) -> tuple[Tensor, list[FusionReport]]:
    """As `read`, of prompts that share their chunks, in an empty cache of as many sequences; logits [B, V] after them.

    Prompts may differ in length, and tokens are chosen for each as if it were alone. Stored keys and values are loaded
    once. Layers that run for all tokens do so for those of all prompts. Rotary frequencies that follow the length of a
    prompt (longrope, dynamic) are those of the longest, as in any batch. Raises as `read`, and InvalidInput for no
    prompts, or ones whose chunks are not the same at the same places.
    """
    ranks = ranks_of(decoder_of(session.model))
    with together(ranks):
        _check(session, cache, prompts, then)
    assert session.fuse is not None
    counts = [len(prompt.ids) for prompt in prompts]
    try:
        with (
            together(ranks), memory_errors(), session.prompt_end(max(counts)), cache.restored_on_error(),
            torch.no_grad(),
        ):  # fmt: skip
            if session.evict is not None:  # the question's rows vote
                asking = [count - prompt.question for count, prompt in zip(counts, prompts, strict=True)]
                first = min((start for start, _ in prompts[0].chunks), default=0)
                for count, last in zip(counts, asking, strict=True):
                    session.evict.check_parts(count, first, last)
                cache.evict_next(replace(session.evict, window=max(asking)), first, asking)
            fused = FusedPass(session, cache, prompts, session.fuse, ranks, then)
            return fused.run(), fused.reports()
    except ConcurrentUse:  # the cache is another caller's
        raise
    except BaseException:
        cache.empty()
        raise


def _check(session: Session, cache: LongreachCache, prompts: Sequence[FusedPrompt], then: int) -> None:
    if session.fuse is None:
        raise InvalidInput("the session has no fusion method; attach with fuse='a3' or another one")
    if not prompts:
        raise InvalidInput("expected at least one fused prompt, got none")
    if not is_count(then):
        raise InvalidInput(f"then: expected a count of tokens >= 0, got {then!r}")
    longest, limit = max(len(prompt.ids) for prompt in prompts), context_limit(session.model)
    if limit is not None and longest + then > limit:
        raise InvalidInput(
            f"the prompt is {longest} tokens and the answer may take {then}, but the model's context is {limit} "
            f"tokens; shorten them by {longest + then - limit} tokens"
        )
    first, *others = [[(start, chunk.key) for start, chunk in prompt.chunks] for prompt in prompts]
    for number, chunks in enumerate(others, 1):
        if chunks != first:
            raise InvalidInput(
                f"prompts of a batch share their chunks, and prompt {number} has others than prompt 0, or has them "
                f"elsewhere; read it in a batch of its own"
            )
    if cache.columns or cache.batch != len(prompts):
        one = len(prompts) == 1
        what = "a fused prompt begins" if one else f"{len(prompts)} fused prompts begin"
        raise InvalidInput(
            f"{what} an empty cache of {'one sequence' if one else f'{len(prompts)} sequences'}; this one holds "
            f"{cache.columns} columns of {cache.batch}"
        )
