"""Methods that differ only in the share of tokens that they recompute: one curve of a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from longreach.records.labels import short_label

RATIO = re.compile(r" ratio=\S+")


class Family(NamedTuple):
    """labels: its methods, lowest ratio first. name: its short label, without a ratio if it has several."""

    name: str
    labels: tuple[str, ...]


def ratio_of(method: Mapping[str, Any]) -> float | None:
    """The ratio of a method's fusion; None for a method without one."""
    ratio = method.get("fuse", {}).get("ratio")
    return None if ratio is None else float(ratio)


def families(methods: Mapping[str, Any], labels: Sequence[str]) -> list[Family]:
    """Families of some methods of a record, in the order in which they are first named."""
    found: dict[str, list[str]] = {}
    for label in labels:
        method = methods[label]
        rest = {**method, "fuse": {k: v for k, v in method.get("fuse", {}).items() if k != "ratio"}}
        found.setdefault(json.dumps(rest, sort_keys=True), []).append(label)
    return [
        Family(RATIO.sub("", name) if len(mine) > 1 else name, tuple(sorted(mine, key=lambda x: _order(methods[x]))))
        for mine in found.values() if (name := short_label(mine[0]))
    ]  # fmt: skip


def _order(method: Mapping[str, Any]) -> float:
    ratio = ratio_of(method)
    return -1.0 if ratio is None else ratio
