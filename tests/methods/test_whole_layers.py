"""The layers that methods name as read whole (tests/adapters/transformers/test_host.py compares them with reads)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longreach.methods.base import AttentionMethod
from longreach.methods.block_mka import BlockMKA
from longreach.methods.call import ModelShape
from longreach.methods.dense import Dense
from longreach.methods.kascade import Kascade
from longreach.methods.less_is_more import LessIsMore
from longreach.methods.loki import Loki
from longreach.methods.mac import MAC
from longreach.methods.magicpig import MagicPIG
from longreach.methods.omnikv import OmniKV
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.quest import Quest
from longreach.methods.streaming_llm import StreamingLLM
from tests.methods.drive import MODEL

LARGE = ModelShape(32, 32, 8, 128)


@pytest.mark.parametrize(
    "method, model, layers",
    [
        (Dense(), LARGE, set(range(32))),
        (OracleTopK(), LARGE, set(range(32))),
        (StreamingLLM(), LARGE, set()),
        (Quest(), LARGE, {0, 1}),
        (Quest(dense_layers=()), LARGE, set()),
        (BlockMKA(), LARGE, set()),
        (BlockMKA(dense_layers=(0, 5)), LARGE, {0, 5}),
        (OmniKV(), LARGE, {0, 1, 2, 8, 18}),
        (LessIsMore(layers=(1, 4)), LARGE, {0, 1, 4}),
        (Loki(dense_layers=(2,)), MODEL, {2}),
        (Kascade(), MODEL, {0, 2}),
        (Kascade(scoring="int8"), MODEL, {0}),
        (Kascade(scoring="int8", dense_layers=(1,)), MODEL, {0, 1}),
        (MAC(), LARGE, set()),
        (MAC(band=None), MODEL, set()),
        (MagicPIG(bits=10, tables=75), LARGE, {0, 16}),
        (MagicPIG(bits=10, tables=75, dense_layers=(3,)), LARGE, {3}),
        (MagicPIG(bits=0), LARGE, set(range(32))),
        (MagicPIG(local=8, seal=8, centre=8), MODEL, {1}),  # by the plan
    ],
    ids=str,
)
def test_layers_read_whole(method: AttentionMethod, model: ModelShape, layers: set[int]) -> None:
    assert set(method.whole_layers(model, torch.float32)) == layers


def test_layers_for_which_a_plan_has_no_band_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(band=(4, None, 5))
    monkeypatch.setattr(MAC, "_plan_for", lambda *_: plan)
    assert MAC(band=None).whole_layers(MODEL, torch.float32) == [1]
    assert not MAC(band=None, window=8).whole_layers(ModelShape(1, 4, 2, 8), torch.float32)
