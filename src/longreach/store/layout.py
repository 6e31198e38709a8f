"""The file of a chunk: one safetensors file with one legal form, and checksums of the header and of every tensor.

The header's first field is the checksum of the length and the header itself (with zeros in that field), so that any
change of it is seen at every read. The checksums of tensors stand in the header and are compared when a read verifies.
A header counts only if it is, byte for byte, what we would have written: there is nothing to interpret in any other.

The tensors are prefix, tokens, dependence where the chunk has it, and keys and values layer by layer. Those of 8 bytes
come first, so that every tensor is aligned.

XXH3 with 128 bits, because it does 30 GB/s on a core where zlib's CRC-32 does 3 and sha256 0.9: with those, most of a
verified read and a tenth of a put would be the checksum. An accident goes unseen once in 2^128; it is no defence
against forgery.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from longreach.errors import InvalidInput, LongreachError
from longreach.store.key import DTYPES, Chunk, ChunkKey

FORMAT = "longreach-chunk-1"
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64"}  # safetensors'
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8}
MOST_HEADER = 1 << 24
DEPENDENCE = "dependence"
_START = b'{"__metadata__":{"header_xxh128":"'
_DIGITS = 32
_ZEROS = "0" * _DIGITS
FIRST = 8 + len(_START)  # bytes that identify a file as ours


class Broken(Exception):
    """The bytes are not a chunk, or not this one. Never leaves the store: it becomes a miss. kind: a short name."""

    def __init__(self, kind: str, why: str):
        super().__init__(why)
        self.kind = kind


class Spec(NamedTuple):
    """A tensor of the file: its name, safetensors' name of its dtype, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


