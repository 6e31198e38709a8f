"""Locations: a folder, or objects behind a URL. Unsuitable places are refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput, StoreError, Unsupported

MARKER = ".longreach-chunk-store"  # the marker of a store, in a folder or behind a URL; a folder's is its lock too
# a put of an object is shown whole or not at all: Amazon's, Google's and Azure's services, and fsspec's own memory
ATOMIC = ("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
CACHING = ("simplecache", "filecache", "blockcache", "cached")
LOCAL = ("file", "local")
_FRONT = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")


def text_of(location: Any) -> str:
    """A location as text. Raises InvalidInput."""
    try:
        text = os.fspath(location)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text or not _in_bytes(text):
        raise InvalidInput(f"location: expected a folder or a URL, got {location!r}")
    return text


def _in_bytes(text: str) -> bool:
    """Whether the system accepts it as a file name; bytes that are not UTF-8 come as surrogates, and are accepted."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def home(folder: str) -> Path:
    """A folder's path, ~ being a user's home. Raises InvalidInput if there is no such user."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise InvalidInput(f"location {folder}: {error}; write it out, or ./{folder} for a folder so named") from error


def folder_of(location: str, storage_options: dict[str, Any] | None) -> str | None:
    """The folder that a location names, None for a URL to be `opened`. Raises InvalidInput, Unsupported."""
    front = _FRONT.match(location)
    protocol, url = (front[1], bool(front[2])) if front else ("", False)
    known = protocol in _known()
    if (url or known) and any(link.partition("://")[0] in CACHING for link in location.split("::")):
        raise Unsupported(
            f"{location}: a cache in between shows what others have replaced or removed; name the URL behind it"
        )
    if (url and "::" in location) or (known and location.startswith(f"{protocol}::")):
        raise Unsupported(
            f"{location} chains filesystems (::); name one URL, or a folder (./{location} where it is one's name)"
        )
    if known and not url:
        right = f"{protocol}://{'/' * (protocol in LOCAL)}{location[len(protocol) + 1 :].lstrip('/')}"
        raise InvalidInput(f"{location} is no URL; write {right}, or ./{location} for a folder of that name")
    if url and protocol not in LOCAL:
        if known and protocol not in ATOMIC:
            raise Unsupported(
                f"atomic puts at {location}: {protocol} is not known to show an object whole or not at all; name a "
                f"folder of a local disk, or a URL of {', '.join(ATOMIC)}"
            )
        return None
    if storage_options:
        raise InvalidInput(f"storage_options are for services, and {location} is a folder; leave them out")
    if not url:
        return location
    if not location[front.end() :]:  # type: ignore[union-attr]
        raise InvalidInput(f"location: {location} names no folder")
    from fsspec.implementations.local import LocalFileSystem

    return str(LocalFileSystem._strip_protocol(location))


def opened(location: str, storage_options: dict[str, Any] | None, **more: Any) -> tuple[Any, str]:
    """(fsspec filesystem, path in it) of a URL. Raises StoreError where fsspec, or the service's library, cannot open
    it; InvalidInput if the library would use another place than the URL names."""
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(location, **{**(storage_options or {}), **more})
    except Exception as error:  # the services' libraries raise their own
        raise StoreError(
            f"fsspec cannot open the chunk store {location} ({location.partition('://')[0]} answered "
            f"{type(error).__name__}: {error}); install what its protocol needs, or mend the URL or storage_options"
        ) from error
    if any(location.count(mark) != root.count(mark) for mark in "?#*[]"):
        raise InvalidInput(
            f"{location}: its service's library looks at {root!r}; name a place without any of ? # * [ ]"
        )
    return fs, root


def absent_message(location: object) -> StoreError:
    """Message for create=False without a store."""
    return StoreError(f"there is no chunk store at {location}; `longreach store add` makes one")


def conflict_message(location: object, strange: str) -> StoreError:
    """Message for a place with other files: they are neither chunks nor to be set aside."""
    return StoreError(
        f"{location} is no chunk store, it holds {strange}; name an empty folder, or an empty place behind a URL"
    )


def _known() -> set[str]:
    """Protocols that fsspec supports."""
    from fsspec.registry import known_implementations, registry

    return {*known_implementations, *registry}
