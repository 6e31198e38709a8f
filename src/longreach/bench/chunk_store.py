"""The chunk store compared with plain safetensors: put, get with warm and cold page cache, verification, verify, list.

Both sides move the same bytes and take turns chunk by chunk, another one first each time. Put is compared with
safetensors' save_file, fsync and rename; get with opening the very same file with safetensors. After each get every
byte is touched (summed as integers), on both sides, for mapping a file reads nothing of it. Before a cold read the
file's pages are dropped with posix_fadvise(POSIX_FADV_DONTNEED), and preadv2(RWF_NOWAIT) shows whether they are gone;
caches below the kernel (of a drive, of a virtual machine's host) stay as they are.
"""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from longreach.bench.case import Target
from longreach.bench.record import add, conditions
from longreach.errors import InvalidInput, MeasurementFailed
from longreach.store import Chunk, ChunkKey, ChunkStore

GROUP = "chunk-store"
CAPPED_PUT = "put, cap of half of all"
PLAIN_PUT, PLAIN_GET = "safetensors save_file, fsync, rename", "safetensors safe_open, every tensor"
BOUND = 1.2
_PAGE = 4096


@dataclass(frozen=True)
class Load:
    """The stored data: chunks of a model with 32 layers, 8 KV heads of 128 channels (Llama-3.1-8B's) in bf16."""

    chunks: int = 1000
    tokens: int = 64
    layers: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def bytes(self) -> int:
        """Bytes of a chunk's keys and values."""
        return 2 * self.layers * self.kv_heads * self.tokens * self.dim * 2

    def chunk(self, number: int) -> Chunk:
        """Random bytes, other ones in each chunk."""
        generator = torch.Generator().manual_seed(number)
        shape = (2 * self.layers, self.kv_heads, self.tokens, self.dim)
        drawn = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        return Chunk.of("measured", (), self._ids(number), drawn[: self.layers].unbind(), drawn[self.layers :].unbind())

    def key(self, number: int) -> ChunkKey:
        return ChunkKey.of("measured", torch.bfloat16, (), self._ids(number))

    def _ids(self, number: int) -> range:
        return range(number * self.tokens, (number + 1) * self.tokens)


TINY = Load(chunks=6, tokens=4, layers=2)


def run(
    load: Load, out: Path, done: Callable[[str, dict[str, Any]], None], advance: Callable[[int], None]
) -> dict[str, Any]:
    """Measure on the disk of `out`, in a temporary folder there that is removed afterwards; add the record to `out`.

    done: called with each case's name and result; advance: with 1 after each chunk of each pass (`passes` a chunk).
    Raises InvalidInput where the disk has not the room.
    """
    out.mkdir(parents=True, exist_ok=True)
    needed = 5 * load.chunks * load.bytes // 2
    if shutil.disk_usage(out).free < 1.1 * needed:
        raise InvalidInput(f"{out} has no room for {needed / 1e9:.0f} GB of chunks; name a folder of another disk")
    results = {}
    with tempfile.TemporaryDirectory(dir=out, prefix="chunk-store-") as folder:
        for name, measure in CASES.items():
            measured = measure(load, Path(folder), advance)
            stated = conditions(torch.device("cpu"), ("chunk_store",))
            stated["versions"]["safetensors"] = metadata.version("safetensors")
            results[name] = {
                **stated,
                "load": {**asdict(load), "bytes": load.bytes},
                "filesystem": _kind(out),
                "load_average": os.getloadavg(),
                **measured,
            }
            add(out / f"{GROUP}.json", GROUP, name, results[name])
            done(name, results[name])
    return results


def _put(load: Load, folder: Path, advance: Callable[[int], None]) -> dict[str, Any]:
    plain = folder / "plain"
    plain.mkdir()
    seconds: dict[str, list[float]] = {"put": [], CAPPED_PUT: [], PLAIN_PUT: []}
    cap = load.chunks * load.bytes // 2  # so that from the middle on, each put evicts
    with ChunkStore(folder / "store") as store, ChunkStore(folder / "capped", max_bytes=cap) as capped:
        for number in range(load.chunks):
            chunk = load.chunk(number)
            tensors = {"tokens": chunk.tokens, "prefix": chunk.prefix}
            tensors |= {f"keys.{i}": x for i, x in enumerate(chunk.keys)}
            tensors |= {f"values.{i}": x for i, x in enumerate(chunk.values)}
            calls: dict[str, Callable[[], object]] = {
                "put": partial(store.put, chunk),
                CAPPED_PUT: partial(capped.put, chunk),
                PLAIN_PUT: partial(_save, tensors, plain, chunk.key.name),
            }
            for name in _turn(list(calls), number):
                seconds[name].append(_timed(calls[name]))
            advance(1)
    shutil.rmtree(folder / "capped")
    shutil.rmtree(plain)  # not before: blocks and pages that one side gave back would be the other's, or its own, cheap
    entries = [_entry(name, times, load) for name, times in seconds.items()]
    return {"entries": entries, "targets": [_judged("put", PLAIN_PUT, entries)]}


