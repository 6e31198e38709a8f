"""Short names of methods."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.evals.fusion import CONTROLS
from longreach.methods.registry import EVICTIONS, FUSIONS, eviction_class, fusion_class
from longreach.records.labels import default_note, short_label


@pytest.mark.parametrize(
    ("label", "short"),
    [
        ("dense", "dense"),
        ("dense fuse=a3", "a3"),
        ("dense fuse=a3 fuse.heads=joint fuse.ratio=0.15", "a3 heads=joint ratio=0.15"),
        ("dense fuse=a3 evict=snapkv evict.capacity=64", "a3 evict=snapkv capacity=64"),
        ("dense evict=snapkv evict.capacity=64", "dense evict=snapkv capacity=64"),
        ("dense fuse.ratio=0.15 fuse=a3", "ratio=0.15 a3"),
        ("quest fuse=a3 fuse.ratio=0.15", "quest fuse=a3 fuse.ratio=0.15"),
        ("kascade/dense prefill.k=0.1", "kascade/dense prefill.k=0.1"),
    ],
)
def test_labels_lose_the_names_of_slots(label: str, short: str) -> None:
    assert short_label(label) == short


def test_no_option_of_fusion_is_one_of_eviction() -> None:
    """Short labels drop the slot from both."""
    fusion = {option for made in (*map(fusion_class, FUSIONS), *CONTROLS.values()) for option in made.options()}
    eviction = {option for name in EVICTIONS for option in eviction_class(name).options()}
    assert "ratio" in fusion and "capacity" in eviction and not fusion & eviction


@pytest.mark.parametrize(
    ("model", "method", "note"),
    [
        ({"name": "longreach-mini"}, {"decode": {"name": "kascade", "plan": None}}, "two anchors"),
        ({"name": "longreach-mini"}, {"prefill": {"name": "kascade", "plan": None}}, "two anchors"),
        ({"name": "longreach-mini"}, {"decode": {"name": "kascade", "plan": "plan.json"}}, ""),
        ({"name": "longreach-mini"}, {"decode": {"name": "loki", "plan": None}}, ""),
        ({"name": "longreach-mini", "plans": {}}, {"decode": {"name": "kascade", "plan": None}}, ""),
        ({"name": "other"}, {"decode": {"name": "kascade", "plan": None}}, ""),
    ],
)
def test_records_of_the_plan_of_two_anchors_say_so(model: Any, method: Any, note: str) -> None:
    assert default_note({"model": model, "methods": {"x": method}}, "x") == note


@pytest.mark.parametrize(
    ("label", "tau", "note"), [("mac", 0.45, "tau 0.45"), ("mac tau=0.45", 0.45, ""), ("mac", 0.75, "")]
)
def test_records_of_the_old_threshold_say_so(label: str, tau: float, note: str) -> None:
    record = {"model": {"name": "any", "plans": {}}, "methods": {label: {"decode": {"name": "mac", "tau": tau}}}}
    assert default_note(record, label) == note


@pytest.mark.parametrize(
    ("label", "recall", "note"),
    [
        ("block_mka", "summary", "recall=summary"),
        ("block_mka", "bounds", ""),
        ("block_mka recall=summary", "summary", ""),
    ],
)
def test_records_of_the_old_recall_say_so(label: str, recall: str, note: str) -> None:
    method = {"decode": {"name": "block_mka", "recall": recall}}
    assert default_note({"model": {"name": "any", "plans": {}}, "methods": {label: method}}, label) == note
