"""Short names of methods, and words for their options, for tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BEHIND = {"alone": "alone", "bos": "behind BOS", "system": "behind the system prompt"}  # --chunks
DENSE = "dense "
SLOTS = re.compile(r"(?<= )(?:fuse[=.]|evict\.)")


TWO_ANCHORS = "two anchors"


def plan_note(record: Mapping[str, Any], label: str) -> str:
    """TWO_ANCHORS where a method has longreach-mini's default plan for Kascade in a record without `model.plans`: such
    records are older than the default plan of three anchors. Else ""."""
    model, methods = record["model"], record["methods"][label]
    old = model["name"] == "longreach-mini" and "plans" not in model
    used = (methods.get(slot, {}) for slot in ("prefill", "decode"))
    named = any(method.get("name") == "kascade" and method.get("plan") is None for method in used)
    return TWO_ANCHORS if old and named else ""


def short_label(label: str) -> str:
    """The --method text of a method, without the names of its slots: "a3 ratio=0.3" for "dense fuse=a3 fuse.ratio=0.3".

    Only dense methods that fuse or evict are shortened; texts that differ stay different.
    """
    if not label.startswith(DENSE) or not re.search(r" (?:fuse|evict)=", label):
        return label
    short = SLOTS.sub("", label)
    return short.removeprefix(DENSE) if " fuse=" in label else short