def _save(tensors: dict[str, Tensor], folder: Path, name: str) -> None:
    part = folder / f"{name}.part"
    save_file(tensors, part)
    fd = os.open(part, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    os.rename(part, folder / name)


def _get(cold: bool) -> Callable[[Load, Path, Callable[[int], None]], dict[str, Any]]:
    def measure(load: Load, folder: Path, advance: Callable[[int], None]) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {"get": [], "get, verified": [], PLAIN_GET: []}
        place, gone = folder / "store", list[bool]()
        with ChunkStore(place, verify="never") as fast, ChunkStore(place, verify="always") as careful:
            for number in range(load.chunks):
                key = load.key(number)
                file = place / f"{key.name}.safetensors"
                calls = {
                    "get": lambda: _touch(_held(fast.get(key))),  # noqa: B023
                    "get, verified": lambda: _touch(_held(careful.get(key))),  # noqa: B023
                    PLAIN_GET: lambda: _touch(_opened(file)),  # noqa: B023
                }
                sums = set()
                for name in _turn(list(calls), number):
                    if cold:
                        gone.append(drop_pages(file))
                    else:
                        file.read_bytes()
                    start = time.perf_counter()
                    sums.add(calls[name]())
                    seconds[name].append(time.perf_counter() - start)
                if len(sums) != 1:
                    raise MeasurementFailed(f"the ways of reading chunk {number} found other bytes; no time counts")
                advance(1)
        entries = [_entry(name, times, load) for name, times in seconds.items()]
        with_it, without = (e["microseconds"]["median"] for e in (entries[1], entries[0]))
        return {
            "page_cache": "dropped before each read: posix_fadvise(POSIX_FADV_DONTNEED)" if cold else "read before",
            **({"dropped": sum(gone) / len(gone)} if cold else {}),  # share of reads before which pages were gone
            "entries": entries,
            "verification": {"microseconds": with_it - without, "over_get": with_it / without},
            "targets": [_judged("get", PLAIN_GET, entries)] if not gone or sum(gone) >= 0.99 * len(gone) else [],
        }

    return measure


def _upkeep(load: Load, folder: Path, advance: Callable[[int], None]) -> dict[str, Any]:
    with ChunkStore(folder / "store") as store:
        for entry in store.entries():
            drop_pages(folder / "store" / f"{entry.name}.safetensors")
        entries = {}
        for name in ("verify, cold", "verify, warm"):
            start = time.perf_counter()
            whole = store.verify_all(advance).whole
            entries[name] = time.perf_counter() - start
            if whole != load.chunks:
                raise MeasurementFailed(f"{whole} of {load.chunks} chunks are whole; no time counts")
        start = time.perf_counter()
        listed = store.entries()
        entries["list"] = time.perf_counter() - start
        for entry in listed:
            store.about(entry.name)
        entries["list with every header"] = time.perf_counter() - start
    return {"seconds": entries, "gb_per_s": {n: load.chunks * load.bytes / s / 1e9 for n, s in entries.items()
                                             if n.startswith("verify")}}  # fmt: skip


CASES: dict[str, Callable[[Load, Path, Callable[[int], None]], dict[str, Any]]] = {
    "put": _put,
    "get-warm": _get(cold=False),
    "get-cold": _get(cold=True),
    "verify-and-list": _upkeep,
}
PASSES = 5  # over all chunks, with advance(1) after each


def _turn(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _held(chunk: Chunk | None) -> list[Tensor]:
    if chunk is None:
        raise MeasurementFailed("a chunk that was put is not there")
    return [*chunk.keys, *chunk.values]


def _opened(file: Path) -> list[Tensor]:
    with safe_open(file, "pt") as opened:
        return [opened.get_tensor(name) for name in opened.keys() if name[0] in "kv"]  # noqa: SIM118


def _touch(tensors: Sequence[Tensor]) -> int:
    return sum(int(x.view(torch.int64).sum()) for x in tensors) % 2**64


def drop_pages(file: Path) -> bool:
    """Out of the page cache; whether the pages are gone, as far as three of them can tell."""
    fd = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        for _ in range(5):  # pages that something else holds at that moment stay the first time
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not any(_cached(fd, max(0, at)) for at in (0, size // 2, size - _PAGE)):
                return True
        return False
    finally:
        os.close(fd)


def _cached(fd: int, at: int) -> bool:
    """Whether a page can be had without waiting; True also if the file system gives no answer (memory, overlays)."""
    try:
        os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return True


def _kind(folder: Path) -> str:
    """The type of the file system, as the kernel names it."""
    place, best = str(folder.resolve()), ("", "unknown")
    mounts = Path("/proc/mounts")
    for line in mounts.read_text().splitlines() if mounts.is_file() else []:
        _, point, kind = line.split()[:3]
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) > len(best[0]):
            best = point, kind
    return best[1]


def _entry(name: str, seconds: Sequence[float], load: Load) -> dict[str, Any]:
    low, middle, high = (1e6 * s for s in statistics.quantiles(seconds, n=4, method="inclusive"))
    return {
        "who": "safetensors" if name.startswith("safetensors") else "longreach",
        "name": name,
        "microseconds": {
            "median": middle,
            "first_quartile": low,
            "third_quartile": high,
            "mean": 1e6 * statistics.fmean(seconds),
        },
        "gb_per_s": load.bytes / middle / 1e3,
    }


def _judged(of: str, over: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    times = {e["name"]: e["microseconds"]["median"] for e in entries}
    got = times[of] / times[over]
    target = asdict(Target("time over", BOUND, of, over))
    return {**target, "got": got, "than": over, "reached": got <= BOUND, "missed_by": max(0.0, got / BOUND - 1)}
