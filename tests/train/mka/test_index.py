"""The index of blocks: dense attention's mass per block, shares that are recalled, and distillation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.adapters.transformers.mka import convert
from longreach.errors import InvalidInput
from longreach.evals.calibration.prompts import Prompt
from longreach.mka.block import Blocks, Reach, choose
from longreach.ops import KVView, Rows
from longreach.testing.tiny import random_tokens, tiny_model
from longreach.train.mka import dense_rows as reading
from longreach.train.mka.dense_rows import Cut, LayerRows, dense_rows
from longreach.train.mka.index import Example, check_index, distil, index_loss, linear_start
from longreach.train.mka.shares import Shares, indices_of, recall_shares, recalled

CUT = Cut(block=4, window=8, rows=12, more_than=3)


def prompts(count: int, length: int = 90, seed: int = 0) -> list[Prompt]:
    return [Prompt(f"{n}", tuple(random_tokens(1, length, seed=seed + n)[0].tolist())) for n in range(count)]


def indexed(**options: Any) -> Any:
    torch.manual_seed(0)
    given = {"recall": "index", "block": 4, "window": 8, "blocks": 3, "features": 8, **options}
    if given["recall"] != "index":
        del given["features"]
    return convert(tiny_model("llama"), "block_mka", **given)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_mass_is_that_of_the_models_own_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 50)  # several passes
    monkeypatch.setattr(reading, "AT_ONCE", 400)
    model, (prompt,) = tiny_model(family), prompts(1)
    (found,) = dense_rows(model, [prompt], CUT)
    with torch.no_grad():
        told = model(torch.tensor([prompt.tokens]), output_attentions=True, use_cache=False).attentions
    assert sorted(found) == [0, 1]
    for layer, rows in found.items():
        weights = told[layer][0].unflatten(0, (2, -1)).sum(1)[:, rows.pos]  # [G, R, N]
        blocks = weights[..., :88].unflatten(-1, (22, 4)).sum(-1).transpose(0, 1)
        torch.testing.assert_close(rows.mass, torch.where(rows.allowed, blocks, 0.0), rtol=1e-4, atol=1e-6)
        assert rows.stop.tolist() == [max(0, p // 4 - 2) for p in rows.pos.tolist()]
        assert len(rows.pos) == 12 and rows.pos[-6:].tolist() == list(range(84, 90)) and min(rows.stop) > 3


def test_prompts_without_a_choice_are_refused() -> None:
    assert CUT.least == 25 and len(CUT.chosen(25, 0)) == 1 and int(CUT.stop(CUT.chosen(25, 0))) == 4
    with pytest.raises(InvalidInput, match=r"a prompt of 24 tokens is too short.*25 are needed"):
        CUT.chosen(24, 0)


def rows_of(model: Any, prompt: Prompt) -> dict[int, LayerRows]:
    (found,) = dense_rows(model, [prompt], CUT)
    return found


@pytest.mark.parametrize("recall", ["index", "summary", "bounds", "hash"])
def test_blocks_recalled_are_those_of_the_converted_layer(recall: str) -> None:
    model = indexed(recall=recall)
    for layer, rows in rows_of(model, prompts(1)[0]).items():
        levels = model.model.layers[layer].self_attn.mka
        config, code = levels.config, levels.code(rows.frequencies)
        k = rows.k.flatten(1, 2)[None]
        kv = KVView(k, k, torch.tensor([k.shape[2]]))
        first = torch.arange(0, k.shape[2], 4)[None]
        blocks = Blocks.of(kv, first, code, rows.frequencies, 4, summaries=False)
        reach = Reach.of(rows.pos, None, config)
        chosen = choose(
            Rows(rows.q, torch.zeros_like(rows.pos), rows.pos), rows.pos, 2, blocks, reach, code, config, rows.scale
        )
        expected = rows.mass.gather(-1, chosen.index.long())
        assert torch.equal(recalled(rows, code, 3), expected) and torch.equal(reach.stop, rows.stop)


def test_shares_lie_between_chance_and_the_oracle() -> None:
    found = recall_shares(tiny_model("llama"), prompts(3), block=4, window=8, counts=(1, 3), bits=(16,), rows=12)
    assert found["rows"] == 36 and found["counts"] == [1, 3] and set(found["layers"]) == {"0", "1"}
    for table in (found["all"], *found["layers"].values()):
        assert 0 < table["far"] < 1 and set(table) == {"far", "oracle", "summary", "bounds", "hash 16", "chance"}
        for name in ("summary", "bounds", "hash 16", "chance"):
            assert 0 < table[name]["1"] < table[name]["3"] < table["oracle"]["3"] < 1
    best = found["all"]
    assert best["summary"]["3"] > best["chance"]["3"] and best["bounds"]["3"] > best["chance"]["3"]


def test_everything_recalled_is_everything() -> None:
    rows = rows_of(tiny_model("llama"), prompts(1)[0])
    shares = Shares((30,), bits=(16,))
    cut = {layer: one for layer, one in rows.items()}
    with pytest.raises(RuntimeError):
        shares.add(cut)  # an oracle of more blocks than there are
    code = indices_of(indexed())[0].rotated(rows[0].frequencies)
    torch.testing.assert_close(recalled(rows[0], code, 30).sum(-1), rows[0].mass.sum(-1))


def test_distillation_finds_more_on_prompts_that_were_not_trained_on() -> None:
    model, seen = indexed(features=16), list[tuple[int, int]]()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = distil(model, prompts(12), prompts(3, seed=50), steps=100, rows=60, counts=(3,), learning_rate=1e-2,
                   on_step=lambda layer, step, loss: seen.append((layer, step)))  # fmt: skip
    first, last = found["before"]["all"]["index"]["3"], found["after"]["all"]["index"]["3"]
    assert last > first + 0.05 and last > found["after"]["all"]["chance"]["3"] + 0.05
    assert seen == [(layer, step) for layer in (0, 1) for step in range(100)]
    assert found["after"]["all"]["summary"] == found["before"]["all"]["summary"]
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {f"model.layers.{n}.self_attn.mka.index.{w}" for n in (0, 1) for w in ("up", "down", "query")}
    assert model.model.layers[0].self_attn.mka.index.up.requires_grad


def test_prompts_that_do_not_fit_into_memory_are_read_later() -> None:
    sizes = list[int]()

    def progress_of(what: str, total: int) -> Any:
        from longreach.evals.progress import unseen

        if what == "training the index":
            sizes.append(total)
        return unseen(what, total)

    distil(indexed(share=(0,)), prompts(4), prompts(1, seed=9), steps=8, rows=6, counts=(3,), held_bytes=1,
           progress=progress_of)  # fmt: skip
    assert sizes == [2, 2, 2, 2]  # of the one layer that recalls


@pytest.mark.parametrize("features", [16, 32])
def test_the_linear_start_is_the_mean_keys_logit(features: int) -> None:
    """With at least as many features as channels, its score is the mean key's before rotation, up to a constant."""
    model = indexed(features=features)
    examples = [Example.of(rows_of(model, prompt)[0]) for prompt in prompts(3)]
    made = linear_start(indices_of(model)[0].float(), examples, 0.25)
    for one in examples:
        blocks = made.of_keys(one.k).unflatten(1, (-1, 4)).mean(2)
        assert blocks.shape[-1] == features  # those past the channels are 0
        score = torch.einsum("rgf,gnf->rgn", made.of_queries(one.q, 2), blocks)
        mean = one.k.unflatten(1, (-1, 4)).mean(2)
        plain = 0.25 * torch.einsum("rghd,gnd->rgn", one.q.unflatten(1, (2, -1)), mean)
        torch.testing.assert_close(score, plain, rtol=1e-3, atol=1e-3)


def test_the_loss_is_least_at_the_target_and_weighs_far_mass() -> None:
    one = Example.of(rows_of(indexed(), prompts(1)[0])[0])
    index = indices_of(indexed())[0].requires_grad_(False)
    loss = index_loss(index, one)
    entropy = -torch.where(one.target > 0, one.target * one.target.log(), 0.0).sum(-1)
    assert float(loss) > float((entropy * one.far).sum() / one.far.sum())
    without = one._replace(far=one.far.clone())
    without.far[0] = 0.0
    assert not torch.isclose(index_loss(index, without), loss)


def test_models_without_an_index_are_refused() -> None:
    def refused(model: Any, words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            check_index(model)

    refused(tiny_model("llama"), "was not converted.*recall=index first")
    refused(indexed(recall="summary"), "no index to distil .recall=summary.")
    refused(convert(tiny_model("llama"), "fastmka"), "no index to distil .tiers .1, 2., without level 3")
    for some, others in (([], prompts(1)), (prompts(1), [])):
        with pytest.raises(InvalidInput, match="at least one to train on and one to measure on"):
            distil(indexed(), some, others)
    with pytest.raises(InvalidInput, match="at least one step and a learning rate above 0"):
        distil(indexed(), prompts(1), prompts(1), steps=0)
