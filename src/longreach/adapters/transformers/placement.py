"""Where the chunks of documents stand in a prompt: what is before each, which its key and its exactness depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.adapters.transformers.dependence import Tokens, other_chunk

BETWEEN = "\n\n"  # two documents, and the last one and the question


class ChunkPlace(NamedTuple):
    """A chunk of a document in a prompt.

    document: its number. before: int64, the tokens between the prompt's head and the chunk. other: tokens of the chunk
    behind which its dependence is measured, else None.
    """

    document: int
    tokens: Tokens
    before: Tensor
    other: Tokens | None


def places(documents: Sequence[Sequence[Tokens]], between: Tokens) -> list[ChunkPlace]:
    """All chunks of a prompt's documents, in order. documents: the tokens of each chunk of each; between: those that
    stand between two documents."""
    found, body = list[tuple[int, int, int]](), list[int]()
    for number, chunks in enumerate(documents):
        body += between if number else ()
        for piece, tokens in enumerate(chunks):
            found.append((number, piece, len(body)))
            body += tokens
    whole = torch.tensor(body, dtype=torch.int64)
    return [
        ChunkPlace(number, documents[number][piece], whole[:end], other_chunk(documents, number, piece))
        for number, piece, end in found
    ]
