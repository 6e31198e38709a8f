"""Which stretches of one text occur in another: windows of 64 characters, found by hash, confirmed by text."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

WINDOW = 64  # characters; a power of two, so that window hashes double up

_BASE = 0x9E3779B97F4A7C15  # odd


def normalise(text: str) -> str:
    """Lower-cased, every run of whitespace one space: re-wrapping or re-casing a text cannot hide overlap."""
    return re.sub(r"\s+", " ", text).strip().lower()


def window_hashes(text: str) -> np.ndarray:
    """Polynomial hashes, modulo 2**64, of all windows of a normalised text: uint64 [len(text) - 63] (or empty)."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    if len(codes) < WINDOW:
        return np.empty(0, dtype=np.uint64)
    hashes, power, width = codes + np.uint64(1), _BASE, 1
    while width < WINDOW:
        hashes = hashes[:-width] * np.uint64(power) + hashes[width:]
        power, width = power * power % 2**64, width * 2
    return hashes


class OverlapIndex:
    """All windows of a set of held-out texts, ready to be looked for in other texts."""

    def __init__(self, texts: Iterable[str]):
        normal = [normalise(text) for text in texts]
        self._windows = {text[i : i + WINDOW] for text in normal for i in range(len(text) - WINDOW + 1)}
        hashes = [window_hashes(text) for text in normal]
        self._hashes = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, dtype=np.uint64)
        self._table = np.zeros(1 << 24, dtype=bool)  # first sieve: the top 24 bits
        self._table[(self._hashes >> np.uint64(40)).astype(np.int64)] = True

    def starts(self, text: str) -> list[int]:
        """Offsets in `normalise(text)` at which a held-out window starts."""
        normal = normalise(text)
        hashes = window_hashes(normal)
        maybe = np.flatnonzero(self._table[(hashes >> np.uint64(40)).astype(np.int64)])
        if not len(maybe):
            return []
        place = np.searchsorted(self._hashes, hashes[maybe]).clip(max=len(self._hashes) - 1)
        maybe = maybe[self._hashes[place] == hashes[maybe]]
        return [int(i) for i in maybe if normal[i : i + WINDOW] in self._windows]

    def hits(self, text: str) -> bool:
        """Whether any window of the text is held out."""
        return bool(self.starts(text))
