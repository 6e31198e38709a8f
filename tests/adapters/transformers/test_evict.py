"""evict=: after a prompt is read keys go, in every layer and KV head others; positions go on from the prompt's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import CacheConfig, Documents, OracleTopK, Quest, StreamingLLM, attach, generate
from longreach.adapters.transformers.fusing import FusedPrompt, read
from longreach.adapters.transformers.loop.decoder import Decoder
from longreach.adapters.transformers.prompt_reader import Answer, Reader
from longreach.cache import KVCache
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.fusion import A3, PIE, A3Deep, CacheBlend, Dependence, FullReuse, LegoLink
from longreach.methods.loki import Loki
from longreach.methods.mac import MAC
from longreach.methods.magicpig import MagicPIG
from longreach.methods.oracle_sampling import OracleSampling
from longreach.methods.slots import Eviction, Fusion, PromptEnd
from longreach.methods.snapkv import SnapKV
from longreach.testing.tiny import random_tokens, tiny_tokenizer
from tests.adapters.transformers.fusing.test_read import SYSTEM, prompt_of
from tests.adapters.transformers.reference import model_of
from tests.tiers import swept

NEW = 12
RING = MAC(window=8, band=4, min_context=0)
PIG = MagicPIG(bits=4, tables=9)
CACHES = [CacheConfig(), CacheConfig("paged", page=5)]
caches = pytest.mark.parametrize("config", CACHES, ids=["contiguous", "paged"])


@dataclass(frozen=True)
class All(Eviction):
    """Keeps everything, by the way that evicts."""

    name = "all"

    def keep(self, call: LayerCall, prompts: Sequence[PromptEnd]) -> Sequence[Tensor]:
        return [torch.arange(p.length).expand(call.kv.heads, -1).contiguous() for p in prompts]


@dataclass(frozen=True)
class First(Eviction):
    """Keeps the first and last tokens of each head, of head 1 some more in between."""

    name = "first"

    def keep(self, call: LayerCall, prompts: Sequence[PromptEnd]) -> Sequence[Tensor]:
        heads = range(call.kv.heads)
        return [torch.tensor([[*range(4 + g), *range(p.length - 12 + g, p.length)] for g in heads]) for p in prompts]


@pytest.mark.covering
@caches
@pytest.mark.parametrize("decode", [Dense(), Quest(k=0.5, page=4), StreamingLLM(sinks=2, window=20)], ids=repr)
def test_keeping_all_changes_nothing(config: CacheConfig, decode: AttentionMethod) -> None:
    model, tokens = model_of("llama"), random_tokens(2, 60, seed=3)
    mask = torch.ones_like(tokens)
    mask[1, :17] = 0
    with attach(model, decode=decode, cache=config) as session:
        want = generate(session, tokens, mask, max_new_tokens=NEW).tokens
    with attach(model, decode=decode, cache=config, evict=All()) as session:
        for chunk in (None, 16):
            assert torch.equal(
                generate(session, tokens, mask, max_new_tokens=NEW, prefill_chunk_size=chunk).tokens, want
            )
        assert torch.equal(
            model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, 60:], want
        )


@caches
def test_decoding_attends_to_what_was_kept_at_positions_after_the_prompt(config: CacheConfig) -> None:
    """Step by step against attention with a mask over transformers' own cache."""
    model, tokens = model_of("llama"), random_tokens(1, 50, seed=4)
    with attach(model, evict=First(), cache=config) as session:
        made = generate(session, tokens, max_new_tokens=NEW)
        cache = session.static_caches[1]
        assert cache.kv.slots_in_use(0) == [16 + NEW - 1] and cache.columns == 50 + NEW - 1
    assert made.tokens[0].tolist() == by_mask(model, tokens, NEW)


