"""What a location names, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput, LongreachError, Unsupported
from longreach.store import ChunkStore
from longreach.store.place import folder_of
from tests.store.factory import chunk


@pytest.mark.parametrize("name", ["a::b", "2024-01-01T10:00", "notes:/x", "a b::c://d", "./memory:x", "x::file"])
def test_a_folder_may_have_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for location in (name, f"{tmp_path}/{name}"):
        with ChunkStore(location) as store:
            store.put(chunk(1))
    assert list((tmp_path / name).glob("*.safetensors"))


@pytest.mark.parametrize(
    ("location", "right"),
    [
        ("file:/x", "write file:///x"),
        ("file:x", "write file:///x"),
        ("s3:/b/x", "write s3://b/x"),
        ("memory:x", "./memory:x"),
    ],
)
def test_almost_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, right: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=right):
        ChunkStore(location)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "location",
    [
        "simplecache::memory://b",
        "filecache::s3://b/x",
        "blockcache::memory://b",
        "cached://x",
        "dir::simplecache::s3://b",
    ],
)
def test_caches_in_between_are_refused(location: str) -> None:
    with pytest.raises(Unsupported, match="a cache in between"):
        ChunkStore(location)


@pytest.mark.parametrize("location", ["memory://a::memory://b", "zip://a::file:///b.zip", "dir::memory://x"])
def test_chains_are_refused(location: str) -> None:
    with pytest.raises(Unsupported, match="chains filesystems"):
        ChunkStore(location)


@pytest.mark.parametrize(
    "protocol", ["sftp", "ssh", "ftp", "dir", "http", "hdfs", "webdav", "smb", "reference", "generic"]
)
def test_what_cannot_put_an_object_at_once_is_refused(protocol: str) -> None:
    """Whether or not what the protocol needs is installed."""
    with pytest.raises(Unsupported, match=rf"atomic puts at {protocol}://.*local disk.*s3"):
        ChunkStore(f"{protocol}://host/x")


def test_a_place_may_be_called_like_a_protocol(tmp_path: Path) -> None:
    for location in ("memory://cached/simplecache", f"{tmp_path}/cached", f"{tmp_path}/simplecache::x"):
        with ChunkStore(location) as store:
            assert store.put(chunk(1))


@pytest.mark.parametrize("location", [b"bytes", b"", 7, None, "", "file://", "a\0b", "/tmp/\ud800x", "~nosuchuser/x"])
def test_what_is_no_location(location: Any) -> None:
    with pytest.raises(InvalidInput, match="location"):
        ChunkStore(location)


def test_options_of_a_folder_are_refused_however_it_is_named(tmp_path: Path) -> None:
    for location in (str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
        with pytest.raises(InvalidInput, match="storage_options"):
            ChunkStore(location, storage_options={"auto_mkdir": True})
        assert folder_of(location, None) == str(tmp_path)


def test_no_store_is_made_where_none_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(LongreachError, match="no chunk store at"):
        ChunkStore(tmp_path / "none", create=False)
    assert list(tmp_path.iterdir()) == []
