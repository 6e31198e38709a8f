"""Names of chunks follow from model, dtype, prefix and tokens, and from nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
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
    for ids in (np.array([1, 2], np.uint16), [np.int64(1), np.int32(2)], iter((1, 2))):
        assert name == ChunkKey.of("m", "float16", [7], ids).name  # type: ignore[arg-type]


def test_a_name_is_the_same_in_another_process() -> None:
    code = "from longreach.store import ChunkKey; print(ChunkKey.of('m', 'float32', [5], range(9)).name)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert told == ChunkKey.of("m", "float32", [5], range(9)).name
    assert len(told) == 64


@pytest.mark.parametrize(
    "ids", [
        [1.0], [True], ["1"], torch.zeros(2), torch.zeros(1, 2, dtype=torch.long), [1, 2**63], [-(2**70)],
        torch.tensor([2**64 - 1], dtype=torch.uint64), 5, None, "12", np.zeros(2), np.zeros((1, 2), np.int64),
        np.array([2**64 - 1], np.uint64), [np.float32(1)], [np.bool_(True)], [[1]],
        torch.zeros(2, dtype=torch.long, device="meta"), torch.zeros(2, dtype=torch.long).to_sparse(),
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


@pytest.mark.parametrize("how", ["meta", "sparse"])
def test_a_tensor_without_bytes_of_its_own_is_no_part_of_a_chunk(how: str) -> None:
    one = chunk(1)
    other = tuple(k.to("meta") if how == "meta" else k.to_sparse() for k in one.keys)
    with pytest.raises(InvalidInput, match=f"keys of layer 0: expected a plain tensor, got .*{how}"):
        replace(one, keys=other)
