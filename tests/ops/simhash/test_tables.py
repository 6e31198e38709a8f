"""Building tables: what is in them, however the keys came, and in whatever memory."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops.simhash import HashTables, build
from tests.ops.simhash.cases import IMPLS, cut

POISON = 0xABCD


def random_codes(sequences: int, keys: int, bits: int, tables: int = 5, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (sequences, keys, 2, tables), generator=draw).to(torch.uint16)


def empty(sequences: int, capacity: int, bits: int, size: int, first: int, tables: int = 5) -> HashTables:
    """Tables in memory that holds poison, as one layer of a larger tensor."""
    ids = torch.full((sequences, 2, 2, tables, capacity), POISON, dtype=torch.uint16)
    segments, dtype = -(-capacity // size), torch.int32 if size == 65536 else torch.uint16
    offsets = torch.full((sequences, 2, 2, tables, segments, (1 << bits) + 1), POISON, dtype=dtype)
    stop = torch.full((sequences,), first, dtype=torch.int32)
    return HashTables(ids[:, 1], offsets[:, 1], stop, size, first)


def held_to(tables: HashTables, codes: Tensor) -> None:
    """Every bucket holds the ids of the keys with its code, ascending."""
    for b, stop in enumerate(tables.stop.tolist()):
        for begin in range(0, stop if stop > tables.first else 0, tables.size):
            keys = range(max(begin, tables.first), min(begin + tables.size, stop))
            if not keys:
                continue
            for g in range(tables.heads):
                for table in range(tables.tables):
                    offsets = tables.offsets[b, g, table, begin // tables.size].tolist()
                    ids = tables.ids[b, g, table, begin:].tolist()
                    code = codes[b, :, g, table].tolist()
                    assert offsets[0] == 0 and offsets[-1] == len(keys)
                    for bucket in range(1 << tables.bits):
                        found = ids[offsets[bucket] : offsets[bucket + 1]]
                        assert found == [n - begin for n in keys if code[n] == bucket]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [8, 32, 65536])
@pytest.mark.parametrize("first", [0, 5, 11])
def test_keys_come_in_any_chunks(impl: str, size: int, first: int) -> None:
    codes = random_codes(3, 90, bits=3)
    tables = empty(3, 90, 3, size, first)
    at, every = torch.full((3,), first), torch.arange(3)
    for steps in ([0, 0, 0], [1, 0, 30], [7, 2, 0], [40, 40, 40], [90 - first - 48, 1, 0]):
        count = torch.tensor(steps)
        build(tables, cut(codes, at, count), every, count, impl=impl)
        at = at + count
        assert tables.stop.tolist() == at.tolist()
        held_to(tables, codes)
    whole = empty(3, 90, 3, size, first)
    build(whole, codes[:, first:], every, at - first, impl=impl)
    for b, stop in enumerate(at.tolist()):
        assert torch.equal(whole.ids[b, ..., first:stop].long(), tables.ids[b, ..., first:stop].long()) or size > 8
        held_to(whole, codes)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", [1, 9, 16])
def test_bits(impl: str, bits: int) -> None:
    codes = random_codes(1, 40, bits, tables=2)
    codes[0, 3], codes[0, 5] = 0, (1 << bits) - 1
    tables = empty(1, 48, bits, 16, 0, tables=2)
    build(tables, codes, torch.tensor([0]), torch.tensor([40]), impl=impl)
    assert tables.bits == bits
    held_to(tables, codes)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("back", [0, 4, 17, 30, 33, 59])
def test_truncated_tables_go_on(impl: str, back: int) -> None:
    """Other keys take the places of those that were cut off: also within a segment, to its start, and to nothing."""
    tables, one = empty(1, 80, 3, 16, 4), torch.tensor([0])
    codes, others = random_codes(1, 80, 3), random_codes(1, 80, 3, seed=1)
    build(tables, codes[:, 4:60], one, torch.tensor([56]), impl=impl)
    tables.stop.fill_(60 - back)
    at = max(60 - back, 4)
    mixed = torch.cat([codes[:, :at].long(), others[:, at:].long()], 1).to(torch.uint16)
    for count in (2, 10):
        build(tables, mixed[:, at : at + count], one, torch.tensor([count]), impl=impl)
        at += count
        assert tables.stop.tolist() == [at]
        held_to(tables, mixed)


@pytest.mark.parametrize("impl", IMPLS)
def test_only_named_sequences_are_written(impl: str) -> None:
    tables, codes = empty(4, 20, 3, 8, 0), random_codes(2, 20, 3)
    build(tables, codes, torch.tensor([3, 1], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32), impl=impl)
    assert tables.stop.tolist() == [0, 9, 0, 20]
    for b in (0, 2):
        assert (tables.ids[b].long() == POISON).all() and (tables.offsets[b].long() == POISON).all()
    assert (tables.ids[1, ..., 9:].long() == POISON).all() and (tables.offsets[1, ..., 2, :].long() == POISON).all()
    held_to(tables, torch.stack([codes[i].view(torch.int16) for i in (0, 1, 0, 0)]).view(torch.uint16))


@pytest.mark.parametrize("done", [0, 1])
def test_an_interrupted_build(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once one of two threads has done its tables: the next build finds what was there before."""
    numba: Any = pytest.importorskip("longreach.ops.simhash.numba")
    tables, codes, others = empty(2, 80, 3, 16, 4), random_codes(2, 80, 3), random_codes(2, 80, 3, seed=1)
    both, count = torch.arange(2), torch.tensor([30, 25])
    build(tables, codes[:, 4:34], both, count, impl="numba")

    def interrupted(workers: int, kernel: Any, *args: Any) -> None:
        kernel(done, 2, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(numba, "in_threads", interrupted)
        build(tables, cut(others, 4 + count, count), both, count, impl="numba")
    assert tables.stop.tolist() == [34, 29]
    build(tables, cut(codes, 4 + count, count), both, count, impl="numba")
    held_to(tables, codes)


def test_ctrl_c_within_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal itself, while both threads sort: it is raised once they are done, and nothing was added."""
    numba: Any = pytest.importorskip("longreach.ops.simhash.numba")
    tables, codes, others = empty(2, 80, 3, 16, 4), random_codes(2, 80, 3), random_codes(2, 80, 3, seed=1)
    both, count, sort, ended = torch.arange(2), torch.tensor([30, 25]), numba.kernels.build, list[int]()
    build(tables, codes[:, 4:34], both, count, impl="numba")

    def interrupted(worker: int, workers: int, *args: Any) -> None:
        if worker == 1:
            os.kill(os.getpid(), signal.SIGINT)
            sort(worker, workers, *args)
            ended.append(worker)
        else:
            sort(worker, workers, *args)

    before, handler = torch.get_num_threads(), signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(2)
    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(numba.kernels, "build", interrupted)
            build(tables, cut(others, 4 + count, count), both, count, impl="numba")
            time.sleep(1)  # the signal reached the process before the build ended
        assert ended == [1] and tables.stop.tolist() == [34, 29]
        build(tables, cut(codes, 4 + count, count), both, count, impl="numba")
    finally:
        signal.signal(signal.SIGINT, handler)  # a process in the background may ignore it
        torch.set_num_threads(before)
    held_to(tables, codes)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_add(impl: str) -> None:
    tables = HashTables.empty(2, 2, 8, bits=3, tables=5)
    build(
        tables, random_codes(0, 4, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), impl=impl
    )
    build(tables, random_codes(2, 0, 3), torch.tensor([0, 1]), torch.tensor([0, 0]), impl=impl)
    assert tables.stop.tolist() == [0, 0]


def test_a_segment_that_is_full() -> None:
    """65,536 keys in one bucket: the offset that 16 bits do not hold."""
    tables, one = HashTables.empty(1, 1, 65536, bits=1, tables=2), torch.tensor([0])
    codes = torch.zeros(1, 65536, 1, 2, dtype=torch.uint16)
    build(tables, codes, one, one + 65536)
    assert tables.offsets[0, 0].tolist() == [[[0, 65536, 65536]]] * 2
    assert torch.equal(tables.ids[0, 0, 1].long(), torch.arange(65536))


def test_memory_is_stated() -> None:
    tables = HashTables.empty(2, 3, 1000, bits=4, tables=5, size=512)
    assert tables.ids.shape == (2, 3, 5, 1000) and tables.offsets.shape == (2, 3, 5, 2, 17)
    norms = 2 * 3 * 1000 * 4
    assert tables.nbytes == 2 * 3 * 5 * (2 * 1000 + 2 * 17 * 2) + 2 * 4 + norms
    large = HashTables.empty(2, 3, 1000, bits=4, tables=5)
    assert large.offsets.dtype == torch.int32 and large.nbytes == 2 * 3 * 5 * (2 * 1000 + 17 * 4) + 2 * 4 + norms


def _tables(**wrong: Any) -> HashTables:
    right = HashTables.empty(2, 2, 40, bits=3, tables=5, size=16)
    return HashTables(**({name: getattr(right, name) for name in ("ids", "offsets", "stop", "size", "first")} | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 12}, r"size: expected a multiple of 8 in \[8, 65536\], got 12"),
        ({"size": 0}, "size: .* got 0"),
        ({"size": 1 << 17}, "size: .* got 131072"),
        ({"size": 24}, r"offsets: expected torch.uint16 \[\*\[2, 2, 5, 2\], 2\^bits \+ 1\]"),
        ({"first": -1}, "first: expected a position >= 0, got -1"),
        ({"ids": torch.zeros(2, 2, 5, 40, dtype=torch.int16)}, r"ids: expected uint16 \[B, G, tables, N\], got int16"),
        ({"ids": torch.zeros(2, 5, 40, dtype=torch.uint16)}, "ids: .* got uint16"),
        ({"offsets": torch.zeros(2, 2, 5, 3, 9, dtype=torch.int32)}, "offsets: .* got int32"),
        ({"offsets": torch.zeros(2, 2, 5, 3, 10, dtype=torch.uint16)}, "offsets: .* got uint16"),
        ({"offsets": torch.zeros(2, 2, 5, 3, 2, dtype=torch.uint16)}, r"offsets: .* with bits in \[1, 16\]"),
        ({"offsets": torch.zeros(2, 2, 5, 3, (1 << 17) + 1, dtype=torch.uint16)}, "offsets: .*131073"),
        ({"stop": torch.zeros(3, dtype=torch.int32)}, r"stop: expected int32 \[B=2\], got int32\[3\]"),
        ({"stop": torch.zeros(2)}, "stop: .* got float32"),
        ({"stop": torch.zeros(2, dtype=torch.int32, device="meta")}, "stop: expected on cpu like ids, got .* on meta"),
        ({"ids": torch.zeros(2, 2, 40, 5, dtype=torch.uint16).transpose(2, 3)}, "contiguous last dimension"),
        ({"inverse_norms": torch.zeros(2, 2, 41)}, r"inverse_norms: expected fp32 \[2, 2, 40\] on cpu"),
        ({"inverse_norms": torch.zeros(2, 2, 40, dtype=torch.float64)}, "inverse_norms: .* got float64"),
    ],
)
def test_wrong_tables_are_refused(wrong: dict[str, Any], message: str) -> None:
    _tables()
    with pytest.raises(InvalidInput, match=message):
        _tables(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 0}, r"bits: expected an int in \[1, 16\], got 0"),
        ({"bits": 17}, "bits: .* got 17"),
        ({"tables": 0}, "tables: .* got 0"),
        ({"tables": 1025}, "tables: .* got 1025"),
        ({"size": 1 << 17}, "size: .* got 131072"),
        ({"capacity": 0}, "capacity: expected >= 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(wrong: dict[str, int], message: str) -> None:
    given: dict[str, int] = {"sequences": 1, "heads": 1, "capacity": 8, "bits": 3, "tables": 5} | wrong
    with pytest.raises(InvalidInput, match=message):
        HashTables.empty(**given)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tables": None}, "tables: expected HashTables, got NoneType"),
        ({"codes": torch.zeros(2, 4, 2, 5, dtype=torch.int32)}, r"codes: expected uint16 \[S, T, G=2, tables=5\], got"),
        ({"codes": random_codes(2, 4, 3, tables=6)}, r"codes: .* got uint16\[2, 4, 2, 6\]"),
        ({"codes": random_codes(2, 4, 4)}, r"codes: expected below 2\^bits = 8"),
        ({"codes": torch.full((2, 4, 2, 5), 65535, dtype=torch.uint16)}, r"codes: expected below 2\^bits = 8"),
        ({"seq": torch.tensor([0])}, r"seq: expected int32 or int64 \[S=2\], got int64\[1\]"),
        ({"seq": torch.tensor([0.0, 1.0])}, "seq: .* got float32"),
        ({"seq": torch.tensor([1, 1])}, r"seq: expected distinct sequences, got \[1, 1\]"),
        ({"seq": torch.tensor([0, 2])}, r"seq: expected in \[0, B=2\), got 0 to 2"),
        ({"seq": torch.tensor([-1, 0])}, "seq: .* got -1 to 0"),
        ({"seq": torch.tensor([0, 1], device="meta")}, "seq: expected on cpu like the tables, got .* on meta"),
        ({"count": torch.tensor([0, 5])}, r"count: expected in \[0, T=4\], got 0 to 5"),
        ({"count": torch.tensor([-1, 0])}, "count: .* got -1 to 0"),
        ({"count": torch.tensor([4, 4]), "at": 37}, "count: expected keys at positions below N=40, got some up to 40"),
        ({"count": 4}, "count: .* got int"),
    ],
)
def test_wrong_keys_are_refused(wrong: dict[str, Any], message: str) -> None:
    tables = _tables()
    tables.stop.fill_(wrong.pop("at", 0))
    before = tables.stop.clone()
    given = {
        "tables": tables,
        "codes": random_codes(2, 4, 3),
        "seq": torch.tensor([1, 0]),
        "count": torch.tensor([4, 0]),
    }
    with pytest.raises(InvalidInput, match=message):
        build(**(given | wrong))
    assert torch.equal(tables.stop, before)
