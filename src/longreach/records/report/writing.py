"""A report's files, all of them or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from longreach.errors import InvalidInput


def write_all(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files into a folder, creating it if needed and replacing files of the same names.

    Where anything fails, the folder is as it was before. Raises InvalidInput where it cannot be written.
    """
    targets = {folder / name: content for name, content in files.items()}
    try:
        made = _make(folder)
        try:
            _write(targets)
        except BaseException:
            for path in reversed(made):
                path.rmdir()
            raise
    except OSError as error:
        where = error.filename or folder
        raise InvalidInput(f"cannot write the report at {where}: {error.strerror}; choose another --output") from error
    return list(targets)


def _make(folder: Path) -> list[Path]:
    """The folders that had to be made, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _write(targets: Mapping[Path, bytes]) -> None:
    for target in targets:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    parts = {target: _beside(target, "part") for target in targets}
    olds = {target: _beside(target, "old") for target in targets if target.exists()}
    replaced: list[Path] = []
    try:
        for target, part in parts.items():
            part.write_bytes(targets[target])
        for target, part in parts.items():
            if target in olds:
                os.replace(target, olds[target])
            replaced.append(target)
            os.replace(part, target)
    except BaseException:
        for target in replaced:
            if target in olds:
                os.replace(olds[target], target)
            else:
                target.unlink(missing_ok=True)
        raise
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    for old in olds.values():
        old.unlink(missing_ok=True)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{what}")
