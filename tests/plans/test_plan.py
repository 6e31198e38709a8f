"""What a plan may hold, and which models it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.call import ModelShape
from longreach.plans import PlannedModel
from tests.plans.factory import MADE, MODEL, plan

SHAPE = ModelShape(MODEL.layers, MODEL.query_heads, MODEL.kv_heads, MODEL.head_dim, MODEL.config)


def test_it_fits_the_model_it_was_made_for() -> None:
    assert PlannedModel.of("some-model", SHAPE) == MODEL
    plan().check(SHAPE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 5}, "layers 4 expected, 5 came"),
        ({"query_heads": 8}, "query heads 4 expected, 8 came"),
        ({"kv_heads": 4}, "kv heads 2 expected, 4 came"),
        ({"head_dim": 32}, "head dim 16 expected, 32 came"),
        ({"config": "beef" * 16}, "hash of the configuration c0ffeec0ffee expected, beefbeefbeef came"),
        ({"config": ""}, "expected, none came"),
    ],
)
def test_another_model_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        plan().check(replace(SHAPE, **change), "the plan p.json")
    said = str(error.value)
    assert words in said and "the plan p.json is for some-model" in said and "longreach calibrate mac" in said
    assert said.count("expected") == 1


def test_content_that_no_file_holds() -> None:
    with pytest.raises(UnknownName, match="kascade, mac, loki"):
        plan("quest")
    with pytest.raises(InvalidInput, match=r"'x'.*int8"):
        plan(arrays={"x": torch.zeros(2, dtype=torch.int8)})
    with pytest.raises(InvalidInput, match=r"'x'.*finite"):
        plan(arrays={"x": torch.tensor([1.0, torch.inf])})
    for value, where in (
        ({1: 2}, "values"),
        ({"a": {"b": object()}}, "values.a.b"),
        ({"a": [1, torch.nan]}, r"a\[1\]"),
    ):
        with pytest.raises(InvalidInput, match=where):
            plan(values=value)
    with pytest.raises(InvalidInput, match=r"made.settings.x"):
        plan(made=replace(MADE, settings={"x": {1, 2}}))


def test_any_object_with_a_models_sizes_will_do() -> None:
    @dataclass(frozen=True)
    class Other:
        layers: int = MODEL.layers
        query_heads: int = MODEL.query_heads
        kv_heads: int = MODEL.kv_heads
        head_dim: int = MODEL.head_dim
        config: str = MODEL.config

    plan().check(Other())
