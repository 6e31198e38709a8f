"""Dependence of a chunk's tokens on preceding text: computed once, when a chunk is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longreach.adapters.transformers.precompute import Precompute
from longreach.adapters.transformers.prompt_reader import Advance
from longreach.errors import InvalidInput
from longreach.store import Chunk

Tokens = Sequence[int]


class DependenceMeter:
    """Runs chunks once more, behind another chunk, and compares. The other chunk is read once for many."""

    def __init__(self, work: Precompute):
        self._work = work
        self._behind = Precompute(work.session, work.prefix, chunk=work.pass_tokens, known=work.fingerprint)

    def measured(self, chunk: Chunk, other: Tokens, progress: Advance = lambda done: None) -> Chunk:
        """The chunk, which was computed behind the prefix, with the dependence that shows behind the prefix and
        `other`.

        Of `other` its first tokens are taken, as many as the context has room for. progress: as Precompute.compute.
        Raises InvalidInput where there is room for none, for a chunk computed behind something else, and as
        Precompute.compute.
        """
        if not torch.equal(chunk.prefix, self._work.prefix):
            raise InvalidInput(
                f"dependence: expected a chunk computed behind the prefix of {len(self._work.prefix)} tokens alone, "
                f"got one behind {len(chunk.prefix)} or others; chunks behind more are exact or not used"
            )
        room = self._work.room(len(chunk.prefix) + len(chunk.tokens))
        if room is not None and room < 1:
            raise InvalidInput(
                f"dependence: a chunk of {len(chunk.tokens)} tokens behind a prefix of {len(chunk.prefix)} leaves no "
                f"room for another chunk before it; cut it into smaller ones (--chunk-tokens)"
            )
        again = self._behind.compute(chunk.tokens, progress, other[:room])
        return replace(chunk, dependence=movement(chunk, again))


def movement(chunk: Chunk, again: Chunk) -> Tensor:
    """float64 [N]: how far each token's keys and values differ between two computations of a chunk of N tokens.

    For a layer's keys before rotation, and for its values: the squared L2 distance of a token's two vectors over all KV
    heads, divided by the mean squared L2 norm of the chunk's N vectors. The result is the mean of these over the keys
    and the values of the middle half of the layers, L // 4 to L - L // 4 - 1 of L.
    """
    layers, total = len(chunk.keys), torch.zeros(len(chunk.tokens), dtype=torch.float64)
    middle = range(layers // 4, layers - layers // 4)
    for mine, theirs in ((chunk.keys, again.keys), (chunk.values, again.values)):
        for layer in middle:
            x, y = mine[layer].double(), theirs[layer].double()
            size = x.square().sum((0, 2)).mean()
            if size > 0:  # else all are zero, and nothing is relative to that
                total += (x - y).square().sum((0, 2)) / size
    return total / (2 * len(middle))


def other_chunk(documents: Sequence[Sequence[Tokens]], document: int, piece: int) -> Tokens | None:
    """The chunk to run a document's chunk behind, once more; None if there is no other.

    documents: the tokens of each chunk of each document. It is the first chunk of its document; for that one itself,
    the first of another document. A chunk of the same tokens is taken only if there is nothing else.
    """

    def found() -> Iterator[Tokens]:
        if piece:
            yield documents[document][0]
        yield from (chunks[0] for number, chunks in enumerate(documents) if number != document and chunks)

    mine, same = tuple(documents[document][piece]), None
    for tokens in found():
        if tuple(tokens) != mine:
            return tokens
        same = tokens
    return same