@pytest.mark.parametrize("capacity", [None, 80], ids=["growing", "fixed"])
@pytest.mark.parametrize("page", [None, 5], ids=["contiguous", "paged"])
def test_memory_after_eviction_is_that_of_kept_keys_and_the_answer(page: int | None, capacity: int | None) -> None:
    model, tokens, slots = model_of("llama"), random_tokens(2, 60, seed=4), 16 + NEW - 1
    config = CacheConfig(capacity=capacity) if page is None else CacheConfig("paged", page=page, capacity=capacity)
    held = slots if page is None else -(-slots // page) * page
    with attach(model, evict=First(), cache=config) as session:
        generate(session, tokens, max_new_tokens=NEW)
        cache = session.static_caches[2]
        assert [layout.pages.size * layout.pages.total for layout in cache.kv.layouts.groups()] == [2 * held]
        mine = session.new_cache(2)
        model.generate(tokens, past_key_values=mine, max_new_tokens=NEW, do_sample=False)
        assert [layout.pages.size * layout.pages.total for layout in mine.kv.layouts.groups()] == [2 * held]


@torch.no_grad()
def by_mask(model: Any, tokens: Tensor, new: int) -> list[int]:
    """Greedy tokens of llama, written out, where KV head g forgets the prompt as `First` says."""
    core, length = model.model, tokens.shape[1]
    ids, found = tokens[0].tolist(), list[int]()
    for _ in range(new):
        x, n = core.embed_tokens(torch.tensor([ids])), len(ids)
        cos, sin = core.rotary_emb(x, torch.arange(n)[None])
        for block in core.layers:
            y, heads = block.input_layernorm(x), block.self_attn
            q, k, v = (p(y).unflatten(-1, (-1, heads.head_dim))[0] for p in (heads.q_proj, heads.k_proj, heads.v_proj))
            half = q.shape[-1] // 2
            q, k = (
                z * cos[0][:, None] + torch.cat([-z[..., half:], z[..., :half]], -1) * sin[0][:, None] for z in (q, k)
            )
            group = q.shape[1] // k.shape[1]
            mask = torch.ones(k.shape[1], n, n).tril().bool()
            for g in range(k.shape[1]):  # rows of the answer
                gone = torch.ones(n, dtype=torch.bool)
                gone[[*range(4 + g), *range(length - 12 + g, n)]] = False
                mask[g, length:, :] &= ~gone
            logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * heads.scaling
            weights = logits.masked_fill(~mask.repeat_interleave(group, 0), -torch.inf).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1)[None]
            x = x + heads.o_proj(out)
            x = x + block.mlp(block.post_attention_layernorm(x))
        found.append(int(model.lm_head(core.norm(x))[0, -1].argmax()))
        ids.append(found[-1])
    return found


@caches
@pytest.mark.parametrize("fusion", [PIE(), A3(ratio=0.3)], ids=repr)
def test_after_fusion_the_system_prompt_and_the_question_stay(config: CacheConfig, fusion: Fusion) -> None:
    model = model_of("llama")
    prompt = prompt_of(model).fused
    capacity = SYSTEM + 9 + 14
    with attach(model, fuse=fusion, evict=SnapKV(capacity=capacity), cache=config) as session:
        reader = Reader(session)
        logits, _ = read(session, reader.cache, prompt, then=NEW)
        whole = [reader.cache.kv.view_of_all(layer) for layer in range(2)]
        keys = [keys_of(kv, len(prompt.ids)) for kv in whole]
        before = reader.cache.kv.nbytes
        assert len(list(reader.decode(logits, NEW, Answer()))) == NEW
        assert reader.cache.kv.nbytes < before
        for layer in range(2):
            assert reader.cache.kv.slots_in_use(layer) == [capacity + NEW - 1]
            kept = keys_of(reader.cache.kv.view_of_all(layer), capacity)
            for g in range(2):
                assert torch.equal(kept[:SYSTEM, g], keys[layer][:SYSTEM, g])
                assert torch.equal(kept[-9:, g], keys[layer][-9:, g])


def keys_of(kv: Any, count: int) -> Tensor:
    slots = torch.arange(count)
    page, offset = kv.locate(torch.zeros_like(slots), slots)
    return kv.k[page, :, offset].clone()  # type: ignore[no-any-return]


def test_nothing_of_a_prompt_stays_behind() -> None:
    """Queries of the question are dropped with each eviction, whatever the questions' lengths."""
    model = model_of("llama")
    prompt = prompt_of(model)
    with attach(model, fuse=PIE(), evict=SnapKV(capacity=60)) as session:
        reader = Reader(session)
        for length in (3, 9, 5):
            reader.cache.empty()
            logits, _ = read(session, reader.cache, FusedPrompt.of([prompt.system, *prompt.chunks, [7] * length]))
            assert len(reader.cache.states.states()) == 2
            list(reader.decode(logits, 3, Answer()))
            assert reader.cache.states.states() == []
        reader.cache.empty()
        reader.read(list(range(3, 80)))
        assert reader.cache.eviction == session.evict, "a plain prompt is evicted from by the session's own window"


