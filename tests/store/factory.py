"""Chunks that follow from a number, so that any process can say what a stored one must hold."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from longreach.store import Chunk, ChunkStore

ENDING = ".safetensors"


def chunk(
    number: int = 0,
    tokens: int = 4,
    *,
    model: str = "a model",
    dtype: torch.dtype = torch.bfloat16,
    prefix: tuple[int, ...] = (),
    layers: int = 2,
    dependence: bool = False,
) -> Chunk:
    """Layers differ in KV heads, keys and values in head dim; every number gives other tokens and tensors."""
    generator = torch.Generator().manual_seed(number)

    def draw(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, tokens, dim, generator=generator).to(dtype)

    keys = [draw(1 + i, 6) for i in range(layers)]
    values = [draw(1 + i, 4) for i in range(layers)]
    one = Chunk.of(model, prefix, range(1000 * number, 1000 * number + tokens), keys, values)
    if not dependence:
        return one
    return replace(one, dependence=torch.rand(tokens, generator=generator, dtype=torch.float64))


def same(one: Chunk | None, other: Chunk) -> bool:
    """Equal bit by bit."""
    if one is None or one.key != other.key or len(one.keys) != len(other.keys):
        return False
    if one.dependence is None or other.dependence is None:
        if one.dependence is not other.dependence:
            return False
    elif not torch.equal(one.dependence, other.dependence):
        return False
    pairs = zip(
        (one.prefix, one.tokens, *one.keys, *one.values), (other.prefix, other.tokens, *other.keys, *other.values)
    )
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def size(one: Chunk, folder: Path) -> int:
    """Of its file."""
    with ChunkStore(folder / "a store of its own") as store:
        store.put(one)
        return store.entries()[0].bytes


def path(folder: Path, one: Chunk) -> Path:
    return folder / (one.key.name + ENDING)


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its exit status, minus the signal that ended it. What it raises is shown, status 1."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    """As by kill -9: nothing runs after this."""
    os.kill(os.getpid(), signal.SIGKILL)
