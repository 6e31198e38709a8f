"""Kascade in models: whole budgets, windows, padding, passes without a cache, longreach's own loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import longreach
from longreach.adapters.transformers import shape_of
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.methods.kascade import Kascade
from longreach.plans import load
from longreach.testing.tiny import PAD_ID, random_tokens, tiny_model
from tests.methods.kascade.planned import planned
from tests.tiers import swept

FAMILIES = {  # layers of full attention, and the anchors among them
    "llama": {"layers": (0, 1, 2, 3), "anchors": (0, 2)},
    "gemma2": {"layers": (1, 3), "anchors": (1,)},
    "gpt_oss": {"layers": (1, 3), "anchors": (1,)},
}
families = pytest.mark.parametrize("family", swept(["gpt_oss", "llama", "gemma2"], 2))
LAYERS, STEPS = 4, 7


def model_and_plan(family: str, folder: Path, **changes: Any) -> tuple[Any, str]:
    types = {"gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2}}
    model = tiny_model(family, num_hidden_layers=LAYERS, **types.get(family, {}))
    about = {**FAMILIES[family], **changes}
    last = about["layers"][-1]
    return model, planned(folder, head_map={last: (1, 0)}, model=shape_of(model), **about)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Three sequences, two of them padded on the left."""
    tokens = random_tokens(3, 50, seed=3)
    mask = torch.ones_like(tokens)
    mask[0, :17], mask[2, :40] = 0, 0
    return tokens.masked_fill(mask == 0, PAD_ID), mask


@families
def test_with_the_whole_budget_it_gives_dense_tokens(family: str, tmp_path: Path) -> None:
    model, plan = model_and_plan(family, tmp_path)
    tokens, mask = batch()
    want = longreach.generate(model, tokens, mask, max_new_tokens=STEPS)
    for options in ({"k": 1.0}, {"k": 1.0, "heads": "all"}, {"k": 1, "dense_below": 100}):
        method = Kascade(plan, **options)
        got = longreach.generate(
            model, tokens, mask, max_new_tokens=STEPS, prefill=method, decode=method, cache=CacheConfig("paged", page=8)
        )
        assert torch.equal(got.tokens, want.tokens)