@dataclass(frozen=True)
class Head:
    """A chunk's header. sums: checksums of each tensor, in the order of specs, which is that of the file."""

    key: ChunkKey
    specs: tuple[Spec, ...]
    sums: tuple[str, ...]

    @property
    def dependence(self) -> bool:
        return _has_dependence(self.specs)

    @property
    def layers(self) -> int:
        return (len(self.specs) - 2 - self.dependence) // 2

    @property
    def tokens(self) -> int:
        return self.specs[1].shape[0]

    @property
    def prefix(self) -> int:
        return self.specs[0].shape[0]

    @property
    def data_bytes(self) -> int:
        return sum(s.bytes for s in self.specs)

    def encode(self) -> bytes:
        """The file's first bytes: length, header, padding to a multiple of 8. As long for any sums."""
        key, stop = self.key, 0
        fields: dict[str, Any] = {
            "header_xxh128": _ZEROS,
            "format": FORMAT,
            "model": key.model,
            "dtype": key.dtype,
            "prefix": key.prefix,
            "tokens": key.tokens,
            "xxh128": "".join(self.sums),
        }
        document: dict[str, Any] = {"__metadata__": fields}
        for name, dtype, shape in self.specs:
            start, stop = stop, stop + prod(shape) * WIDTHS[dtype]
            document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        header = json.dumps(document, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        return _sealed(len(header).to_bytes(8, "little") + header)


def _sealed(head: bytes) -> bytes:
    """With its own checksum in the field of zeros."""
    at = 8 + len(_START)
    return head[:at] + xxhash.xxh3_128_hexdigest(head).encode() + head[at + _DIGITS :]


def encode(chunk: Chunk) -> tuple[bytes, list[memoryview]]:
    """A file's header, with checksums, and the bytes of its tensors. Raises InvalidInput for too long a header."""
    some = [] if chunk.dependence is None else [chunk.dependence]
    pairs = zip(chunk.keys, chunk.values, strict=True)
    tensors = [chunk.prefix, chunk.tokens, *some, *(x for pair in pairs for x in pair)]
    tensors = [x.detach().cpu().resolve_neg().contiguous() for x in tensors]
    buffers = [_bytes_of(x) for x in tensors]
    dtypes = [NAMES[str(x.dtype).removeprefix("torch.")] for x in tensors]
    names = _names(len(chunk.keys), bool(some))
    specs = tuple(Spec(n, d, tuple(x.shape)) for n, d, x in zip(names, dtypes, tensors, strict=True))
    header = Head(chunk.key, specs, tuple(map(_sum, specs, buffers))).encode()
    if len(header) - 8 > MOST_HEADER:  # which no reader takes
        raise InvalidInput(
            f"a chunk of {len(chunk.keys)} layers and a model's fingerprint of {len(chunk.key.model)} characters has a "
            f"header of {len(header)} bytes; at most {MOST_HEADER} are read back"
        )
    return header, buffers


def _names(layers: int, dependence: bool) -> list[str]:
    """Of a file's tensors, in their order."""
    some = [DEPENDENCE] if dependence else []
    return ["prefix", "tokens", *some, *(f"{kind}.{i}" for i in range(layers) for kind in ("keys", "values"))]


def _has_dependence(specs: Sequence[Spec]) -> bool:
    return len(specs) > 2 and specs[2].name == DEPENDENCE


def is_ours(first: bytes) -> bool:
    """Whether a broken file that begins so (its FIRST bytes, or all) was a chunk of ours, or holds nothing.

    What is ours may be deleted once it is broken, what is foreign may not.
    """
    start = first[8:FIRST]
    return (bool(start) and _START.startswith(start)) or not any(first[:FIRST])


def header_length(first: bytes, size: int) -> int:
    """Length of length field and header, from a file's first 8 bytes and its size."""
    length = int.from_bytes(first[:8], "little") if len(first) >= 8 else 0
    if not len(_START) + _DIGITS <= length <= min(MOST_HEADER, size - 8) or length % 8:
        raise Broken("foreign or truncated", f"no header of a chunk in its {size} bytes")
    return 8 + length


def parse(head: bytes, size: int) -> Head:
    """A complete header, parsed. Raises Broken unless it is one that we would write for a file of this size."""
    at = 8 + len(_START)
    if head[8:at] != _START:
        raise Broken("foreign", "its header is not that of a chunk")
    if head != _sealed(head[:at] + _ZEROS.encode() + head[at + _DIGITS :]):
        raise Broken("header changed", "its header's checksum differs")
    try:
        found = _read(json.loads(head[8:]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, LongreachError) as error:
        raise Broken("foreign", f"its header says no chunk ({type(error).__name__}: {error})") from error
    if found.encode() != head:
        raise Broken("foreign", "its header has not the form of a chunk's")
    if len(head) + found.data_bytes != size:
        raise Broken("truncated", f"{size} bytes where its header says {len(head) + found.data_bytes}")
    return found


def _read(document: dict[str, Any]) -> Head:
    fields = document.pop("__metadata__")
    key = ChunkKey(fields["model"], fields["dtype"], fields["prefix"], fields["tokens"])
    specs = tuple(Spec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in document.items())
    dependence = _has_dependence(specs)
    layers = (len(specs) - 2 - dependence) // 2
    if layers < 1 or [s.name for s in specs] != _names(layers, dependence):
        raise ValueError("expected prefix, tokens, keys and values of each layer")
    if any(type(n) is not int or n < 0 for s in specs for n in s.shape):
        raise ValueError("a shape of no natural numbers")
    if [s.dtype for s in specs] != ["I64"] * 2 + ["F64"] * dependence + [NAMES[key.dtype]] * (2 * layers):
        raise ValueError(f"expected int64 tokens, float64 dependence if any, and {key.dtype} tensors")
    if len(specs[0].shape) != 1 or len(specs[1].shape) != 1 or not specs[1].shape[0]:
        raise ValueError("expected tokens [N] and prefix [P]")
    count = specs[1].shape[0]
    if dependence and specs[2].shape != (count,):
        raise ValueError(f"expected dependence [{count}]")
    if any(len(s.shape) != 3 or s.shape[1] != count or not all(s.shape) for s in specs[2 + dependence :]):
        raise ValueError(f"expected tensors [G, {count}, D]")
    sums, digits = str(fields["xxh128"]), _DIGITS * len(specs)
    if len(sums) != digits:
        raise ValueError("expected a checksum for each tensor")
    return Head(key, specs, tuple(sums[i : i + _DIGITS] for i in range(0, digits, _DIGITS)))


def tensors(head: Head, memory: Tensor) -> dict[str, Tensor]:
    """Views of a whole file's bytes (uint8 [size]), by name."""
    found, start = {}, memory.numel() - head.data_bytes
    values = memory.view(DTYPES[head.key.dtype])
    for spec in head.specs:
        if len(spec.shape) == 1:
            dtype = torch.int64 if spec.dtype == "I64" else torch.float64
            found[spec.name] = memory[start : start + spec.bytes].view(dtype)
        else:
            _, n, d = spec.shape
            found[spec.name] = values.as_strided(spec.shape, (n * d, d, 1), start // WIDTHS[spec.dtype])
        start += spec.bytes
    return found


def verify(head: Head, found: dict[str, Tensor]) -> None:
    """Compare every tensor's checksum. Raises Broken naming the tensors that differ."""
    pairs = zip(head.specs, head.sums, strict=True)
    bad = [spec.name for spec, want in pairs if _sum(spec, _bytes_of(found[spec.name])) != want]
    if bad:
        raise Broken("data changed", f"the checksum of {', '.join(bad[:4])}{' and others' if bad[4:] else ''} differs")


def chunk_of(head: Head, found: dict[str, Tensor], key: ChunkKey) -> Chunk:
    """The chunk, which must be the one that `key` names, tokens included. Raises Broken."""
    require(head, key)
    layers = range(head.layers)
    keys, values = (tuple(found[f"{kind}.{i}"] for i in layers) for kind in ("keys", "values"))
    try:
        some = found[DEPENDENCE].clone() if head.dependence else None
        return Chunk(key, found["prefix"].clone(), found["tokens"].clone(), keys, values, some)
    except InvalidInput as error:
        raise Broken("data changed", str(error)) from error


def require(head: Head, key: ChunkKey) -> None:
    """Raise Broken where a file belongs to another key."""
    differs = [n for n in ("model", "dtype", "prefix", "tokens") if getattr(head.key, n) != getattr(key, n)]
    if differs:
        raise Broken("another chunk", f"it holds a chunk of other {', '.join(differs)}")


def _sum(spec: Spec, buffer: memoryview) -> str:
    """Checksum of a tensor's name, dtype and shape, and of its bytes."""
    running = xxhash.xxh3_128(f"{spec.name} {spec.dtype} {list(spec.shape)}".encode())
    running.update(buffer)
    return running.hexdigest()


def _bytes_of(x: Tensor) -> memoryview:
    return memoryview(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
