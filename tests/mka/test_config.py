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
    ("fastmka", {"decay": 1.0}, r"decay: expected a float in \(0, 1\)"),
    ("fastmka", {"decay": 0.0}, r"decay: expected a float in \(0, 1\)"),
    ("fastmka", {"decay": -0.5}, r"decay: expected a float in \(0, 1\)"),
    ("fastmka", {"summary": "median"}, "median.*ema"),
    ("fastmka", {"mode": "gated"}, "mode: without effect"),
    ("fastmka", {"blocks": 4}, "blocks: without effect"),
    ("fastmka", {"window": 512}, "window: without effect"),
    ("fastmka", {"tiers": (1, 2, 3), "recall": "index"}, "recall: fastmka"),
    ("fastmka", {"summary": "mean", "decay": 0.5}, "decay: without effect"),
    ("block_mka", {"summary": "mean"}, "summary: without effect"),
    ("block_mka", {"bits": 64}, "bits: without effect"),
    ("block_mka", {"recall": "hash", "bits": 60}, "bits: expected a multiple of 8"),
    ("block_mka", {"recall": "hash", "seed": -1}, "seed: expected"),
    ("block_mka", {"recall": "lsh"}, "lsh.*summary"),
    ("mka", {"tiers": (2, 3)}, "tiers: expected"),
    ("mka", {"tiers": (3, 1)}, "tiers: expected"),
    ("mka", {"tiers": (1, 4)}, "tiers: expected"),
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


def test_what_does_not_fit_a_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="layer 12 does not exist"):
        MKAConfig.make("mka", layers=(3, 12)).check_model(12, 64)
    with pytest.raises(InvalidInput, match="up to 128 channels, got 256"):
        MKAConfig.make("mka", recall="bounds").check_model(12, 256)
    with pytest.raises(InvalidInput, match="first converted layer, 0, must be in it"):
        MKAConfig.make("block_mka", share=(4, 8)).check_model(12, 64)
    MKAConfig.make("block_mka", share=(4, 8), layers=(4, 5, 8)).check_model(12, 64)
