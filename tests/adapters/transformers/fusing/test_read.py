"""The fused pass: at ratio 1.0 a plain prefill, at 0 what is stored; in between, rows where they belong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import BlockMKA, CacheConfig, Quest, attach
from longreach.adapters.transformers.fusing import FusedPrompt, FusionReport, read
from longreach.adapters.transformers.precompute import Precompute
from longreach.adapters.transformers.prompt_reader import Answer, Reader
from longreach.cache import KVCache
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.fusion import A3, PIE, A3Deep, CacheBlend, FullReuse, LegoLink
from longreach.methods.kascade import Kascade
from longreach.methods.loki import Loki
from longreach.methods.registry import choose, names
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.store import Chunk
from longreach.testing.tiny import random_tokens, tiny_model
from tests.adapters.transformers.reference import model_of
from tests.methods.planned import planned, tiny, write_plans
from tests.tiers import families, swept

SYSTEM, LENGTHS, QUESTION = 7, (21, 33, 18), 9  # the window of sliding layers is 16
EVERYTHING = (A3(ratio=1.0), A3(ratio=1.0, heads="joint"), CacheBlend(ratio=1.0), LegoLink(first=99, last=0),
              A3Deep(ratio=1.0), A3Deep(ratio=1.0, layer=0, rounds=3))  # fmt: skip


def tokens(length: int, seed: int) -> list[int]:
    return [int(t) for t in random_tokens(1, length, seed=seed)[0]]


@dataclass(frozen=True)
class Prompt:
    """A system prompt, chunks behind `prefix`, and a question."""

    system: list[int]
    chunks: list[Chunk]
    question: list[int]

    @property
    def fused(self) -> FusedPrompt:
        return FusedPrompt.of([self.system, *self.chunks, self.question])

    @property
    def ids(self) -> list[int]:
        return list(self.fused.ids)


def prompt_of(model: Any, *, behind_system: bool = True) -> Prompt:
    system = tokens(SYSTEM, 1)
    with attach(model) as session:
        work = Precompute(session, system if behind_system else ())
        chunks = [work.compute(tokens(n, seed)) for seed, n in enumerate(LENGTHS, 10)]
    return Prompt(system, chunks, tokens(QUESTION, 3))


def fused(
    model: Any, prompt: FusedPrompt, fusion: Fusion, *, decode: AttentionMethod | None = None, new: int = 6,
    config: CacheConfig | None = None,
) -> tuple[Tensor, FusionReport, list[tuple[Tensor, Tensor]], list[int]]:  # fmt: skip
    """(logits, report, keys and values of each layer, greedy tokens)."""
    with attach(model, fuse=fusion, decode=decode, cache=config) as session:
        reader = Reader(session)
        logits, report = read(session, reader.cache, prompt, then=new)
        kept = held(reader, len(prompt.ids))
        answer: Any = type("Answer", (), {})()
        return logits, report, kept, list(reader.decode(logits, new, answer))


def plain(
    model: Any, ids: list[int], *, decode: AttentionMethod | None = None, new: int = 6
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[int]]:
    with attach(model, decode=decode) as session:
        reader = Reader(session)
        logits = reader.read(ids, then=new)
        answer: Any = type("Answer", (), {})()
        return logits, held(reader, len(ids)), list(reader.decode(logits, new, answer))


def held(reader: Reader, count: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [N, G, D] of every layer."""
    return held_of(reader.cache.kv, 0, count)


def held_of(kv: KVCache, sequence: int, count: int) -> list[tuple[Tensor, Tensor]]:
    slots, found = torch.arange(count), []
    for layer in range(len(kv.memory)):
        view = kv.view_of_all(layer)
        page, offset = view.locate(torch.full_like(slots, sequence), slots)
        found.append((view.k[page, :, offset].clone(), view.v[page, :, offset].clone()))
    return found


