"""Token ids of a prompt, and the stored chunks that cover some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.slots import PromptParts
from longreach.store import Chunk
from longreach.store.key import as_ids


class PlacedChunk(NamedTuple):
    """A stored chunk and the position of its first token in the prompt."""

    start: int
    chunk: Chunk


@dataclass(frozen=True, eq=False)
class FusedPrompt:
    """Token ids of a prompt, and chunks that hold the keys and values of some of them, in the order of the prompt.

    What follows the last chunk is the question; there must be one. Raises InvalidInput for chunks that overlap, lie
    outside, or are of other tokens than those at their place.
    """

    ids: tuple[int, ...]
    chunks: tuple[PlacedChunk, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for number, (start, chunk) in enumerate(self.chunks):
            tokens, where = tuple(chunk.tokens.tolist()), f"chunk {number}, at token {start}"
            if start < end:
                raise InvalidInput(f"{where}: expected at token {end} or later, where the one before it ends")
            end = start + len(tokens)
            if self.ids[start:end] != tokens:
                raise InvalidInput(f"{where}: it holds other tokens than the prompt of {len(self.ids)} has there")
        if end >= len(self.ids):
            raise InvalidInput(
                f"a prompt of {len(self.ids)} tokens has none after its chunks; the question follows them"
                if self.ids
                else "the prompt is empty; give at least the question's tokens"
            )

    @classmethod
    def of(cls, parts: Sequence[Sequence[int] | Tensor | Chunk]) -> FusedPrompt:
        """The prompt that these parts make, one behind the other: token ids, or a stored chunk."""
        ids, chunks = list[int](), list[PlacedChunk]()
        for part in parts:
            if isinstance(part, Chunk):
                chunks.append(PlacedChunk(len(ids), part))
                part = part.tokens
            ids += as_ids(part).tolist()
        return cls(tuple(ids), tuple(chunks))

    @property
    def question(self) -> int:
        """The first token after the last chunk."""
        return max((start + len(chunk.tokens) for start, chunk in self.chunks), default=0)

    def parts(self, device: torch.device, *, chunk_frequencies: bool = True) -> PromptParts:
        """For a fusion method. device: the model's. chunk_frequencies: whether the prompt is rotated by the frequencies
        that its chunks were computed with; if not (longrope), none of them is exact."""
        count, ids = len(self.ids), torch.tensor(self.ids)
        stored, exact = torch.zeros(2, count, dtype=torch.bool)
        before, after = torch.zeros(2, count, dtype=torch.int64)
        dependence, known = torch.zeros(count, dtype=torch.float64), True
        for start, chunk in self.chunks:
            here = slice(start, start + len(chunk.tokens))
            stored[here] = True
            behind_its_own = start == len(chunk.prefix) and torch.equal(ids[:start], chunk.prefix)
            exact[here] = sure = chunk_frequencies and behind_its_own
            before[here] = torch.arange(len(chunk.tokens))
            after[here] = before[here].flip(0)
            if chunk.dependence is not None:
                dependence[here] = chunk.dependence
            known &= sure or chunk.dependence is not None
        return PromptParts(stored, exact, before, after, self.question, dependence if known else None, device)

    def local_positions(self, device: torch.device) -> Tensor:
        """int64 [N]: where each stored token was computed, behind its chunk's prefix; its own position elsewhere.

        Raises InvalidInput for a position past the prompt's end, by which the model has not rotated.
        """
        found = torch.arange(len(self.ids))
        for number, (start, chunk) in enumerate(self.chunks):
            end = len(chunk.prefix) + len(chunk.tokens)
            if end > len(self.ids):
                raise InvalidInput(
                    f"chunk {number} was computed at positions up to {end - 1}, past the prompt's {len(self.ids)} "
                    f"tokens; compute it behind a shorter prefix"
                )
            found[start : start + len(chunk.tokens)] += len(chunk.prefix) - start
        return found.to(device)
