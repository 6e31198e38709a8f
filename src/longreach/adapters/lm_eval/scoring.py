"""Log-likelihoods of continuations: contexts are read once, their continuations scored one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from longreach.adapters.transformers import LongreachCache, Session

Scoring = Literal["prefill", "decode"]
Tokens = Sequence[int]
Score = tuple[float, bool]  # log-likelihood in nats; whether greedy search would choose these tokens


class Scorer:
    """Scores with an attached model, in batches of contexts.

    by: "prefill": a continuation is read in passes of many tokens, as the context is, so only the prefill method acts.
    "decode": it is read token by token, so that the decode method makes each of its scores. The context's last token
    belongs to the continuation's passes: the first score, all that a choice of one letter has, comes from it.
    chunk: columns per pass.
    """

    def __init__(self, session: Session, chunk: int, by: Scoring):
        self.session, self.chunk, self.by = session, chunk, by
        self._cache: LongreachCache | None = None

    @torch.no_grad()
    def score(self, contexts: Sequence[Tokens], continuations: Sequence[Sequence[Tokens]]) -> list[list[Score]]:
        """The scores of each context's continuations, in their order. All have at least one token."""
        cache = self._empty_cache(len(contexts))
        ids, mask = self._rectangle([context[:-1] for context in contexts], left=True)
        width = ids.shape[1]
        longest = max(len(tokens) for each in continuations for tokens in each)
        with self.session.prompt_end(width) as phases:
            phases.room = width + longest
            for first in range(0, width, self.chunk):
                self._pass(cache, ids[:, first : first + self.chunk], mask[:, : first + self.chunk], 1)
        found: list[list[Score]] = [[] for _ in contexts]
        for turn in range(max(map(len, continuations))):
            wanted = [each[turn] if turn < len(each) else () for each in continuations]
            read = [(context[-1], *tokens[:-1]) if tokens else () for context, tokens in zip(contexts, wanted)]
            scores = self._continue(cache, mask, read, wanted)
            for row, tokens, score in zip(found, wanted, scores, strict=True):
                row += [score] if tokens else []
        return found

    def _continue(
        self, cache: LongreachCache, before: Tensor, read: Sequence[Tokens], wanted: Sequence[Tokens]
    ) -> list[Score]:
        """Scores of the tokens `wanted` [B], by the logits at the same places of `read`; the cache is then as
        before."""
        ids, mask = self._rectangle(read)
        targets, _ = self._rectangle(wanted)
        whole, width, columns = torch.cat([before, mask], 1), before.shape[1], ids.shape[1]
        size, prompt = (1, width) if self.by == "decode" else (self.chunk, width + columns)
        total = torch.zeros(len(read), dtype=torch.float64, device=ids.device)
        greedy = torch.ones(len(read), dtype=torch.bool, device=ids.device)
        touched = (self.session.decode,) if self.by == "decode" else ()
        with cache.rollback(*touched), self.session.prompt_end(prompt):
            for first in range(0, columns, size):
                part = slice(first, first + size)
                logits = self._pass(cache, ids[:, part], whole[:, : width + first + size], size).float()
                real, target = mask[:, part].bool(), targets[:, part]
                logs = logits.log_softmax(-1).gather(2, target[..., None])[..., 0]
                total += logs.double().masked_fill(~real, 0.0).sum(1)
                greedy &= ((logits.argmax(-1) == target) | ~real).all(1)
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    def _pass(self, cache: LongreachCache, ids: Tensor, mask: Tensor, keep: int) -> Tensor:
        """Logits [B, min(T, keep), V] of ids [B, T], the last of the columns of mask [B, past + T]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.session.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=keep,
        )  # fmt: skip
        return out.logits

    def _empty_cache(self, batch: int) -> LongreachCache:
        """An empty cache for `batch` rows: the last batch's if it has that size, so its memory is used again."""
        if self._cache is None or self._cache.batch != batch:
            self._cache = None
            self._cache = self.session.new_cache(batch)
        self._cache.empty()
        return self._cache

    def _rectangle(self, rows: Sequence[Tokens], *, left: bool = False) -> tuple[Tensor, Tensor]:
        """int64 [B, T]: the rows, padded with 0 on one side, and the mask of their tokens."""
        shape, device = (len(rows), max(map(len, rows))), self.session.model.device
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        mask = torch.zeros_like(ids)
        for row, (tokens, given) in enumerate(zip(rows, mask, strict=True)):
            place = slice(shape[1] - len(tokens), None) if left else slice(len(tokens))
            ids[row, place], given[place] = torch.tensor(tokens, dtype=torch.int64, device=device), 1
        return ids, mask