@pytest.mark.covering("name", fusion=type)
@pytest.mark.parametrize("fusion", EVERYTHING, ids=repr)
@pytest.mark.parametrize("name", families(4))
def test_ratio_1_is_a_plain_prefill(name: str, fusion: Fusion) -> None:
    model = model_of(name)
    prompt = prompt_of(model)
    logits, report, kept, answer = fused(model, prompt.fused, fusion)
    want, memory, tokens_wanted = plain(model, prompt.ids)
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(kept, memory, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert answer == tokens_wanted
    first, *others = LENGTHS  # the first chunk stands behind what it was computed behind
    assert (report.exact, report.recomputed, report.reused) == (first, sum(others), 0)
    assert report.computed == SYSTEM + QUESTION and report.tokens == len(prompt.ids)


@pytest.mark.parametrize("name", families(2))
def test_one_chunk_behind_its_prefix_is_exact_with_nothing_recomputed(name: str) -> None:
    model = model_of(name)
    prompt = prompt_of(model)
    prompt = replace(prompt, chunks=prompt.chunks[:1])
    want, memory, _ = plain(model, prompt.ids)
    for fusion in (PIE(), FullReuse(), A3(ratio=0.5)):
        logits, report, kept, _ = fused(model, prompt.fused, fusion)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(kept, memory, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert (report.exact, report.recomputed, report.reused) == (LENGTHS[0], 0, 0)


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=5)], ids=["contiguous", "paged"])
def test_what_is_reused_is_the_stored_keys_at_their_positions(config: CacheConfig) -> None:
    """PIE's memory holds the stored keys, turned by the model's own rotation to where they stand; FullReuse's, behind
    their own prefix."""
    model = model_of("llama")
    prompt = prompt_of(model)
    fresh = prompt.fused
    for fusion, local in ((PIE(), False), (FullReuse(), True)):
        _, report, kept, _ = fused(model, fresh, fusion, config=config)
        assert report.reused == sum(LENGTHS[1:]) and report.recomputed == 0
        for start, chunk in fresh.chunks:
            first = len(chunk.prefix) if local else start
            pos = torch.arange(first, first + len(chunk.tokens))
            cos, sin = (x[0] for x in model.model.rotary_emb(torch.zeros(1, dtype=model.dtype), pos[None]))
            for layer, (k, v) in enumerate(kept):
                here = slice(start, start + len(chunk.tokens))
                x, half = chunk.keys[layer].transpose(0, 1), chunk.keys[layer].shape[2] // 2
                other = torch.cat([-x[..., half:], x[..., :half]], -1)
                torch.testing.assert_close(k[here], x * cos[:, None] + other * sin[:, None], rtol=1e-5, atol=1e-5)
                assert torch.equal(v[here], chunk.values[layer].transpose(0, 1))


def test_without_chunks_it_is_a_prefill() -> None:
    model, ids = model_of("llama"), tokens(40, 5)
    for fusion in (PIE(), A3(), CacheBlend(ratio=0), A3Deep()):
        logits, report, _, _ = fused(model, FusedPrompt(tuple(ids)), fusion)
        torch.testing.assert_close(logits, plain(model, ids)[0], rtol=1e-4, atol=1e-4)
        assert report.computed == 40 and report.key_error == (None,) * 2


@dataclass(frozen=True)
class Given(Fusion):
    """Recomputes the tokens that it is told."""

    tokens: tuple[int, ...] = ()
    name = "given"

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        return torch.tensor(self.tokens, device=prompt.device)


