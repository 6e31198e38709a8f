"""Several prompts over the same chunks: read as one pass and decoded as one batch, each as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach import CacheConfig, Documents, Quest, SnapKV, attach
from longreach.adapters.transformers.fusing import FusedPrompt, FusionReport, read_batch
from longreach.adapters.transformers.fusing.loading import Loading
from longreach.adapters.transformers.prompt_reader import BatchReader
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod
from longreach.methods.fusion import A3, PIE, A3Deep, CacheBlend, Dependence, FullReuse, LegoLink
from longreach.methods.mac import MAC
from longreach.methods.slots import Fusion
from longreach.testing.tiny import tiny_tokenizer
from tests.adapters.transformers.fusing.test_read import fused, held_of, prompt_of, tokens
from tests.adapters.transformers.reference import model_of
from tests.tiers import families

FUSIONS = (
    FullReuse(), PIE(), LegoLink(first=3, last=2), A3(ratio=0.2), A3(ratio=0.2, heads="joint"), CacheBlend(ratio=0.2),
    A3Deep(ratio=0.2), A3Deep(ratio=0.2, layer=1, rounds=2), Dependence(ratio=0.2),
)  # fmt: skip
LENGTHS = (9, 1, 23)  # of questions
NEW = 6
TEXTS = ["The archive opens at nine. Its code is 4711.\n\nAsk at the desk.", "Boats leave at noon.", "Öl und Käse. 🧀"]
QUESTIONS = ["When do boats leave?", "Code?", "What is it that the archive's desk would say if it were asked at nine?"]
SYSTEM = "Answer from the documents."


def batch_of(model: Any) -> list[FusedPrompt]:
    prompt = prompt_of(model)
    draw = torch.Generator().manual_seed(5)
    chunks = [
        replace(chunk, dependence=torch.rand(len(chunk.tokens), generator=draw, dtype=torch.float64))
        for chunk in prompt.chunks
    ]
    return [FusedPrompt.of([prompt.system, *chunks, tokens(n, 30 + n)]) for n in LENGTHS]


def together(
    model: Any, prompts: list[FusedPrompt], fusion: Fusion, *, decode: AttentionMethod | None = None,
    config: CacheConfig | None = None,
) -> tuple[torch.Tensor, list[FusionReport], list[Any], list[list[int]]]:  # fmt: skip
    """(logits, reports, keys and values of each sequence and layer, greedy tokens)."""
    with attach(model, fuse=fusion, decode=decode, cache=config) as session:
        reader = BatchReader(session)
        logits, reports = reader.read_fused_batch(prompts, then=NEW)
        assert reader.cache is not None
        kept = [held_of(reader.cache.kv, number, len(prompt.ids)) for number, prompt in enumerate(prompts)]
        answer = reader.answer(logits, NEW, ())
        return logits, reports, kept, [list(each) for each in answer.tokens]


@pytest.mark.covering("name", fusion=type)
@pytest.mark.parametrize("fusion", FUSIONS, ids=repr)
@pytest.mark.parametrize("name", families(4))
def test_each_prompt_is_read_as_if_it_were_alone(name: str, fusion: Fusion) -> None:
    model = model_of(name)
    prompts = batch_of(model)
    logits, reports, kept, answers = together(model, prompts, fusion)
    for number, prompt in enumerate(prompts):
        want, report, memory, tokens_wanted = fused(model, prompt, fusion, new=NEW)
        torch.testing.assert_close(logits[number], want, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(kept[number], memory, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert answers[number] == tokens_wanted
        mine, counts = reports[number], ("tokens", "exact", "recomputed", "reused", "computed")
        assert [getattr(mine, n) for n in counts] == [getattr(report, n) for n in counts]
        for a, b in zip(mine.key_error + mine.value_error, report.key_error + report.value_error, strict=True):
            assert a == (b if b is None else pytest.approx(b, rel=1e-3))


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=5)], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    "decode",
    [Quest(k=0.4, page=4, dense_layers=()), MAC(window=24, band=8, tau=0.0, min_context=0)],
    ids=lambda m: m.name,
)
def test_decode_methods_and_pages(decode: AttentionMethod, config: CacheConfig) -> None:
    model, compared = model_of("llama"), 0
    prompts = batch_of(model)
    if isinstance(decode, MAC):  # questions as long as its window, of tokens that differ
        draw = torch.Generator().manual_seed(7)
        asked = [torch.randperm(200, generator=draw)[:n] for n in (24, 31, 26)]
        prompts = [replace(p, ids=(*p.ids[: p.question], *q.tolist())) for p, q in zip(prompts, asked, strict=True)]
    for fusion in (A3(ratio=0.2), A3Deep(ratio=0.2)):
        *_, answers = together(model, prompts, fusion, decode=decode, config=config)
        for answer, prompt in zip(answers, prompts, strict=True):
            want = fused(model, prompt, fusion, decode=decode, new=NEW, config=config)[3]
            same = NEW if decode.name == "quest" else before_a_tie([*prompt.ids, *want], len(prompt.ids))
            assert answer[:same] == want[:same]
            compared += same
    assert compared >= 4 * NEW


def before_a_tie(ids: list[int], start: int) -> int:
    """How many tokens follow from `start` on until MAC's window holds one twice: their queries in the first layer are
    alike, and rounding decides which of the two is nearer to another."""
    return next((n - start for n in range(start, len(ids)) if len({*ids[n - 24 : n]}) < 24), len(ids) - start)


def test_prompts_choose_for_themselves() -> None:
    """Questions differ in what they attend to: had one chosen for all, the others' answers would be other ones."""
    model = model_of("llama")
    prompts = batch_of(model)
    chosen = []
    for prompt in prompts:
        _, _, memory, _ = fused(model, prompt, A3Deep(ratio=0.2, layer=1))
        chosen.append(memory[-1][0][: prompts[0].question])
    assert not torch.allclose(chosen[0], chosen[1], atol=1e-4) and not torch.allclose(chosen[0], chosen[2], atol=1e-4)