@families
def test_at_a_small_budget_tokens_differ_and_are_the_same_in_every_loop_and_layout(family: str, tmp_path: Path) -> None:
    """transformers' generate and longreach's; contiguous and paged; padded in a batch, and alone."""
    model, plan = model_and_plan(family, tmp_path)
    tokens, mask = batch()
    methods = dict.fromkeys(("prefill", "decode"), Kascade(plan, k=0.1, min_keys=3))
    got = longreach.generate(model, tokens, mask, max_new_tokens=STEPS, **methods)
    assert not torch.equal(got.tokens, longreach.generate(model, tokens, mask, max_new_tokens=STEPS).tokens)
    for cache in (CacheConfig(), CacheConfig("paged", page=8), CacheConfig(capacity=200)):
        with longreach.attach(model, **methods, cache=cache):
            theirs = model.generate(tokens, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
            assert torch.equal(theirs, got.sequences)
            alone = model.generate(tokens[:1, 17:], max_new_tokens=STEPS, do_sample=False)
            assert torch.equal(alone[0, 33:], got.tokens[0])


def test_a_plan_for_decode_only_decodes_and_reads_no_prompts(tmp_path: Path) -> None:
    """Such a plan has no tile. The refusal names it, and the command that makes a whole plan."""
    model, plan = model_and_plan("llama", tmp_path)
    tokens, without = random_tokens(1, 50), tmp_path / "decode.json"
    whole = load(Path(plan), "kascade")
    replace(whole, values={name: x for name, x in whole.values.items() if name != "tile"}).save(without)
    method = Kascade(str(without), k=0.1, min_keys=3)
    want = longreach.generate(model, tokens, max_new_tokens=STEPS, decode=replace(method, plan=plan))
    assert torch.equal(longreach.generate(model, tokens, max_new_tokens=STEPS, decode=method).tokens, want.tokens)
    named = (
        r"the plan lacks the value 'tile'.* longreach calibrate kascade --model MODEL --text FILE --output plan.json"
    )
    with pytest.raises(InvalidInput, match=named):
        longreach.attach(model, prefill=method)


@torch.no_grad()
@families
def test_a_pass_without_a_cache_is_a_pass_with_one(family: str, tmp_path: Path) -> None:
    model, plan = model_and_plan(family, tmp_path)
    tokens, mask = batch()
    with longreach.attach(model, prefill=Kascade(plan, k=0.1, min_keys=3)) as session:
        cached = model(tokens, attention_mask=mask, past_key_values=session.new_cache(3)).logits
        plain = model(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(plain[mask == 1], cached[mask == 1], rtol=0, atol=1e-3)


@torch.no_grad()
def test_chunks_of_a_prompt_that_end_at_tiles(tmp_path: Path) -> None:
    model, plan = model_and_plan("llama", tmp_path)
    tokens = random_tokens(2, 50)
    with longreach.attach(model, prefill=Kascade(plan, k=0.2, min_keys=3)) as session:
        whole = model(tokens, past_key_values=session.new_cache(2)).logits
        cache = session.new_cache(2)
        parts = [model(part, past_key_values=cache).logits for part in tokens.split(12, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-3)


def test_plans_that_do_not_fit_are_refused_before_anything_is_attached(tmp_path: Path) -> None:
    _, plan = model_and_plan("llama", tmp_path)
    other = tiny_model("llama", num_hidden_layers=LAYERS, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    tokens = random_tokens(1, 10)
    want = other.generate(tokens, max_new_tokens=3, do_sample=False)
    for options in ({"decode": Kascade(plan)}, {"prefill": Kascade(plan)}):
        with pytest.raises(InvalidInput, match="is for a model, and this is another model: hash of the configuration"):
            longreach.attach(other, **options)
    with pytest.raises(InvalidInput, match="no kascade plan is shipped for this model"):
        longreach.attach(other, decode=Kascade("none"))
    with longreach.attach(other) as session, pytest.raises(InvalidInput, match="another model"):
        session.switch(Kascade(plan))
    assert torch.equal(other.generate(tokens, max_new_tokens=3, do_sample=False), want)


def test_an_anchor_behind_a_window_is_named(tmp_path: Path) -> None:
    """gemma2's layer 0 attends to a window, and this plan has layer 1 reuse what it chooses."""
    model, plan = model_and_plan("gemma2", tmp_path, anchors=(0,), layers=(0, 1, 2, 3))
    wrong = pytest.raises(InvalidInput, match="layer 1 reuses the keys that layer 0 chooses")
    with longreach.attach(model, decode=Kascade(plan)), wrong:
        model.generate(random_tokens(1, 20), max_new_tokens=3, do_sample=False)


def test_a_plan_is_read_once_and_its_part_kept_with_the_cache(tmp_path: Path, monkeypatch: Any) -> None:
    model, plan = model_and_plan("llama", tmp_path)
    found = []
    original = longreach.methods.kascade.method.plan_for
    monkeypatch.setattr("longreach.methods.kascade.method.plan_for", lambda *a: found.append(a) or original(*a))
    with longreach.attach(model, decode=Kascade(plan)):
        before = len(found)
        model.generate(random_tokens(1, 20), max_new_tokens=5, do_sample=False)
    assert len(found) - before == LAYERS  # once a layer, not once a step


def test_the_report_tells_layers_apart(tmp_path: Path) -> None:
    model, plan = model_and_plan("llama", tmp_path)
    with longreach.attach(model, decode=Kascade(plan, k=4)) as session:
        model.generate(random_tokens(1, 40), max_new_tokens=2, do_sample=False)
    decode = [layer for layer in session.report().layers if layer.phase == "decode"]
    vector = 2 * 16 * 4  # heads, channels, bytes
    assert [layer.key_bytes // vector for layer in decode] == [41, 4, 41, 4]
    assert [layer.value_bytes // vector for layer in decode] == [41, 4, 4, 4]
    assert [layer.metadata_bytes for layer in decode] == [0, 32, 32, 32]  # lists: 2 heads, 4 entries, int32
    assert [layer.dense_reasons for layer in decode] == [("first anchor",), (), (), ()]
    assert {layer.overflowed_lists for layer in decode} == {0}