def test_recomputed_tokens_see_what_stands_before_them_and_nothing_after() -> None:
    """By the definition: layer by layer, all rows attend, but reused ones have their stored keys and values."""
    model = model_of("llama")
    prompt = prompt_of(model)
    whole = prompt.fused
    stored = whole.parts(torch.device("cpu"))
    chosen = tuple(int(i) for i in stored.candidates.nonzero()[::3, 0])
    logits, report, kept, _ = fused(model, whole, Given(chosen))
    reused = stored.stored.clone()
    reused[list(chosen)] = False
    _, _, as_pie, _ = fused(model, whole, PIE())
    want, memory = by_definition(model, prompt.ids, reused, as_pie)
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(kept, memory, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert report.recomputed == len(chosen)
    for layer, (key, value) in enumerate(zip(report.key_error, report.value_error, strict=True)):
        for got, n in ((key, 0), (value, 1)):
            mine, before = kept[layer][n][list(chosen)], as_pie[layer][n][list(chosen)]
            assert got == pytest.approx(float((mine - before).norm() / mine.norm()), rel=1e-3, abs=1e-6)


@torch.no_grad()
def by_definition(
    model: Any, ids: list[int], reused: Tensor, stored: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Llama, written out, with a dense mask: every row runs; the keys and values of reused rows are replaced."""
    core, made = model.model, []
    x = core.embed_tokens(torch.tensor([ids]))
    cos, sin = core.rotary_emb(x, torch.arange(len(ids))[None])
    mask = torch.ones(len(ids), len(ids)).tril().bool()
    for layer, block in enumerate(core.layers):
        y, heads = block.input_layernorm(x), block.self_attn
        q, k, v = (p(y).unflatten(-1, (-1, heads.head_dim))[0] for p in (heads.q_proj, heads.k_proj, heads.v_proj))

        def turn(z: Tensor) -> Tensor:
            half = z.shape[-1] // 2
            return z * cos[0][:, None] + torch.cat([-z[..., half:], z[..., :half]], -1) * sin[0][:, None]

        q, k = turn(q), turn(k)
        k, v = (torch.where(reused[:, None, None], s, z) for s, z in zip(stored[layer], (k, v), strict=True))
        made.append((k, v))
        group = q.shape[1] // k.shape[1]
        logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * heads.scaling
        weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1)[None]
        x = x + heads.o_proj(out)
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.lm_head(core.norm(x))[0, -1].float(), made


@pytest.fixture(scope="module")
def plans_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plans(tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize(
    "method",
    swept([Kascade(k=0.4, min_keys=4, scoring="int8"), Quest(k=0.4, page=4),
           BlockMKA(block=4, window=8, blocks=3, recall="hash"), Loki(k=0.4)], 3),
    ids=repr,
)  # fmt: skip
def test_methods_whose_state_is_made_of_keys_know_all_of_them(method: AttentionMethod, plans_of_tests: Path) -> None:
    """At ratio 1.0 they decode as after a plain prefill."""
    with planned(plans_of_tests):
        model = tiny()
        prompt = prompt_of(model)
        for fusion in (A3(ratio=1.0), LegoLink(first=99)):
            _, _, _, answer = fused(model, prompt.fused, fusion, decode=method, new=10)
            assert answer == plain(model, prompt.ids, decode=method, new=10)[2]


def longrope(layers: int = 2) -> Any:
    """A model that rotates prompts of more than 64 tokens by other frequencies."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 8.0,
        "short_factor": [1.0] * 8, "long_factor": [2.0 + n for n in range(8)],
    }  # fmt: skip
    return tiny_model(
        "phi3", rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=512,
        num_hidden_layers=layers,
    )  # fmt: skip


@pytest.mark.parametrize("fusion", EVERYTHING, ids=repr)
def test_no_chunk_is_exact_where_the_prompt_is_rotated_by_other_frequencies(fusion: Fusion) -> None:
    model = longrope(layers=4)
    prompt = prompt_of(model)
    logits, report, _, answer = fused(model, prompt.fused, fusion)
    assert (report.exact, report.recomputed) == (0, sum(LENGTHS)) and report.tokens > 64
    with attach(model) as session:
        reader = Reader(session, chunk=1000)
        want = reader.read(prompt.ids)
        tokens_wanted = list(reader.decode(want, 6, Answer()))
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    assert answer == tokens_wanted


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_chunks_are_exact_where_frequencies_are_those_they_were_computed_with(rope: str) -> None:
    if rope == "longrope":
        model, count = longrope(), 2
    else:
        fields = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        model, count = tiny_model("llama", rope_parameters=fields, max_position_embeddings=128), 3
    prompt = prompt_of(model)
    prompt = replace(prompt, chunks=prompt.chunks[: count - 1], question=prompt.question[:2])
    logits, report, _, _ = fused(model, prompt.fused, LegoLink(first=99))
    assert report.exact == LENGTHS[0] and len(prompt.ids) <= (64 if rope == "longrope" else 128)
    torch.testing.assert_close(logits, plain(model, prompt.ids)[0], rtol=1e-4, atol=1e-4)


def test_a_chunk_behind_other_tokens_is_not_exact() -> None:
    """Behind as many tokens as it was computed behind, but not those."""
    model = model_of("llama")
    prompt = replace(prompt_of(model), system=tokens(SYSTEM, 99))
    logits, report, _, _ = fused(model, prompt.fused, A3(ratio=1.0))
    assert (report.exact, report.recomputed) == (0, sum(LENGTHS))
    torch.testing.assert_close(logits, plain(model, prompt.ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=5)], ids=["contiguous", "paged"])
