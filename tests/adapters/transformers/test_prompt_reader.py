"""Reading a document once and asking it: phases, chunks, what is left behind after answers and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers.models.llama import modeling_llama

from longreach import attach
from longreach.adapters.transformers import (
    Answer,
    BatchReader,
    Reader,
    check_length,
    context_limit,
    encode,
    prompts,
    share,
    stop_strings,
    stop_tokens,
)
from longreach.errors import ConcurrentUse, InvalidInput, OutOfMemory
from longreach.methods.dense import Dense
from longreach.testing.tiny import BOS_ID, EOS_ID, random_tokens, tiny_model, tiny_tokenizer

DOCUMENT = random_tokens(1, 50)[0].tolist()
QUESTION = random_tokens(1, 9, seed=1)[0].tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def answered(reader: Reader, tokens: list[int] = QUESTION, most: int = 8, stop: tuple[int, ...] = ()) -> Answer:
    answer = Answer()
    assert list(reader.ask(tokens, most, stop, answer)) == answer.tokens
    return answer


@torch.no_grad()
def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Tokens after `tokens`, each from a whole pass without any cache."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
    return found[len(tokens) :]


@pytest.mark.parametrize("chunk", [1, 7, 50, 512])
def test_answers_are_those_of_whole_passes_for_any_chunk_size(model: Any, chunk: int) -> None:
    expected = greedy(model, DOCUMENT + QUESTION, 8)
    told: list[int] = []
    with attach(model) as session:
        reader = Reader(session, chunk)
        reader.read(DOCUMENT, told.append)
        assert sum(told) == len(DOCUMENT) and max(told) <= chunk
        assert answered(reader).tokens == expected
        assert reader.cache.columns == len(DOCUMENT)  # the question and its answer are forgotten
        assert answered(reader).tokens == expected
        rows = {layer.phase: layer.rows for layer in session.report().layers}
    # a chunk of one token is prefill all the same; the first token of an answer takes no decode step
    assert rows == {"prefill": len(DOCUMENT) + 2 * len(QUESTION), "decode": 2 * 7}


def test_memory_is_allocated_once_where_it_is_said_what_comes(model: Any) -> None:
    document = random_tokens(1, 290)[0].tolist()
    with attach(model) as session:
        reader = Reader(session, chunk=128)
        kv = reader.cache.kv
        reader.read(document, then=9 + 40)
        assert len(answered(reader, most=40).tokens) == len(answered(reader, most=12).tokens) + 28 == 40
        assert (kv.generation, kv.layouts[0].pages.size) == (1, 339)  # once before there was any
        answered(reader, most=300)  # more than was said: all of it at once
        assert (kv.generation, kv.layouts[0].pages.size) == (2, 2 * 339)


def test_an_answer_ends_before_a_stop_token_or_at_its_longest(model: Any) -> None:
    with attach(model) as session:
        reader = Reader(session)
        reader.read(DOCUMENT)
        full = answered(reader)
        assert not full.stopped and full.steps == 6 and full.setup_seconds > 0
        assert full.seconds_per_token and full.first_token_seconds > 0 and reader.read_seconds > 0
        stop = next(t for i, t in enumerate(full.tokens) if i and t not in full.tokens[:i])
        short = answered(reader, stop=(stop, 999))
        assert short.stopped and short.tokens == full.tokens[: full.tokens.index(stop)]
        at_once = answered(reader, stop=(full.tokens[0],))
        assert at_once.stopped and at_once.tokens == [] and at_once.seconds_per_token is None


def test_read_gives_the_logits_after_the_prompt_and_decode_those_after_each_token(model: Any) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([[*DOCUMENT, 5]])).logits[0, -2:]
    with attach(model) as session:
        reader = Reader(session, 16)
        first, seen, answer = reader.read(DOCUMENT), [], Answer()

        def choose(logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits[0].clone())
            return torch.tensor([5])

        assert list(reader.decode(first, 2, answer, choose=choose)) == [5, 5]
        torch.testing.assert_close(torch.stack(seen), expected, rtol=1e-4, atol=1e-4)
        assert answer.steps == 0 and answer.seconds_per_token is None and answer.setup_seconds > 0
        assert reader.cache.columns == len(DOCUMENT) + 1


def test_what_is_done_aside_is_forgotten_also_after_an_error(model: Any) -> None:
    with attach(model) as session:
        reader = Reader(session)
        logits = reader.read(DOCUMENT)
        before = answered(reader).tokens
        with pytest.raises(ZeroDivisionError), reader.rollback():
            list(reader.decode(logits, 3, Answer()))
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), reader.rollback():
            for _ in reader.decode(logits, 3, Answer()):
                raise ZeroDivisionError
        half = reader.ask(QUESTION, 8, (), Answer())
        assert [next(half), next(half)] == before[:2]
        with pytest.raises(ConcurrentUse):  # one answer at a time
            answered(reader)
        half.close()
        assert reader.cache.columns == len(DOCUMENT) and answered(reader).tokens == before


def test_out_of_memory_says_what_to_lower_and_leaves_nothing_behind(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([DOCUMENT])
    before, expected = model(ids).logits, greedy(model, DOCUMENT + QUESTION, 8)
    forward, calls = modeling_llama.LlamaMLP.forward, []

    def short_of_memory(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) == 6:  # the second layer of the third pass
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x)

    with attach(model) as session:
        reader = Reader(session, chunk=16)
        with monkeypatch.context() as patch, pytest.raises(OutOfMemory) as raised:
            patch.setattr(modeling_llama.LlamaMLP, "forward", short_of_memory)
            reader.read(DOCUMENT)
        assert "after 32 of 50 prompt tokens, read 16 at a time" in str(raised.value)
        assert "--prefill-chunk-size" in str(raised.value) and reader.cache.columns == 0
        reader.read(DOCUMENT)  # the session goes on
        assert answered(reader).tokens == expected
    assert torch.equal(model(ids).logits, before)


def test_bad_chunks_tokens_and_lengths_are_refused(model: Any) -> None:
    with attach(model) as session:
        with pytest.raises(InvalidInput, match="expected a count of tokens >= 1, got 0"):
            Reader(session, 0)
        reader = Reader(session)
        with pytest.raises(InvalidInput, match="at least one token"):
            reader.read([])
        reader.read(DOCUMENT)
        with pytest.raises(InvalidInput, match=r"59 tokens and the answer may take 4038.*by 1 tokens"):
            next(reader.ask(QUESTION, 4038, (), Answer()))
        assert reader.cache.columns == len(DOCUMENT)
    assert context_limit(model) == 4096
    check_length(model, 4000, 96)
    check_length(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: object())), 10**9, 1)


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(sequences, min_size=1, max_size=3), sequences)
def test_shared_tokens_are_the_beginning_of_every_prompt(found: list[list[int]], other: list[int]) -> None:
    found, other = [[9, *s] for s in found], [9, *other]
    common, rests = share(found, other)
    assert [common + rest for rest in rests] == found and all(rests)
    assert other[: len(common)] == common and len(other) > len(common)
    longer = len(common) + 1  # and they are as many as can be shared
    agree = all(s[:longer] == other[:longer] and len(s) > longer for s in found) and len(other) > longer
    assert not agree


def test_prompts_that_share_nothing_are_refused() -> None:
    with pytest.raises(InvalidInput, match="question before the document"):
        share([[1, 2], [2, 2]], [1, 3])


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_those_of_the_whole_text(chat: bool) -> None:
    tokenizer = tiny_tokenizer(chat=chat)
    questions = ["Who?", "? or !", "Where is it?"]
    common, rests = prompts(tokenizer, "Some text.\n\n", questions)
    for question, rest in zip(questions, rests, strict=True):
        text = tokenizer.decode(common + rest)
        if chat:
            assert text == f"<s>[user]Some text.\n\n{question}</s>[assistant]"
        else:
            assert text == f"<s>Some text.\n\nQuestion: {question}\nAnswer:"
    assert "Some text.\n\n" in tokenizer.decode(common) and "W" not in tokenizer.decode(common)


def test_an_end_that_the_tokenizer_adds_is_taken_off() -> None:
    tokenizer = tiny_tokenizer()
    assert encode(tokenizer, "ab") == [BOS_ID, *encode(tokenizer, "ab", special=False)]
    plain = encode(tokenizer, "ab")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)]
    )
    assert tokenizer("ab").input_ids == [*plain, EOS_ID] and encode(tokenizer, "ab") == plain


def test_stops_come_from_the_generation_config_and_the_tokenizer(model: Any) -> None:
    tokenizer = SimpleNamespace(eos_token_id=7)

    def config(**fields: Any) -> Any:
        return SimpleNamespace(generation_config=SimpleNamespace(**fields))

    assert stop_tokens(config(eos_token_id=[3, 9]), tokenizer) == (3, 7, 9)
    assert stop_tokens(config(eos_token_id=3), tokenizer) == (3, 7)
    assert stop_tokens(config(eos_token_id=None), SimpleNamespace(eos_token_id=None)) == ()
    assert stop_strings(model) == stop_strings(config()) == ()
    assert stop_strings(config(stop_strings="\n")) == ("\n",)
    assert stop_strings(config(stop_strings=["\n", "Q:"])) == ("\n", "Q:")


def failing(monkeypatch: pytest.MonkeyPatch, phase: str, after: int) -> None:
    """Dense attention fails once: in layer 1, in the pass of this phase after so many."""
    passes, attend = [0], Dense.run

    def run(self: Dense, call: Any, state: Any) -> Any:
        if (call.phase, call.layer) == (phase, 1):
            passes[0] += 1
            if passes[0] == after + 1:
                raise KeyboardInterrupt
        return attend(self, call, state)

    monkeypatch.setattr(Dense, "run", run)


def test_a_pass_that_failed_is_not_in_the_report(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(model) as session:
        reader = Reader(session, 20)
        failing(monkeypatch, "prefill", 1)
        with pytest.raises(KeyboardInterrupt):
            reader.read(DOCUMENT)
        assert {(layer.rows, layer.steps) for layer in session.report().layers} == {(20, 1)}
        reader.cache.empty()
        reader.read(DOCUMENT)
        assert {(layer.rows, layer.steps) for layer in session.report().layers} == {(20 + 50, 1 + 3)}
        failing(monkeypatch, "prefill", 0)
        with pytest.raises(KeyboardInterrupt):
            answered(reader)
        answered(reader)
        assert {layer.rows for layer in session.report().layers if layer.phase == "prefill"} == {
            20 + 50 + len(QUESTION)
        }


@pytest.mark.parametrize("after", [0, 2])
def test_a_step_that_failed_leaves_a_session_that_reads(
    model: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    prompts_ = [DOCUMENT, DOCUMENT[:30]]
    with attach(model) as session:
        reader = BatchReader(session)
        want = reader.answer(reader.read(prompts_), 6, ()).tokens
        logits = reader.read(prompts_)
        failing(monkeypatch, "decode", after)
        with pytest.raises(KeyboardInterrupt):
            reader.answer(logits, 6, ())
        assert reader.answer(reader.read(prompts_), 6, ()).tokens == want
        rows = {(layer.phase, layer.rows) for layer in session.report().layers}
    assert rows == {("prefill", 3 * 80), ("decode", 10 + 2 * after + 10)}