@pytest.mark.parametrize("pages", swept([200, None], 1))
def test_an_answer_that_goes_on_and_on(pages: int | None) -> None:
    """The decode step's buffers are reused until their block table is full, not longer."""
    model, tokens, made = model_of("llama"), random_tokens(1, 50, seed=1)[0].tolist(), []
    for config in (CacheConfig(), CacheConfig("paged", page=5, pages=pages)):
        with attach(model, evict=SnapKV(capacity=16, window=8), cache=config) as session:
            reader = Reader(session)
            found = list(reader.decode(reader.read(tokens), 10, Answer()))
            for new in (20, 33):
                with torch.no_grad():
                    out = model(torch.tensor([[found[-1]]]), past_key_values=reader.cache)
                found += list(reader.decode(out.logits[0, -1].float(), new, Answer()))
            made.append((found, reader.cache.kv.slots_in_use(0)))
    assert made[0] == made[1]


def test_a_second_turn_is_evicted_from_too() -> None:
    model = model_of("llama")
    with attach(model, evict=SnapKV(capacity=40, window=8)) as session:
        cache = session.new_cache(1)
        first = model.generate(random_tokens(1, 60, seed=4), past_key_values=cache, max_new_tokens=6, do_sample=False)
        assert cache.kv.slots_in_use(0) == [40 + 5]
        more = torch.cat([first, random_tokens(1, 20, seed=5)], 1)
        second = model.generate(more, past_key_values=cache, max_new_tokens=6, do_sample=False)
        assert second.shape[1] == 60 + 6 + 20 + 6 and cache.kv.slots_in_use(0) == [40 + 5]


# the order of events


class Events:
    """A streamer. events: what happened, in order, with evictions of keys and decode steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None):
        self.events, self.fails_at = list[str](), fails_at
        for owner, name in ((KVCache, "keep"), (Decoder, "step")):
            monkeypatch.setattr(owner, name, self.noting(name, getattr(owner, name)))

    def noting(self, name: str, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.events.append(name)
            return call(*args, **kwargs)

        return noted

    def put(self, tokens: Tensor) -> None:
        self.events.append("prompt" if tokens.shape[-1] > 2 else "token")
        if self.events.count("token") == self.fails_at:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize("sampled", [False, True])
def test_the_first_token_comes_before_eviction(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of("llama"), random_tokens(2, 60, seed=4)
    with attach(model, evict=SnapKV(capacity=40, window=8)) as session:
        events = Events(monkeypatch)
        torch.manual_seed(0)
        made = generate(session, tokens, max_new_tokens=4, do_sample=sampled, eos_token_id=(), streamer=events)
        assert events.events == ["prompt", "token", "keep", "keep", *("step", "token") * 3, "end"]
        assert made.steps == 2 and made.setup_seconds > 0 and made.evict_seconds > 0 and made.decode_seconds > 0
        torch.manual_seed(0)
        mask = torch.ones_like(tokens)
        want = model.generate(
            tokens, attention_mask=mask, max_new_tokens=4, do_sample=sampled, eos_token_id=None, pad_token_id=0
        )
        assert torch.equal(made.sequences, want)


def test_documents_yield_the_first_token_before_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(model_of("llama"), fuse=PIE(), evict=SnapKV(capacity=60)) as session:
        documents = Documents(session, tiny_tokenizer(), chunk_tokens=16)
        documents.read(["The castle of Aldmere stands by the river. " * 3])
        events = Events(monkeypatch)
        # else half a character is held back until the next token
        monkeypatch.setattr("longreach.adapters.transformers.documents.pieces", lambda tokens, *_: map(str, tokens))
        answer = documents.ask("Where?", 6)
        first = next(answer)
        assert first and events.events == []
        answer.close()
        whole = "".join(documents.ask("Where?", 6))
        assert whole.startswith(first) and events.events[:3] == ["keep", "keep", "step"]


def test_an_answer_of_one_token_evicts_nothing_and_the_next_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer of 8 tokens, and one of 1 token that goes on, once the first was interrupted: the same tokens."""
    model, tokens = model_of("llama"), random_tokens(1, 60, seed=4)
    with attach(model, evict=SnapKV(capacity=40, window=8)) as session:
        want = generate(session, tokens, max_new_tokens=8, eos_token_id=()).sequences
        reader = Reader(session)
        logits = reader.read(tokens[0].tolist())
        events = Events(monkeypatch)
        assert list(reader.decode(logits, 1, Answer())) == [int(want[0, 60])]
        closed = reader.decode(logits, 8, Answer())
        assert next(closed) == int(want[0, 60])
        closed.close()
        assert events.events == [] and reader.cache.kv.lengths == [60] and reader.cache.eviction_due
        assert list(reader.decode(logits, 8, Answer())) == want[0, 60:].tolist()
        assert reader.cache.kv.slots_in_use(0) == [40 + 7] and not reader.cache.eviction_due


