"""Whatever bytes stand in a chunk's file: a miss, or the chunk; never a crash and never other data."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from longreach.store import ChunkStore
from tests.store.factory import chunk, path, same

ONE = chunk(1, prefix=(1, 2), dependence=True)
SUM = slice(42, 74)  # of the header's checksum in the file


def whole() -> bytes:
    with tempfile.TemporaryDirectory() as folder, ChunkStore(folder) as store:
        store.put(ONE)
        return path(Path(folder), ONE).read_bytes()


WHOLE = whole()
HEAD = 8 + int.from_bytes(WHOLE[:8], "little")
DOCUMENT = json.loads(WHOLE[8:HEAD])


def sealed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """A file whose header has a right checksum, so that only its meaning can give it away."""
    head = bytearray((len(header) if length is None else length).to_bytes(8, "little") + header)
    if len(head) >= SUM.stop:
        head[SUM] = b"0" * 32
        head[SUM] = xxhash.xxh3_128_hexdigest(bytes(head)).encode()
    return bytes(head) + data


def read(data: bytes) -> None:
    """Reading must give a miss, or exactly the chunk."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for verify in ("first", "never"):
            with ChunkStore(folder, verify=verify) as store:  # type: ignore[arg-type]
                path(Path(folder), ONE).write_bytes(data)
                got = store.get(ONE.key)
                if got is not None:
                    assert same(got, ONE) or (verify == "never" and got.key == ONE.key)
                else:
                    assert not path(Path(folder), ONE).exists()
                path(Path(folder), ONE).write_bytes(data)
                store.about(ONE.key.name)
                store.verify_all()


def test_the_helper_seals_as_the_store_does() -> None:
    assert sealed(WHOLE[8:HEAD], WHOLE[HEAD:]) == WHOLE


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_any_bytes(data: bytes) -> None:
    read(data)


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_any_header_behind_any_length(header: bytes, length: int) -> None:
    read(length.to_bytes(8, "little") + header)
    read(sealed(WHOLE[8 : SUM.stop] + header, WHOLE[HEAD:], length % 4096))


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, len(WHOLE)), st.binary(max_size=40))
@settings(max_examples=120, deadline=None)
def test_any_part_replaced(start: int, stop: int, data: bytes) -> None:
    read(WHOLE[:start] + data + WHOLE[stop:])


@given(st.integers(SUM.stop, HEAD - 1), st.integers(SUM.stop, HEAD), st.binary(max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_part_of_a_sealed_header_replaced(start: int, stop: int, data: bytes) -> None:
    header = WHOLE[8:start] + data + WHOLE[max(start, stop) : HEAD]
    read(sealed(header + b" " * (-len(header) % 8), WHOLE[HEAD:]))


numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(0, 9), st.floats(), st.none(), st.booleans(), st.text(max_size=3)
)
anything = st.recursive(
    numbers, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=5), x, max_size=3)
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Headers with one field or several replaced by something else of the same place, or by anything."""
    document = json.loads(json.dumps(DOCUMENT))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(list(DOCUMENT)))
        if not isinstance(document.get(name), dict):
            continue
        if name == "__metadata__":
            field = draw(st.sampled_from(["format", "model", "dtype", "prefix", "tokens", "xxh128", "more"]))
            others = st.sampled_from(["float16", "int64", "", "0" * 64, "f" * 64, "z" * 224, "0" * 224])
            document[name][field] = draw(st.one_of(others, anything))
        else:
            field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "all"]))
            choices = {
                "dtype": st.sampled_from(["F16", "BF16", "I64", "F32", "F64", "U8", "nonsense"]),
                "shape": st.lists(numbers, max_size=4),
                "data_offsets": st.lists(numbers, min_size=1, max_size=3),
                "all": st.just(document.get(draw(st.sampled_from(list(DOCUMENT))))),
            }
            value = draw(st.one_of(choices[field], anything))
            if field == "all":
                document[name] = value
            else:
                document[name][field] = value
    return document


@given(documents())
@settings(max_examples=250, deadline=None)
def test_any_sealed_header_that_is_almost_right(document: dict[str, Any]) -> None:
    header = json.dumps(document, separators=(",", ":")).encode()
    read(sealed(header + b" " * (-len(header) % 8), WHOLE[HEAD:]))


def test_headers_that_break_parsers() -> None:
    start = WHOLE[8 : SUM.stop] + b'"'
    for rest in (
        b',"a":' + b"[" * 200_000,
        b',"a":' + b"9" * 10_000,
        b',"a":NaN,"b":-Infinity}}',
        b',"model":"\\ud800","dtype":"bfloat16"}}',
        b',"model":"\xff\xfe"}}',
        b"}}" + b"{}" * 8,
        b'},"prefix":{"dtype":"I64","shape":[0],"data_offsets":[0,0]},"prefix":{}}',
    ):
        header = start + rest
        read(sealed(header + b" " * (-len(header) % 8), WHOLE[HEAD:]))
    for length in (2**63, 2**64 - 1, 2**32, len(WHOLE), len(WHOLE) - 8, 0, 40):
        read(length.to_bytes(8, "little") + WHOLE[8:])


def test_overlapping_offsets_and_names_that_stand_twice() -> None:
    text = WHOLE[8:HEAD].decode()
    keys, values = (DOCUMENT[name]["data_offsets"] for name in ("keys.0", "keys.1"))
    overlapping = text.replace(f'"data_offsets":[{values[0]},', f'"data_offsets":[{keys[0]},')
    negative = text.replace(f'"data_offsets":[{keys[0]},', f'"data_offsets":[{-keys[0]},')
    twice = text.rstrip().removesuffix("}") + ',"keys.0":' + json.dumps(DOCUMENT["keys.0"], separators=(",", ":")) + "}"
    for header in (overlapping, negative, twice):
        assert header != text
        read(sealed((header + " " * (-len(header) % 8)).encode(), WHOLE[HEAD:]))
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ChunkStore(folder) as store:
                path(Path(folder), ONE).write_bytes(sealed(header.encode() + b" " * (-len(header) % 8), WHOLE[HEAD:]))
                assert store.get(ONE.key) is None
