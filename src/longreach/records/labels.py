"""Short names of methods, and words for their options, for tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BEHIND = {"alone": "alone", "bos": "behind BOS", "system": "behind the system prompt"}  # --chunks
DENSE = "dense "
SLOTS = re.compile(r"(?<= )(?:fuse[=.]|evict\.)")


TWO_ANCHORS = "two anchors"
OLD_TAU = 0.45
OLD_RECALL = "summary"


def default_note(record: Mapping[str, Any], label: str) -> str:
    """What was the default when a record was made and is not now, for a method that has it. Else "".

    TWO_ANCHORS: longreach-mini's plan for Kascade, in records without `model.plans`. "tau 0.45": MAC's threshold.
    "recall=summary": how `block_mka` chooses blocks.
    """
    model, methods = record["model"], record["methods"][label]
    used = [methods.get(slot, {}) for slot in ("prefill", "decode")]
    old = model["name"] == "longreach-mini" and "plans" not in model
    if old and any(method.get("name") == "kascade" and method.get("plan") is None for method in used):
        return TWO_ANCHORS
    if "tau=" not in label and any(method.get("name") == "mac" and method.get("tau") == OLD_TAU for method in used):
        return f"tau {OLD_TAU}"
    recalls = {method.get("recall") for method in used if method.get("name") == "block_mka"}
    if "recall=" not in label and OLD_RECALL in recalls:
        return f"recall={OLD_RECALL}"
    return ""


def short_label(label: str) -> str:
    """The --method text of a method, without the names of its slots: "a3 ratio=0.3" for "dense fuse=a3 fuse.ratio=0.3".

    Only dense methods that fuse or evict are shortened; texts that differ stay different.
    """
    if not label.startswith(DENSE) or not re.search(r" (?:fuse|evict)=", label):
        return label
    short = SLOTS.sub("", label)
    return short.removeprefix(DENSE) if " fuse=" in label else short
