"""The file of a saved cache: safetensors, written whole or not at all, with checksums of tensors and header.

Tensors are written and read one by one, so that no second copy of a cache is held in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from longreach.errors import InvalidInput

FORMAT = 1  # of the header
KIND = "longreach-cache"
NAMES = {  # safetensors' names of dtypes
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.uint8: "U8",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
MOST_HEADER = 1 << 28
NO_SUM = "0" * 32
AGAIN = "save the cache again, or read the prompt again"


class Entry(NamedTuple):
    """A tensor to be written. make: returns it, on any device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, x: Tensor) -> Entry:
        return cls(x.dtype, tuple(x.shape), lambda: x)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write(path: Path, header: Mapping[str, Any], entries: Mapping[str, Entry], *, overwrite: bool = False) -> None:
    """Write a file whole or not at all. Raises InvalidInput if it exists, or its folder cannot be written."""
    check_place(path, overwrite)
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
    try:
        try:
            with part.open("xb") as stream:
                _fill(stream, header, entries)
            check_place(path, overwrite)
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):  # it is gone once it was renamed
                part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"cannot write {path}: {error.strerror}; choose another file, in a folder that can be written, or make room"
        ) from error


def check_place(path: Path, overwrite: bool) -> None:
    """Raise InvalidInput where a file is that may not be replaced, or none can be written."""
    if path.is_dir():
        raise InvalidInput(f"cannot write {path}: expected a file name, got a folder; name a file in it")
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"cannot write {path}: its folder cannot be written; choose another file")
    if not overwrite and path.exists():
        raise InvalidInput(f"{path} exists already; choose another file, remove it, or give overwrite=True")


def _fill(stream: BinaryIO, header: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    sums = dict.fromkeys(entries, NO_SUM)
    start = _head(header, entries, sums)
    stream.write(b"\0" * len(start))  # the header comes last: until then the file is no cache
    for name, entry in entries.items():
        x = entry.make().detach().cpu().contiguous()
        assert x.dtype == entry.dtype and tuple(x.shape) == entry.shape
        content = x.reshape(-1).view(torch.uint8).numpy().data
        sums[name] = xxhash.xxh3_128_hexdigest(content)
        stream.write(content)
    stream.seek(0)
    stream.write(_head(header, entries, sums))
    stream.flush()
    os.fsync(stream.fileno())


def _head(header: Mapping[str, Any], entries: Mapping[str, Entry], sums: Mapping[str, str]) -> bytes:
    """The file's first bytes: the length, then safetensors' header. As long for any sums."""
    text, stop = json.dumps({"format": FORMAT, "sums": sums, **header}, allow_nan=False), 0
    about = {"format": KIND, "header": text, "xxh128": xxhash.xxh3_128_hexdigest(text.encode())}
    document: dict[str, Any] = {"__metadata__": about}
    for name, entry in entries.items():
        start, stop = stop, stop + entry.nbytes
        document[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, stop]}
    content = json.dumps(document).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


@dataclass(frozen=True)
class CacheFile:
    """An open file whose header was checked. header: as it was given to `write`."""

    path: Path
    header: Mapping[str, Any]
    _stream: BinaryIO
    _tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]  # dtype, shape, start, bytes
    _sums: Mapping[str, str]

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU. Raises InvalidInput if it is not there, or its bytes have changed."""
        if name not in self._tensors:
            raise damaged(self.path, f"it has no tensor {name!r}")
        dtype, shape, start, size = self._tensors[name]
        content = bytearray(size)
        try:
            self._stream.seek(start)
            got = self._stream.readinto(content)  # type: ignore[attr-defined]
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}; {AGAIN}") from error
        if got != size or xxhash.xxh3_128_hexdigest(content) != self._sums[name]:
            raise damaged(self.path, f"the bytes of tensor {name!r} have changed")
        return torch.frombuffer(content, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def damaged(path: Path, why: str) -> InvalidInput:
    """The error for a file that is not what `write` wrote."""
    return InvalidInput(f"{path} is damaged: {why}; {AGAIN}")


@contextmanager
def opened(path: Path) -> Iterator[CacheFile]:
    """The file, until the end of the block. Raises InvalidInput for one that is missing, foreign, cut or damaged."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path") from error
    with stream:
        try:
            size = os.fstat(stream.fileno()).st_size
            first = int.from_bytes(stream.read(8), "little")
            content = stream.read(first) if 2 <= first <= min(MOST_HEADER, size) else b""
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path") from error
        yield _checked(path, stream, size, content)


def _checked(path: Path, stream: BinaryIO, size: int, content: bytes) -> CacheFile:
    try:
        document = json.loads(content)
        about = document.pop("__metadata__")
        if about["format"] != KIND:
            raise ValueError(about)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is no saved cache, or its beginning is damaged: expected a file that cache.save wrote; {AGAIN}"
        ) from error
    try:
        text = about["header"]
        if about["xxh128"] != xxhash.xxh3_128_hexdigest(text.encode()):
            raise damaged(path, "its header has changed")
        header = json.loads(text)
        if header["format"] != FORMAT:
            raise InvalidInput(
                f"{path} has format {header['format']}, and this longreach reads format {FORMAT}; load it with the "
                f"longreach that saved it, or read the prompt again"
            )
        tensors, end = _spans(document.items(), 8 + len(content))
        sums = {name: header["sums"][name] for name in tensors}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise damaged(path, "its header is not what was written") from error
    if end != size:
        raise InvalidInput(f"{path} is cut short: expected {end} bytes, got {size}; {AGAIN}")
    return CacheFile(path, header, stream, tensors, sums)


def _spans(
    entries: Iterable[tuple[str, Any]], first: int
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...], int, int]], int]:
    """Dtype, shape, start and bytes of each tensor, and where the last one ends. Raises ValueError, KeyError."""
    found, end = dict[str, tuple[torch.dtype, tuple[int, ...], int, int]](), first
    for name, about in entries:
        dtype, shape = DTYPES[about["dtype"]], tuple(about["shape"])
        size = prod(shape) * dtype.itemsize
        counts = all(type(n) is int and n >= 0 for n in shape)
        if not counts or about["data_offsets"] != [end - first, end - first + size]:
            raise ValueError
        found[name] = (dtype, shape, end, size)
        end += size
    return found, end
