"""Methods that differ only in their ratio are one family."""

from __future__ import annotations

from longreach.records.report.families import Family, families, ratio_of
from tests.records.report.factory import FUSED


def test_ratios_of_a_method_are_a_family() -> None:
    assert families(FUSED, list(FUSED)) == [
        Family("dense", ("dense",)),
        Family("full_reuse", ("dense fuse=full_reuse",)),
        Family("a3", ("dense fuse=a3 fuse.ratio=0.15", "dense fuse=a3 fuse.ratio=0.3")),
        Family("a3 evict=snapkv", ("dense fuse=a3 evict=snapkv",)),
        Family("dense evict=snapkv", ("dense evict=snapkv",)),
    ]
    assert families(FUSED, ["dense fuse=a3 fuse.ratio=0.3"])[0].name == "a3 ratio=0.3"


def test_a_default_ratio_is_a_ratio() -> None:
    methods = {"dense fuse=a3": FUSED["dense fuse=a3 fuse.ratio=0.15"], **FUSED}
    found = families(methods, ["dense fuse=a3", "dense fuse=a3 fuse.ratio=0.3"])
    assert found == [Family("a3", ("dense fuse=a3", "dense fuse=a3 fuse.ratio=0.3"))]
    assert [ratio_of(methods[label]) for label in ("dense", "dense fuse=a3")] == [None, 0.15]