def test_memory_for_the_answer_is_there_after_the_prompt(config: CacheConfig) -> None:
    model = model_of("llama")
    prompt = prompt_of(model).fused
    with attach(model, fuse=A3(), cache=config) as session:
        cache = session.new_cache(1)
        read(session, cache, prompt, then=1000)
        before = cache.kv.nbytes
        with torch.no_grad():
            model(torch.tensor([tokens(1000, 8)]), past_key_values=cache)
        assert cache.kv.nbytes == before and cache.kv.lengths == [len(prompt.ids) + 1000]


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_keys_or_values_that_are_all_zero_have_no_relative_error(name: str) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, name).weight.zero_()
    _, report, _, _ = fused(model, prompt_of(model).fused, LegoLink(first=99))
    zero, other = (report.key_error, report.value_error)[:: 1 if name == "k_proj" else -1]
    assert zero[0] is not None and zero[1] is None and None not in other


@pytest.mark.parametrize("fusion", swept([PIE(), *EVERYTHING, FullReuse()], 2), ids=repr)
@pytest.mark.parametrize("name", names("decode"))
def test_every_decode_method_goes_with_fusion(name: str, fusion: Fusion, plans_of_tests: Path) -> None:
    """Where nothing is reused, it answers as after a plain prefill."""
    with planned(plans_of_tests):
        options = {"bits": 4, "tables": 9} if name == "magicpig" else {}  # in place of a plan
        model, decode = tiny(), choose("decode", name, **options)
        prompt = prompt_of(model)
        _, report, _, answer = fused(model, prompt.fused, fusion, decode=decode, new=10)
        if report.reused:
            assert len(answer) == 10
        else:
            assert answer == plain(model, prompt.ids, decode=decode, new=10)[2]


# bad input


def test_models_of_too_few_layers_are_refused_when_attaching() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    for fusion in (A3(), CacheBlend()):
        with pytest.raises(Unsupported, match=rf"fuse={fusion.name} chooses tokens in layer 1, .* last layer is 0"):
            attach(model, fuse=fusion)
    with pytest.raises(InvalidInput, match=r"expected a layer of the model, which has 1 \(0 to 0\), got 99"):
        attach(model, fuse=A3Deep(layer=99))
    prompt = prompt_of(model)
    for fusion in (PIE(), LegoLink(), A3Deep(ratio=1.0)):
        assert len(fused(model, prompt.fused, fusion)[3]) == 6


