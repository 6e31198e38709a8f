"""Stored chunks and their names: a name hashes all inputs of the content, so equal names mean equal chunks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_DIGEST = re.compile("[0-9a-f]{64}")


def digest(ids: Sequence[int] | Tensor) -> str:
    """sha256 of token ids (as little-endian int64), in hex; an empty sequence has one too."""
    return hashlib.sha256(as_ids(ids).numpy().astype("<i8").tobytes()).hexdigest()


def as_ids(ids: Sequence[int] | Tensor) -> Tensor:
    """Token ids as int64 [N] on the CPU; a tensor, an array of numpy or integers. Raises InvalidInput where they are no
    integers in one dimension."""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidInput(f"token ids: expected integers [N], got {ids.dtype} {list(ids.shape)}")
        ids = ids.tolist()
    if isinstance(ids, Tensor):
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InvalidInput(f"token ids: expected integers [N], got {ids.dtype} {list(ids.shape)}")
        if why := unreadable(ids):
            raise InvalidInput(f"token ids: expected a plain tensor, got {why}")
        whole = ids.detach().to("cpu", torch.int64).contiguous()
        if ids.dtype == torch.uint64 and bool((whole < 0).any()):
            raise InvalidInput("token ids: expected integers of 64 bits with a sign, got larger ones")
        return whole
    try:
        listed = list(ids)
    except TypeError:
        raise InvalidInput(f"token ids: expected a sequence of integers, got {type(ids).__name__}") from None
    for i in listed:
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)):
            raise InvalidInput(f"token ids: expected integers, got {i!r}")
    if any(not -(2**63) <= i < 2**63 for i in listed):
        raise InvalidInput(f"token ids: expected integers of 64 bits with a sign, got {max(listed, key=abs)}")
    return torch.tensor(listed, dtype=torch.int64)


def unreadable(x: Tensor) -> str | None:
    """Why a tensor's bytes cannot be stored as they are; None where they can."""
    if x.is_meta:
        return "one on the meta device, which holds nothing"
    if x.layout != torch.strided:
        return f"one of layout {x.layout}; make it dense (to_dense)"
    if type(x) not in (Tensor, torch.nn.Parameter):
        return f"a {type(x).__name__}"
    return None


@dataclass(frozen=True)
class ChunkKey:
    """Identifies a chunk: model fingerprint, name of the dtype ("bfloat16"), digests of prefix and tokens."""

    model: str
    dtype: str
    prefix: str
    tokens: str

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidInput(f"a chunk's key: expected the model's fingerprint, got {self.model!r}")
        if self.dtype not in DTYPES:
            raise Unsupported(f"a chunk of dtype {self.dtype!r}; the store holds {', '.join(DTYPES)}")
        for name in ("prefix", "tokens"):
            if not isinstance(got := getattr(self, name), str) or not _DIGEST.fullmatch(got):
                raise InvalidInput(f"a chunk's key: expected the sha256 of {name} in hex, got {got!r}; see ChunkKey.of")

    @classmethod
    def of(
        cls, model: str, dtype: str | torch.dtype, prefix: Sequence[int] | Tensor, tokens: Sequence[int] | Tensor
    ) -> ChunkKey:
        """The key of `tokens` [N] computed behind `prefix` [P] (empty: alone)."""
        return cls(model, str(dtype).removeprefix("torch."), digest(prefix), digest(tokens))

    @property
    def name(self) -> str:
        """The file's name without its ending: sha256 over all four, in hex."""
        return hashlib.sha256(json.dumps([self.model, self.dtype, self.prefix, self.tokens]).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Chunk:
    """All layers' keys, before RoPE, and values of one chunk.

    prefix: int64 [P], the tokens it was computed behind; tokens: int64 [N], N >= 1.
    keys, values: a tensor for each layer, [G, N, D] of the key's dtype; G and D may differ from layer to layer, and
    between keys and values. Tensors that a store returned are its memory-mapped file: writing to them changes neither
    the file nor what others read.
    dependence: float64 [N], finite and >= 0, how far each token's keys and values move when other tokens stand before
    the chunk; else None. It advises which tokens to recompute, and is in no key.
    Raises InvalidInput where these do not fit each other or the key.
    """

    key: ChunkKey
    prefix: Tensor
    tokens: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    dependence: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("prefix", "tokens"):
            object.__setattr__(self, name, as_ids(getattr(self, name)))
            if digest(getattr(self, name)) != getattr(self.key, name):
                raise InvalidInput(f"a chunk's {name}: expected the tokens that its key names, got others")
        for name in ("keys", "values"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        n = self.tokens.numel()
        if not n or not self.keys or len(self.keys) != len(self.values):
            raise InvalidInput(
                f"a chunk: expected tokens, and keys and values of every layer, got {n} tokens, keys of "
                f"{len(self.keys)} layers, values of {len(self.values)}"
            )
        for name, tensors in (("keys", self.keys), ("values", self.values)):
            for layer, x in enumerate(tensors):
                if why := unreadable(x):
                    raise InvalidInput(f"a chunk's {name} of layer {layer}: expected a plain tensor, got {why}")
                if x.dim() != 3 or x.shape[1] != n or not x.numel() or x.dtype != DTYPES[self.key.dtype]:
                    raise InvalidInput(
                        f"a chunk's {name} of layer {layer}: expected {self.key.dtype} [G, {n}, D], got "
                        f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
                    )
        if any(k.shape[0] != v.shape[0] for k, v in zip(self.keys, self.values, strict=True)):
            raise InvalidInput("a chunk: expected as many KV heads in a layer's values as in its keys")
        if self.dependence is not None:
            _check_dependence(self.dependence, n)

    @classmethod
    def of(
        cls,
        model: str,
        prefix: Sequence[int] | Tensor,
        tokens: Sequence[int] | Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> Chunk:
        """A chunk with the key that follows from the rest; its dtype is that of the first layer's keys."""
        if not keys:
            raise InvalidInput("a chunk: expected keys of every layer, got none")
        key = ChunkKey.of(model, keys[0].dtype, prefix, tokens)
        return cls(key, as_ids(prefix), as_ids(tokens), tuple(keys), tuple(values))

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))


def _check_dependence(x: Tensor, count: int) -> None:
    if why := unreadable(x):
        raise InvalidInput(f"a chunk's dependence: expected a plain tensor, got {why}")
    if x.dtype != torch.float64 or x.shape != (count,):
        raise InvalidInput(
            f"a chunk's dependence: expected float64 [{count}], got {str(x.dtype).removeprefix('torch.')} "
            f"{list(x.shape)}"
        )
    if not bool(((x >= 0) & (x < torch.inf)).all()):
        raise InvalidInput("a chunk's dependence: expected finite numbers of at least 0")