@pytest.mark.parametrize("fusion", FUSIONS, ids=repr)
@pytest.mark.parametrize("evict", [None, SnapKV(capacity=130)], ids=["all keys", "snapkv"])
def test_questions_at_once_have_the_answers_that_they_have_alone(fusion: Fusion, evict: SnapKV | None) -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    with attach(model, fuse=fusion, evict=evict) as session:
        documents = Documents(session, tokenizer, system=SYSTEM, chunk_tokens=16)
        documents.read(TEXTS)
        want = []
        for question in QUESTIONS:
            text = "".join(documents.ask(question, 10))
            assert documents.account is not None
            want.append((text, documents.account.answer.tokens, documents.account.fusion.recomputed))
        for order in ((0, 1, 2), (2, 0, 1, 0), (1,)):
            texts = documents.ask_all([QUESTIONS[n] for n in order], 10)
            found = [(t, a.answer.tokens, a.fusion.recomputed) for t, a in zip(texts, documents.accounts, strict=True)]
            assert found == [want[n] for n in order]
        for account in documents.accounts:
            assert 0 < account.read_seconds <= account.first_token_seconds
        assert "".join(documents.ask(QUESTIONS[0], 10)) == want[0][0]


def test_stop_tokens_and_stop_strings_end_each_answer_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    with attach(model, fuse=PIE()) as session:
        documents = Documents(session, tokenizer, system=SYSTEM, chunk_tokens=16)
        documents.read(TEXTS)
        documents.ask_all(QUESTIONS, 10)
        stop = documents.accounts[0].answer.tokens[4]
        text = tokenizer.decode(documents.accounts[2].answer.tokens, skip_special_tokens=True).lstrip()
        monkeypatch.setattr(model.generation_config, "eos_token_id", stop)
        monkeypatch.setattr(model.generation_config, "stop_strings", [text[3:5]])
        texts = documents.ask_all(QUESTIONS, 10)
        accounts = documents.accounts
        for question, mine, account in zip(QUESTIONS, texts, accounts, strict=True):
            assert mine == "".join(documents.ask(question, 10))
            assert documents.account is not None
            alone = documents.account.answer
            assert (account.answer.tokens, account.answer.stopped) == (alone.tokens, alone.stopped)


