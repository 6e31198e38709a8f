"""Short names of methods, and words for their options, for tables and pictures."""

from __future__ import annotations

import re

BEHIND = {"alone": "alone", "bos": "behind BOS", "system": "behind the system prompt"}  # --chunks
DENSE = "dense "
SLOTS = re.compile(r"(?<= )(?:fuse[=.]|evict\.)")


def short_label(label: str) -> str:
    """The --method text of a method, without the names of its slots: "a3 ratio=0.3" for "dense fuse=a3 fuse.ratio=0.3".

    Only dense methods that fuse or evict are shortened; texts that differ stay different.
    """
    if not label.startswith(DENSE) or not re.search(r" (?:fuse|evict)=", label):
        return label
    short = SLOTS.sub("", label)
    return short.removeprefix(DENSE) if " fuse=" in label else short
