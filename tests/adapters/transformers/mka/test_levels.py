"""MKA and Block-MKA in models of plain transformers: gate 0, decoding, padding, packing, folders, gradients."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from longreach import mka
from longreach.adapters.transformers.mka import convert, revert
from longreach.adapters.transformers.mka.dense import dense
from longreach.errors import InvalidInput, Unsupported
from longreach.testing.tiny import random_tokens, tiny_model
from tests.adapters.transformers.mka.models import (
    ALL,
    HASH,
    SMALL,
    THREE,
    close,
    converted,
    levels_of,
    opened,
    original,
)
from tests.tiers import swept

mka.register()
MKA: tuple[str, dict[str, Any]] = ("mka", {**SMALL, "recall": "summary"})
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mka": MKA,
    "gated": ("mka", {**SMALL, "mode": "gated", "recall": "bounds"}),
    "two levels": ("mka", {"tiers": (1, 2), "summary": "mean"}),
    "recall alone": ("mka", {**SMALL, "tiers": (1, 3), "recall": "index", "features": 8}),
    "block": ("block_mka", {**SMALL, "recall": "summary"}),
    "block, hash": ("block_mka", {**SMALL, "recall": "hash", "bits": 16}),
    "block, shared": ("block_mka", {**SMALL, "share": (0,)}),
    "block, local": ("block_mka", {"block": 4, "window": 8, "tiers": (1, 2)}),
}
each = pytest.mark.parametrize("name", VARIANTS)
families = pytest.mark.parametrize("family", swept(list(ALL), 8))


def made(name: str, family: str = "llama", **more: Any) -> Any:
    variant, options = VARIANTS[name]
    return converted(family, variant, **{**options, **more})


@families
def test_mka_at_gate_zero_gives_the_originals_logits(family: str) -> None:
    tokens, base = random_tokens(2, 30), original(family)
    model = converted(family, "mka", seed=None, **SMALL)
    for how in ("eager", "sdpa"):
        base.set_attn_implementation(how)
        model.set_attn_implementation(how)
        assert torch.equal(model(tokens).logits, base(tokens).logits)
    base.set_attn_implementation("eager")
    gated = converted(family, "mka", seed=None, mode="gated", **SMALL)
    close(gated(tokens).logits, base(tokens).logits)
    assert revert(model) is model and type(model) is type(base)
    model.set_attn_implementation("eager")
    assert torch.equal(model(tokens).logits, base(tokens).logits)


@families
def test_block_mka_at_gate_zero_is_dense_where_everything_is_recalled(family: str) -> None:
    tokens, base = random_tokens(2, 30), original(family)
    model = converted(family, "block_mka", seed=None, block=4, window=8, blocks=10)
    close(model(tokens).logits, base(tokens).logits)
    few = converted(family, "block_mka", seed=None, block=4, window=8, blocks=1)
    assert not torch.allclose(few(tokens).logits, base(tokens).logits, atol=0.1)


@each
@torch.no_grad()
@pytest.mark.parametrize("family", swept(["llama", "phi3", "glm4", "qwen3"], 2))
def test_decoding_equals_one_pass(name: str, family: str) -> None:
    model, tokens = made(name, family), random_tokens(2, 30)
    want = model(tokens, use_cache=False).logits
    assert not torch.allclose(want, original(family)(tokens).logits, atol=0.1)
    cache = DynamicCache(config=model.config)
    cuts = [0, 13, 14, 15, 22, *range(23, 31)]
    parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in pairwise(cuts)]
    close(torch.cat(parts, 1), want)
    heads = 4 if VARIANTS[name][0] == "mka" and 2 in levels_of(model)[0].config.tiers else 2
    assert cache.layers[0].keys.shape[1] == heads  # twice the KV where level 2 is cached


@each
@torch.no_grad()
def test_padding_and_packed_documents_change_nothing(name: str) -> None:
    model, lengths = made(name), (30, 17, 22)
    parts = [random_tokens(1, n, seed=n) for n in lengths]
    want = [model(part, use_cache=False).logits[0] for part in parts]
    ids = torch.full((3, 30), 256)
    mask = torch.stack([torch.arange(30) >= 30 - n for n in lengths])
    ids[mask] = torch.cat([part[0] for part in parts])
    for cached in (False, True):
        cache = DynamicCache(config=model.config) if cached else None
        cuts = [0, 15, 16, 30] if cached else [0, 30]
        found = [
            model(ids[:, a:b], attention_mask=mask[:, :b].long(), past_key_values=cache, use_cache=cached).logits
            for a, b in pairwise(cuts)
        ]
        for got, kept, alone in zip(torch.cat(found, 1), mask, want, strict=True):
            close(got[kept], alone)
    model.set_attn_implementation("sdpa")  # whose masks keep packed documents apart
    starts = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(torch.cat(parts, 1), position_ids=starts, use_cache=False).logits[0]
    close(packed, torch.cat(want))


@pytest.mark.parametrize("name", [*VARIANTS, "fastmka", "fastmka, hash"])
@torch.no_grad()
def test_positions_that_begin_elsewhere(name: str) -> None:
    """A padded row with the positions of its columns, in one pass and over a cache, with positions and without."""
    model, tokens = offset_model(name), random_tokens(2, 33)
    padded, mask = torch.cat([tokens[:, :5], tokens], 1), (torch.arange(38) >= 5).long().repeat(2, 1)
    positions = torch.arange(38)[None]
    want = model(tokens, use_cache=False).logits
    got = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    if levels_of(model)[0].config.recall == "bounds":  # which compares channels of rotated keys
        want = got[:, 5:]
    close(got[:, 5:], want)
    for given in (True, False):
        cache, parts = DynamicCache(config=model.config), []
        for a, b in pairwise([0, 17, 18, 30, *range(31, 39)]):
            more = {"position_ids": positions[:, a:b]} if given or not a else {}
            parts.append(model(padded[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, **more).logits)
        close(torch.cat(parts, 1)[:, 5:], want)
    cache = DynamicCache(config=model.config)
    model(tokens[:, :20], position_ids=positions[:, 3:23], past_key_values=cache)
    got = model(tokens[:, 20:], past_key_values=cache).logits  # no mask and no positions
    close(got, model(tokens, position_ids=positions[:, 3:36], use_cache=False).logits[:, 20:])
    with pytest.raises(InvalidInput, match="position_ids: expected to ascend by 1 within a row, from its cached"):
        model(tokens[:, :2], position_ids=positions[:, 33:35], past_key_values=cache)


def offset_model(name: str) -> Any:
    if name in VARIANTS:
        return made(name)
    return converted(**(HASH if name.endswith("hash") else THREE))


@each
@torch.no_grad()
def test_crop(name: str) -> None:
    """A cache without running means can be cut anywhere, also within padding; with them, to nothing."""
    model, tokens = made(name), random_tokens(3, 33)
    mask = (torch.arange(33) >= torch.tensor([[0], [9], [25]])).long()
    want = model(tokens, attention_mask=mask, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model(tokens[:, :14], attention_mask=mask[:, :14], past_key_values=cache)
    model(tokens[:, 14:], attention_mask=mask, past_key_values=cache)
    if levels_of(model)[0].config.keeps_means:
        with pytest.raises(Unsupported, match="crop: the memory that mka keeps of 33 columns cannot be cut to 20"):
            cache.crop(-13)
        cache.crop(-33)
        close(model(tokens, attention_mask=mask, past_key_values=cache).logits[mask.bool()], want[mask.bool()])
        return
    for kept in (28, 20, 5):
        cache.crop(kept - cache.get_seq_length())
        other = copy.deepcopy(cache)
        other.reorder_cache(torch.tensor([1, 2, 0]))
        for one, order in ((cache, [0, 1, 2]), (other, [1, 2, 0])):
            got = model(tokens[order, kept:], attention_mask=mask[order], past_key_values=one).logits
            real = mask[order, kept:].bool()
            close(got[real], want[order, kept:][real])
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache)
    cache.crop(-13)
    close(model(tokens[:, 20:], past_key_values=cache).logits, model(tokens, use_cache=False).logits[:, 20:])


@each
@torch.no_grad()
def test_assisted_generation(name: str) -> None:
    """Guessed tokens are removed from the cache again."""
    model, tokens = made(name), random_tokens(1, 25)
    given = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    want = model.generate(tokens, **given)
    if levels_of(model)[0].config.keeps_means:
        with pytest.raises(Unsupported, match="crop"):
            model.generate(tokens, assistant_model=original("llama"), **given)
    else:
        assert torch.equal(model.generate(tokens, assistant_model=original("llama"), **given), want)


@each
@torch.no_grad()
def test_generate_and_round_trip(name: str, tmp_path: Path) -> None:
    model, tokens = made(name), random_tokens(2, 21)
    out = model.generate(tokens, max_new_tokens=6, do_sample=False)
    read = tokens
    for _ in range(6):
        read = torch.cat([read, model(read, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(out, read)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert torch.equal(copy.deepcopy(model)(tokens).logits, model(tokens).logits)


@each
def test_checkpointing_gives_the_same_gradients(name: str) -> None:
    model, tokens = made(name).train(), random_tokens(2, 30)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        with torch.no_grad():
            model(tokens[:, :9], use_cache=False)  # another pass before layers are repeated
        loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if "index" not in n})
    assert all(grad is not None for grad in found[0].values())
    for parameter, grad in found[0].items():
        torch.testing.assert_close(found[1][parameter], grad, rtol=1e-4, atol=1e-6, msg=parameter)


@torch.no_grad()
def test_layers_that_are_not_converted_stay() -> None:
    tokens = random_tokens(1, 30)
    model = convert(copy.deepcopy(original("llama")), "block_mka", layers=[1], **SMALL)
    assert list(levels_of(model)) == [1]
    hidden = [m(tokens, output_hidden_states=True).hidden_states for m in (model, original("llama"))]
    assert torch.equal(hidden[0][1], hidden[1][1]) and not torch.equal(hidden[0][2], hidden[1][2])
    with dense(opened(model)):
        assert torch.equal(model(tokens).logits, original("llama")(tokens).logits)
    assert not torch.equal(model(tokens).logits, original("llama")(tokens).logits)


@torch.no_grad()
def test_contexts_shorter_than_a_block() -> None:
    for name in VARIANTS:
        model = made(name)
        cache, tokens = DynamicCache(config=model.config), random_tokens(2, 3)
        want = model(tokens, use_cache=False).logits
        close(torch.cat([model(tokens[:, n : n + 1], past_key_values=cache).logits for n in range(3)], 1), want)


@torch.no_grad()
def test_nan_of_one_sequence_stays_there() -> None:
    for name in VARIANTS:
        model = made(name)
        x = model.get_input_embeddings()(random_tokens(2, 30))
        want = model(inputs_embeds=x, use_cache=False).logits
        x[1, 4] = torch.nan
        got = model(inputs_embeds=x, use_cache=False).logits
        close(got[0], want[0])
        assert bool(got[1, 4:].isnan().any())


def test_rotations_that_depend_on_the_length_are_refused() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", rope_parameters=parameters)
    for variant in ("mka", "block_mka"):
        with pytest.raises(Unsupported, match="'dynamic'"):
            convert(model, variant, **SMALL)
    convert(model, "mka", tiers=(1, 2))  # needs no blocks


def test_a_cache_of_another_model_is_refused() -> None:
    for name in ("mka", "block"):
        model, tokens = made(name), random_tokens(1, 12)
        cache = DynamicCache(config=model.config)
        original("llama")(tokens, past_key_values=cache)
        with pytest.raises(InvalidInput, match="of another model"):
            model(tokens[:, :1], past_key_values=cache)
