"""Errors by layer and hit rates of fusion methods, against what the model's own eager attention and cache say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.evals.fusion import CONTROLS
from longreach.evals.fusion.study import LAYERS, FusionStudy, Means
from longreach.evals.methods import specs
from longreach.testing.tiny import tiny_model, tiny_tokenizer
from tests.evals.test_evaluate import Letters

TEXTS = ["dense fuse=pie", "dense fuse=a3_deep fuse.ratio=1.0", "dense fuse=oracle fuse.ratio=0.3", "dense fuse=random",
         "dense fuse=a3"]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=4)


def study(model: Any, texts: list[str] = TEXTS, **settings: Any) -> FusionStudy:
    given = {"length": 130, "samples": 2, "chunk_tokens": 24, "behind": "bos", **settings}
    return FusionStudy(model, tiny_tokenizer(), [Letters()], specs(texts, controls=CONTROLS), **given)


@pytest.fixture(scope="module")
def record(model: Any) -> dict[str, Any]:
    return study(model).run(16)


def test_nothing_recomputed_everything_and_what_moves_most(record: dict[str, Any]) -> None:
    pie, whole, oracle, random, a3 = (record["results"][text] for text in TEXTS)
    assert pie["chosen"] == 0 and pie["hits_change"] is None and pie["hits_attention"] == 0
    assert pie["layers"]["value_recomputed"] == [None] * 4 and pie["layers"]["attention"][0] < 1e-6
    assert all(error > 0.01 for error in pie["layers"]["attention"][1:] + pie["layers"]["value_reused"][1:])
    assert whole["hits_change"] == whole["hits_attention"] == pytest.approx(1) == whole["attention_chosen"]
    assert max(whole["layers"]["attention"] + whole["layers"]["key_recomputed"]) < 1e-4
    assert whole["layers"]["key_reused"] == [None] * 4
    for kind in ("key", "value"):  # of all stored tokens, recomputed or not
        assert pie["layers"][kind] == pie["layers"][f"{kind}_reused"]
        assert whole["layers"][kind] == whole["layers"][f"{kind}_recomputed"]
        either = [oracle["layers"][f"{kind}_{part}"][2] for part in ("recomputed", "reused")]
        assert min(either) < oracle["layers"][kind][2] < max(either)
    assert oracle["hits_change"] == 1 and random["hits_change"] < 0.6
    assert a3["layers"]["key_reused"][1] < 1e-5  # the second layer is computed for all tokens
    assert oracle["layers"]["value_recomputed"][2] < random["layers"]["value_reused"][2]
    assert {*a3["layers"]} == {*LAYERS} and a3["tasks"]["letters"]["chosen"] == a3["chosen"]
    assert [s["number"] for s in record["samples"]] == [0, 1] and record["samples"][0]["question_tokens"] > 5


def test_reused_values_and_attention_are_as_far_off_as_the_model_itself_says(model: Any) -> None:
    """Values of a chunk behind BOS by transformers' own cache; attention of a fused pass by its own eager layers."""
    made = study(model, ["dense fuse=pie"], samples=1)
    got = made.run(64)["results"]["dense fuse=pie"]["layers"]
    (one,) = made.prompts["letters"]
    plain = values(model, list(one.prompt))
    for layer in range(4):
        off, size = 0.0, 0.0
        for start, stop in one.chunks:
            own = values(model, [one.prompt[0], *one.prompt[start:stop]])[layer][:, 1:]
            truth = plain[layer][:, start:stop]
            if start > 1:  # the first chunk stands where it was computed
                off, size = off + float((own - truth).square().sum()), size + float(truth.square().sum())
        assert got["value_reused"][layer] == pytest.approx((off / size) ** 0.5, rel=1e-3, abs=1e-6)


@torch.no_grad()
def values(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """[G, N, D] of each layer."""
    out = model(torch.tensor([ids]), use_cache=True)
    return [layer.values[0].double() for layer in out.past_key_values.layers]


def test_attention_maps_are_the_models(model: Any) -> None:
    made = study(model, ["dense fuse=pie"], samples=1)
    kept: list[Any] = []
    truth = made._truth

    def keep(*more: Any) -> Any:
        kept.append(truth(*more))
        return kept[-1]

    made._truth = keep  # type: ignore[method-assign]
    made.run(64)
    (one,) = made.prompts["letters"]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(torch.tensor([one.prompt]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    asking = len(one.prompt) - one.chunks[-1][1]
    for layer, want in enumerate(maps):
        torch.testing.assert_close(
            kept[0].maps[layer].transpose(0, 1), want[0, :, -asking:].float(), rtol=1e-4, atol=1e-5
        )


def test_means_leave_out_what_is_not_there() -> None:
    means = Means()
    for value in (1.0, None, 2.0):
        means.add("a", 3, value)
    assert means.mean("a", 3) == 1.5 and means.mean("a") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quest fuse=a3", "'quest fuse=a3': expected 'dense fuse=NAME'"),
        ("dense fuse=row_order", "'dense fuse=row_order': the rows of row_order do not see"),
        ("streaming_llm", "expected 'dense fuse=NAME'"),
        ("dense fuse=a3 evict=snapkv", "before keys are evicted"),
        ("dense fuse=a3_deep fuse.layer=4", "layer: expected a layer"),
        ("dense", "no fusion method"),
    ],
)
def test_what_cannot_be_measured(model: Any, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        study(model, [text])
    with pytest.raises(InvalidInput, match="samples: expected at least 1"):
        study(model, samples=0)
