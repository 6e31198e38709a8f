"""Names of chunks follow from model, dtype, prefix and tokens, and from nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from longreach.errors import InvalidInput, Unsupported
from longreach.store import Chunk, ChunkKey, digest
from tests.store.factory import chunk


def test_each_part_of_a_key_changes_its_name() -> None:
    keys = [
        ChunkKey.of("m", "bfloat16", [], [1, 2]),
        ChunkKey.of("n", "bfloat16", [], [1, 2]),
        ChunkKey.of("m", "float16", [], [1, 2]),
        ChunkKey.of("m", "bfloat16", [1], [2]),
        ChunkKey.of("m", "bfloat16", [1, 2], []),
        ChunkKey.of("m", "bfloat16", [], [2, 1]),
        ChunkKey.of("m", "bfloat16", [], [12]),
    ]
    assert len({key.name for key in keys}) == len(keys)


def test_ids_may_come_as_any_integers() -> None:
    name = ChunkKey.of("m", torch.float16, (7,), [1, 2]).name
    assert name == ChunkKey.of("m", "float16", torch.tensor([7]), torch.tensor([1, 2], dtype=torch.int32)).name


def test_a_name_is_the_same_in_another_process() -> None:
    code = "from longreach.store import ChunkKey; print(ChunkKey.of('m', 'float32', [5], range(9)).name)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert told == ChunkKey.of("m", "float32", [5], range(9)).name
    assert len(told) == 64


@pytest.mark.parametrize(
    "ids", [
        [1.0], [True], ["1"], torch.zeros(2), torch.zeros(1, 2, dtype=torch.long), [1, 2**63], [-(2**70)],
        torch.tensor([2**64 - 1], dtype=torch.uint64),
    ],
)  # fmt: skip
def test_what_is_no_token_ids_is_refused(ids: object) -> None:
    with pytest.raises(InvalidInput, match="token ids"):
        digest(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"model": ""}, {"prefix": "0"}, {"tokens": "Z" * 64}])
def test_what_is_no_key_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="key"):
        replace(ChunkKey.of("m", "float32", [], [1]), **change)


def test_a_dtype_that_the_store_does_not_hold_is_named() -> None:
    with pytest.raises(Unsupported, match="float8_e4m3fn"):
        ChunkKey.of("m", torch.float8_e4m3fn, [], [1])


def test_a_chunk_must_fit_its_key() -> None:
    one = chunk(1)
    for change in (
        {"tokens": one.tokens + 1},
        {"prefix": torch.tensor([3])},
        {"key": replace(one.key, dtype="float32")},
        {"keys": one.keys[:1]},
        {"keys": (), "values": ()},
        {"keys": tuple(k[:, 1:] for k in one.keys)},
        {"values": tuple(v[0] for v in one.values)},
        {"values": tuple(v[:, :, :0] for v in one.values)},
        {"values": tuple(v.repeat(2, 1, 1) for v in one.values)},
    ):
        with pytest.raises(InvalidInput, match="chunk"):
            replace(one, **change)
    with pytest.raises(InvalidInput, match="tokens"):
        Chunk.of("m", [], [], one.keys, one.values)
    with pytest.raises(InvalidInput, match="every layer"):
        Chunk.of("m", [], [1], [], [])