def test_chunks_are_loaded_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    prompts, loaded = batch_of(model), list[tuple[str, int]]()
    layer, values = Loading.layer, Loading.values

    def counted_layer(self: Loading, number: int) -> Any:
        loaded.append(("layer", number))
        return layer(self, number)

    def counted_values(self: Loading, number: int) -> Any:
        loaded.append(("values", number))
        return values(self, number)

    monkeypatch.setattr(Loading, "layer", counted_layer)
    monkeypatch.setattr(Loading, "values", counted_values)
    for fusion, want in (
        (PIE(), [("layer", 0), ("layer", 1)]), (CacheBlend(), [("values", 1)]), (A3(), []),
        (A3Deep(layer=0), [("layer", 0), ("layer", 0), ("layer", 1)]),
    ):  # fmt: skip
        loaded.clear()
        together(model, prompts, fusion)
        assert loaded == want


# what goes wrong


def test_a_batch_that_is_none() -> None:
    model = model_of("llama")
    prompts = batch_of(model)
    one, two, _ = prompts
    others = FusedPrompt.of([one.ids[:5], *(chunk for _, chunk in one.chunks), [1]])
    fewer = FusedPrompt(one.ids, one.chunks[:-1])
    long = FusedPrompt((*one.ids, *tokens(50, 2)), one.chunks)
    with attach(model, fuse=PIE()) as session:
        for wrong in (others, fewer):
            with pytest.raises(InvalidInput, match="prompt 1 has others than prompt 0, or has them elsewhere"):
                read_batch(session, session.new_cache(2), [one, wrong])
        with pytest.raises(
            InvalidInput, match=r"2 fused prompts begin an empty cache of 2 sequences; .* 0 columns of 3"
        ):
            read_batch(session, session.new_cache(3), [one, two])
        with pytest.raises(InvalidInput, match="at least one fused prompt, got none"):
            read_batch(session, session.new_cache(1), [])
        documents = Documents(session, tiny_tokenizer(), chunk_tokens=16)
        with pytest.raises(InvalidInput, match="no documents were read"):
            documents.ask_all(QUESTIONS)
        documents.read(TEXTS[:1])
        for questions in ([], "Which?"):
            with pytest.raises(InvalidInput, match="expected a list of questions"):
                documents.ask_all(questions)
        with pytest.raises(InvalidInput, match="the question is empty"):
            documents.ask_all(["Which?", " "])
        with pytest.raises(InvalidInput, match="context"):
            documents.ask_all(["Which?", "why " * 1100])
    with attach(model, fuse=PIE(), evict=SnapKV(capacity=40)) as session:
        cache = session.new_cache(2)
        with pytest.raises(InvalidInput, match="capacity 40 is less than the"):
            read_batch(session, cache, [one, long])
        assert cache.columns == 0 and read_batch(session, cache, [one, two])[0].shape[0] == 2


def test_a_pass_that_fails_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, failures, stored = model_of("llama"), list[OSError](), Loading.layer

    def failing(self: Loading, layer: int) -> Any:
        if layer == 1 and failures:
            raise failures.pop()
        return stored(self, layer)

    monkeypatch.setattr(Loading, "layer", failing)
    prompts = batch_of(model)
    with attach(model, fuse=PIE()) as session:
        cache = session.new_cache(3)
        want, _ = read_batch(session, cache, prompts)
        cache.empty()
        failures.append(OSError(5, "Input/output error"))
        with pytest.raises(OSError, match="Input/output error"):
            read_batch(session, cache, prompts)
        assert cache.columns == 0 and not any(cache.kv.lengths)
        again, _ = read_batch(session, cache, prompts)
        assert torch.equal(again, want)
