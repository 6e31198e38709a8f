"""--save-cache and --cache: the keys and values of a document, kept in a file between runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.adapters.transformers import LongreachCache, Session
    from longreach.cache import CacheConfig

BOUNDARY = 8  # tokens at the end of a document that may depend on the question behind it


def add_saved_cache(parser: argparse.ArgumentParser) -> None:
    """--save-cache, --cache."""
    parser.add_argument("--save-cache", metavar="FILE", help="with --document: write its keys and values to a "
                        "file, for --cache")  # fmt: skip
    parser.add_argument("--cache", metavar="FILE", help="with --document: a file of --save-cache, of the same text, "
                        "model and methods; the document is not read again")  # fmt: skip


def check_save_place(args: argparse.Namespace) -> None:
    """Raise InvalidInput before the document is read where --save-cache cannot be written."""
    if args.save_cache is not None:
        from longreach.adapters.transformers.cache_file import check_place

        check_place(Path(args.save_cache), False)


def loaded_cache(
    session: Session, path: str | None, document: Sequence[int], config: CacheConfig
) -> LongreachCache | None:
    """The cache of --cache, cut to the tokens that the document begins with; None without a file.

    Raises InvalidInput for a file of another text, and what `session.load_cache` raises.
    """
    if path is None:
        return None
    cache = session.load_cache(path, config)
    if cache.batch != 1 or cache.saved_tokens is None:
        raise InvalidInput(
            f"--cache {path}: expected the cache of one document with its tokens, got {cache.batch} sequences"
            f"{'' if cache.saved_tokens is not None else ' without tokens'}; make it with longreach run --save-cache"
        )
    saved: list[int] = cache.saved_tokens[0].tolist()
    pairs = enumerate(zip(saved, document, strict=False))
    shortest = min(len(saved), len(document))
    same = next((n for n, (a, b) in pairs if a != b), shortest)
    if same < 1 or same < shortest - BOUNDARY:
        raise InvalidInput(
            f"--cache {path} is of another document: it differs at token {same} of {len(document)}; give the "
            f"--document that it was saved with, or leave --cache out"
        )
    cache.drop_columns(cache.columns - same)
    cache.saved_tokens = cache.saved_tokens[:, :same]
    return cache