def test_the_cache_is_as_it_was_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    prompt = prompt_of(model)
    with attach(model, fuse=A3()) as session:
        reader = Reader(session)
        monkeypatch.setattr(model.model.layers[1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(session, reader.cache, prompt.fused)
        monkeypatch.undo()
        assert reader.cache.columns == 0 and reader.cache.kv.lengths == [0]
        logits, _ = read(session, reader.cache, prompt.fused)
        with pytest.raises(InvalidInput, match="begins an empty cache of one sequence; this one holds 88 columns"):
            read(session, reader.cache, prompt.fused)
    torch.testing.assert_close(logits, fused(model, prompt.fused, A3())[0])
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


def test_prompts_that_are_none() -> None:
    model = model_of("llama")
    prompt = prompt_of(model)
    a, b, _ = prompt.chunks
    with pytest.raises(InvalidInput, match="has none after its chunks; the question follows them"):
        FusedPrompt.of([prompt.system, a])
    with pytest.raises(InvalidInput, match="the prompt is empty"):
        FusedPrompt(())
    with pytest.raises(InvalidInput, match=r"chunk 1, at token 5: expected at token 28 or later"):
        FusedPrompt(tuple(prompt.ids), ((7, a), (5, b)))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="it holds other tokens than the prompt of 88 has there"):
        FusedPrompt(tuple(prompt.ids), ((8, a),))  # type: ignore[arg-type]


def test_tokens_and_lengths_that_the_model_does_not_have() -> None:
    model = tiny_model("llama", max_position_embeddings=100)
    prompt = prompt_of(model)
    with attach(model, fuse=PIE()) as session:
        cache = session.new_cache(1)
        for token in (-1, 264):
            with pytest.raises(InvalidInput, match=f"prompt: token {token} is not in the model's vocabulary of 264"):
                read(session, cache, FusedPrompt.of([prompt.system, [token]]))
        for then in (-1, 1.5, "3", True):
            with pytest.raises(InvalidInput, match="then: expected a count of tokens >= 0"):
                read(session, cache, prompt.fused, then=then)  # type: ignore[arg-type]
        with pytest.raises(
            InvalidInput, match=r"is 88 tokens .* may take 13, .* context is 100 tokens; .* by 1 tokens"
        ):
            read(session, cache, prompt.fused, then=13)
        assert cache.columns == 0
        read(session, cache, prompt.fused, then=12)


def test_a_chunk_of_another_model_or_dtype_is_refused() -> None:
    model = model_of("llama")
    prompt = prompt_of(model)
    (chunk, *_) = prompt.chunks
    short = replace(chunk, keys=chunk.keys[:1], values=chunk.values[:1])
    other = replace(
        chunk, key=replace(chunk.key, dtype="float16"), keys=tuple(x.half() for x in chunk.keys),
        values=tuple(x.half() for x in chunk.values),
    )  # fmt: skip
    with attach(model, fuse=PIE()) as session:
        for wrong, message in ((short, "it holds 1 layers and the model has 2"), (other, "it holds torch.float16")):
            with pytest.raises(InvalidInput, match=message):
                read(session, session.new_cache(1), FusedPrompt.of([prompt.system, wrong, prompt.question]))


def test_sessions_that_cannot_fuse() -> None:
    model = model_of("llama")
    with attach(model) as session, pytest.raises(InvalidInput, match="the session has no fusion method"):
        read(session, session.new_cache(1), FusedPrompt((1, 2)))
    with pytest.raises(Unsupported, match="fuse=a3 with prefill=streaming_llm: recomputed tokens attend densely"):
        attach(model, fuse="a3", prefill="streaming_llm")
    with attach(model, fuse="pie") as session, pytest.raises(InvalidInput, match="holds 0 columns of 2"):
        read(session, session.new_cache(2), FusedPrompt((1, 2)))


@dataclass(frozen=True)
class Backwards(Fusion):
    """Recompute every third stored token, from the last to the first."""

    name = "backwards"

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        return prompt.at[::3].flip(0)


def test_rows_run_in_the_order_of_the_prompt_and_layers_get_their_positions() -> None:
    """Whatever the order of a method's choice, and in layers that use position ids themselves."""
    model, rows, ids = tiny_model("llama"), list[Tensor](), list[Tensor]()

    def seen(phase: str, call: Any, outcome: Any) -> None:
        rows.append(call.rows.pos.clone())

    def given(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids.append(kwargs["position_ids"].clone())

    prompt = prompt_of(model).fused
    modules = [layer.self_attn for layer in model.model.layers]
    with attach(model, fuse=Backwards()) as session:
        hooks = [m.register_forward_pre_hook(given, with_kwargs=True) for m in modules]
        session.on_layer = seen
        _, report = read(session, session.new_cache(1), prompt)
        for hook in hooks:
            hook.remove()
    parts = prompt.parts(torch.device("cpu"))
    want = torch.cat([parts.at[::3], parts.computed]).sort().values
    assert report.recomputed == len(parts.at[::3]) and len(rows) == len(modules) <= len(ids)
    assert all(torch.equal(pos, want) for pos in rows)
    assert all(torch.equal(x[0], want) for x in ids)


@pytest.mark.parametrize(("before", "fits"), [(4, True), (5, False)])
def test_the_last_position_that_a_chunk_may_keep(before: int, fits: bool) -> None:
    with attach(model_of("llama")) as session:
        chunk = Precompute(session, tokens(before, 2)).compute(tokens(9, 3))
    prompt = FusedPrompt.of([chunk, tokens(4, 4)])
    if fits:
        assert prompt.local_positions(torch.device("cpu")).tolist() == [*range(4, 13), *range(9, 13)]
        return
    with pytest.raises(InvalidInput, match="positions up to 13, past the prompt's 13 tokens"):
        prompt.local_positions(torch.device("cpu"))


def test_chunks_computed_past_the_prompts_end_cannot_keep_their_positions() -> None:
    model = model_of("llama")
    with attach(model) as session:
        chunk = Precompute(session, tokens(40, 2)).compute(tokens(9, 3))
    with attach(model, fuse=FullReuse()) as session:
        cache = session.new_cache(1)
        with pytest.raises(InvalidInput, match="positions up to 48, past the prompt's 13 tokens"):
            read(session, cache, FusedPrompt.of([chunk, tokens(4, 4)]))
        assert cache.columns == 0