@pytest.mark.parametrize("fails_at", [1, 2])
def test_ctrl_c_leaves_the_cache_as_it_was(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second turn, after its first token: the rows of the first turn, not yet evicted from, vote again."""
    model, tokens = model_of("llama"), random_tokens(1, 80, seed=4)
    with attach(model, evict=SnapKV(capacity=40, window=8)) as session:
        caches = [session.new_cache(1), session.new_cache(1)]
        for cache in caches:
            generate(session, tokens[:, :60], max_new_tokens=1, past_key_values=cache)
        with pytest.raises(KeyboardInterrupt):
            generate(
                session, tokens, max_new_tokens=4, eos_token_id=(), past_key_values=caches[0],
                streamer=Events(monkeypatch, fails_at),
            )  # fmt: skip
        if fails_at == 2:  # heads hold different keys of the second turn by then
            assert caches[0].invalid
            return
        assert caches[0].columns == 60 and caches[0].invalid is None
        after = []
        with torch.no_grad():
            for cache in caches:
                after.append(model(tokens[:, 60:61], past_key_values=cache).logits)
                assert cache.kv.slots_in_use(0) == [41]
        assert torch.equal(*after)


@caches
def test_all_sequences_of_a_layer_are_evicted_from_together(
    config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ragged batch: one call of each op a layer, and the tokens of each prompt alone."""
    model, tokens, called = model_of("llama"), random_tokens(3, 60, seed=6), list[str]()
    mask = torch.ones_like(tokens)
    mask[1, :9] = mask[2, :40] = 0
    op = LayerCall.op
    with attach(model, evict=SnapKV(capacity=30, window=8), cache=config) as session:
        alone = [
            generate(session, tokens[b : b + 1, n:], max_new_tokens=NEW, eos_token_id=()).tokens[0]
            for b, n in enumerate((0, 9, 40))
        ]
        monkeypatch.setattr(
            LayerCall, "op", lambda self, name, *a, **k: (called.append(name), op(self, name, *a, **k))[1]
        )
        made = generate(session, tokens, mask, max_new_tokens=NEW, eos_token_id=())
        cache = session.static_caches[3]
        assert cache.kv.slots_in_use(1) == [30 + NEW - 1, 30 + NEW - 1, 20 + NEW - 1]
    assert called == ["score_keys", "pooled_scores", "top_k"] * 2
    assert torch.equal(made.tokens, torch.stack(alone))


def test_layers_with_a_window_keep_all() -> None:
    model, tokens = model_of("gemma2"), random_tokens(1, 60, seed=4)
    with attach(model, evict=SnapKV(capacity=40, window=8)) as session:
        generate(session, tokens, max_new_tokens=4)
        used = [session.static_caches[1].kv.slots_in_use(layer)[0] for layer in range(2)]
    windows = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert used == [63 if window else 43 for window in windows] and any(windows) and not all(windows)


def test_the_report_has_the_layers_that_evicted_and_a_model_without_any_is_refused() -> None:
    model = model_of("gemma2")
    with attach(model, evict=SnapKV(capacity=40, window=8)) as session:
        generate(session, random_tokens(1, 60, seed=4), max_new_tokens=4)
        methods = {row.layer: row.method for row in session.report().layers if row.phase == "prefill"}
    slides = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert methods == {layer: "dense" if slide else "dense+snapkv" for layer, slide in enumerate(slides)}
    impls = [row.impl.split(", ") for row in session.report().layers]
    assert all(impl and all(impl) for impl in impls), impls
    with pytest.raises(Unsupported, match="evict=snapkv: all layers of MistralForCausalLM have a sliding window"):
        attach(model_of("mistral"), evict=SnapKV(capacity=40))


def test_an_eviction_keeps_no_more_last_rows_than_a_prompt_has() -> None:
    asked = list[tuple[int, int, int]]()

    @dataclass(frozen=True)
    class Asked(All):
        def keep(self, call: LayerCall, prompts: Sequence[PromptEnd]) -> Sequence[Tensor]:
            asked.extend((p.length, p.first, p.last) for p in prompts)
            return super().keep(call, prompts)

    with attach(model_of("llama"), evict=Asked(window=32)) as session:
        generate(session, random_tokens(1, 20, seed=4), max_new_tokens=2)
    assert asked == [(20, 0, 20)] * 2


def test_a_cache_evicts_no_keys_of_layers_with_a_window() -> None:
    model, tokens = model_of("gemma2"), random_tokens(1, 60, seed=4)
    layer = model.config.layer_types.index("sliding_attention")
    with attach(model) as session:
        cache = session.new_cache()
        generate(session, tokens, max_new_tokens=4, past_key_values=cache)
        held = cache.kv.slots_in_use(layer)
        some = torch.arange(9).expand(model.config.num_key_value_heads, -1)
        with pytest.raises(Unsupported, match=rf"layer {layer} attends to a sliding window of \d+ tokens"):
            cache.kv.keep(layer, [0], [some])
        assert cache.kv.slots_in_use(layer) == held and not cache.kv.evicted(layer)
        generate(session, random_tokens(1, 64, seed=4), max_new_tokens=4, past_key_values=cache)


FUSED = (
    None, PIE(), A3(ratio=0.3), A3Deep(ratio=0.3), CacheBlend(ratio=0.3), Dependence(ratio=0.3), FullReuse(),
    LegoLink(first=3),
)  # fmt: skip
DECODES = (Dense(), StreamingLLM(), Quest(k=0.3, page=4), Loki(k=0.3), OracleTopK(k=0.3), OracleSampling(k=0.3))


@pytest.mark.covering
@pytest.mark.parametrize("fusion", FUSED, ids=repr)
@pytest.mark.parametrize("decode", DECODES, ids=repr)
def test_every_method_that_works_over_kept_slots_runs(
    fusion: Fusion | None, decode: AttentionMethod, plans_for_tiny: Any
) -> None:
    model = plans_for_tiny
    prompt = prompt_of(model)
    chunks = [replace(chunk, dependence=torch.rand(len(chunk.tokens)).double()) for chunk in prompt.chunks]
    prompt = replace(prompt, chunks=chunks).fused
    with attach(model, fuse=fusion, evict=SnapKV(capacity=40, window=8), decode=decode) as session:
        reader = Reader(session)
        logits = reader.read(prompt.ids) if fusion is None else read(session, reader.cache, prompt)[0]
        assert len(list(reader.decode(logits, NEW, Answer()))) == NEW


@pytest.mark.parametrize(
    "decode", ["kascade", "omnikv", "less_is_more", PIG, RING, OracleTopK(k=0.3, heads="all")], ids=repr
)
def test_other_methods_are_refused_by_name(decode: Any, plans_for_tiny: Any) -> None:
    name = decode if isinstance(decode, str) else decode.name
    with pytest.raises(Unsupported, match=f"evict=snapkv with decode={name}: "):
        attach(plans_for_tiny, evict=SnapKV(capacity=40, window=8), decode=decode)
    with attach(plans_for_tiny, evict=SnapKV(capacity=40, window=8)) as session:
        with pytest.raises(Unsupported, match=f"evict=snapkv with decode={name}: "):
            session.switch(decode)
        assert session.decode.name == "dense"


@pytest.fixture
def plans_for_tiny(tmp_path: Any) -> Any:
    from tests.methods.planned import planned, tiny, write_plans

    with planned(write_plans(tmp_path)):
        yield tiny()


# bad input


def test_a_capacity_that_the_parts_do_not_fit_into_is_refused_before_anything_goes() -> None:
    model = model_of("llama")
    prompt = prompt_of(model).fused
    with attach(model, fuse=PIE(), evict=SnapKV(capacity=10)) as session:
        cache = session.new_cache(1)
        with pytest.raises(
            InvalidInput, match="capacity 10 is less than the 16 tokens that stay, 7 at the prompt's beginning and 9"
        ):
            read(session, cache, prompt)
        assert cache.columns == 0


def test_a_document_that_was_evicted_from_cannot_be_asked_again() -> None:
    model = model_of("llama")
    with attach(model, evict=SnapKV(capacity=40)) as session:
        reader = Reader(session)
        reader.read(list(range(3, 70)))
        with pytest.raises(Unsupported, match="goes back to the document after each answer"):
            list(reader.ask([3, 4], 4, (), Answer()))


def test_what_is_no_eviction() -> None:
    model = model_of("llama")
    with pytest.raises(InvalidInput, match="capacity 8 is less than the 32 tokens that stay, 0 at"):
        attach(model, evict=SnapKV(capacity=8))
    with pytest.raises(InvalidInput, match="evict: expected a configured method of this slot or its name"):
        attach(model, evict=Dense())  # type: ignore[arg-type]
