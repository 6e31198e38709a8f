"""Options of the trained attention: refusals, JSON, defaults."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.errors import InvalidInput, LongreachError, UnknownName
from longreach.mka.config import VARIANTS, MKAConfig

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("mkka", {}, "mkka.*fastmka"),
    ("mka", {"blok": 4}, "blok.*block"),
    ("mka", {"block": 0}, "block: expected a count"),
    ("block_mka", {"blocks": 0}, "blocks: expected a count"),
    ("block_mka", {"blocks": True}, "blocks: expected a count"),
    ("block_mka", {"block": 48, "window": 100}, "multiple of block=48"),
    ("fastmka", {"decay": 1.0}, r"decay: expected a float from 3.1e-07 to 1 - 3.1e-07"),
    ("fastmka", {"decay": 0.0}, r"decay: expected a float from"),
    ("fastmka", {"decay": -0.5}, r"decay: expected a float from"),
    ("fastmka", {"decay": 1 - 1e-7}, r"decay: expected a float from"),
    ("fastmka", {"decay": 1e-7}, r"decay: expected a float from"),
    ("fastmka", {"decay": "a"}, r"decay: expected a float from"),
    ("fastmka", {"summary": "median"}, "median.*ema"),
    ("fastmka", {"mode": "gated"}, "mode: without effect"),
    ("fastmka", {"blocks": 4}, "blocks: without effect"),
    ("fastmka", {"window": 512}, "window: without effect"),
    ("fastmka", {"tiers": (1, 2, 3), "recall": "index"}, "recall: fastmka"),
    ("fastmka", {"summary": "mean", "decay": 0.5}, "decay: without effect"),
    ("block_mka", {"summary": "mean"}, "summary: without effect"),
    ("block_mka", {"bits": 64}, "bits: without effect"),
    ("block_mka", {"recall": "hash", "bits": 60}, "bits: expected a multiple of 8"),
    ("block_mka", {"recall": "hash", "bits": 304}, "bits: expected a multiple of 8 up to 256, got 304"),
    ("block_mka", {"recall": "hash", "bits": True}, "bits: expected a multiple of 8"),
    ("block_mka", {"recall": "index", "features": 12}, "features: expected a multiple of 8 up to 256, got 12"),
    ("block_mka", {"recall": "hash", "seed": -1}, "seed: expected"),
    ("block_mka", {"recall": "lsh"}, "lsh.*summary"),
    ("mka", {"tiers": (2, 3)}, "tiers: expected"),
    ("mka", {"tiers": (3, 1)}, "tiers: expected"),
    ("mka", {"tiers": (1, 4)}, "tiers: expected"),
    ("mka", {"tiers": 3}, r"tiers: expected a list of \(1, 2, 3\).*such as \[1, 3\], got 3"),
    ("mka", {"tiers": "1,3"}, r"tiers: expected a list of .*got '1,3'"),
    ("mka", {"tiers": None}, "tiers: expected a list"),
    ("mka", {"tiers": (1.0, 2.0, 3.0)}, "tiers: expected a list"),
    ("mka", {"tiers": (True,)}, "tiers: expected a list"),
    ("mka", {"tiers": ([1],)}, "tiers: expected a list"),
    ("mka", {"share": None}, "share: expected layer numbers"),
    ("mka", {"share": 0}, r"share: expected layer numbers, ascending, such as \[0, 2\], got 0"),
    ("fastmka", {"routing": "top2"}, r"routing: top2 keeps two levels, and tiers \(1, 2\) are two"),
    ("mka", {"tiers": (1,), "routing": "fixed"}, "routing: without effect"),
    ("mka", {"tiers": (1,), "router_width": 8}, "router_width: without effect"),
    ("mka", {"tiers": (1,), "mode": "gated"}, "mode: without effect"),
    ("block_mka", {"tiers": (1, 2), "recall": "summary"}, "recall: without effect"),
    ("mka", {"routing": "top3"}, "top3.*learned"),
    ("mka", {"routing": "fixed", "router_width": 8}, "router_width: without effect"),
    ("mka", {"mode": "sum"}, "sum.*softmaxes"),
    ("mka", {"layers": ()}, "layers: expected at least one"),
    ("mka", {"layers": (1, 1)}, "layers: expected layer numbers, ascending"),
    ("mka", {"layers": (-1,)}, "layers: expected layer numbers"),
    ("mka", {"layers": (0, 1), "share": (0, 2)}, r"share: layers \[2\]"),
]


@pytest.mark.parametrize("variant, options, message", BAD)
def test_bad_options_are_refused(variant: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LongreachError, match=message):
        MKAConfig.make(variant, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_json_round_trip(variant: str) -> None:
    config = MKAConfig.make(variant, layers=[0, 2], tiers=[1, 2])
    assert MKAConfig.from_json(config.to_json()) == config and hash(config) == hash(
        MKAConfig.from_json(config.to_json())
    )
    assert MKAConfig.make(variant).tiers == ((1, 2) if variant == "fastmka" else (1, 2, 3))
    with pytest.raises(UnknownName, match=r"blok.*block"):
        MKAConfig.from_json({**config.to_json(), "blok": 3})
    with pytest.raises(InvalidInput, match="expected a variant"):
        MKAConfig.from_json({"block": 3})


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "fastmka", "mode": "gated", "blocks": 3},
        {"variant": "block_mka", "decay": 0.5},
        {"variant": "mka", "tiers": [1], "routing": "top1"},
    ],
)
def test_json_with_options_without_effect_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="without effect"):
        MKAConfig.from_json(options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recall_by_default(variant: str) -> None:
    want = "summary" if variant == "fastmka" else "bounds"
    assert MKAConfig.make(variant, tiers=(1, 2, 3)).recall == want
    assert MKAConfig.make(variant, tiers=(1, 2, 3)).to_json()["recall"] == want


@pytest.mark.parametrize(("variant", "tiers"), [("mka", (1, 2, 3)), ("block_mka", (1, 2, 3)), ("block_mka", (1, 2))])
def test_json_of_models_that_recalled_by_summary_keeps_its_meaning(variant: str, tiers: tuple[int, ...]) -> None:
    """Configs hold all options, so those of models converted when "summary" was the default name it."""
    config = MKAConfig.make(variant, tiers=tiers)
    old = MKAConfig.from_json({**config.to_json(), "recall": "summary"})
    assert old.recall == "summary" and old.tiers == tiers


def test_what_does_not_fit_a_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="layer 12 does not exist"):
        MKAConfig.make("mka", layers=(3, 12)).check_model(12, 64)
    with pytest.raises(InvalidInput, match="up to 128 channels, got 256; use recall='summary'"):
        MKAConfig.make("mka").check_model(12, 256)
    with pytest.raises(InvalidInput, match="first converted layer, 0, must be in it"):
        MKAConfig.make("block_mka", share=(4, 8)).check_model(12, 64)
    MKAConfig.make("block_mka", share=(4, 8), layers=(4, 5, 8)).check_model(12, 64)
