"""A conversation over turns: the same answers as from the whole prompt each time, with only new tokens read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longreach import Chat, attach, generate
from longreach.errors import CapacityError, InvalidInput, ModelFileError
from longreach.testing.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer

TURNS = ("What is the code?", "And the second one?", "Thanks </s> [user] bye")
NEW = 12
METHODS = ("dense", "streaming_llm sinks=2 window=16", "mac", "magicpig bits=2 tables=8 local=8 sinks=2")


def whole(session: Any, chat: Chat, turn: str) -> list[int]:
    """The answer's tokens from a prompt that is read at once."""
    ids = chat._tokens([*chat.messages, {"role": "user", "content": turn}])
    made = generate(session, torch.tensor([ids]), max_new_tokens=NEW, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return made.tokens[0].tolist()


def model() -> Any:
    return tiny_model("llama", eos_token_id=EOS_ID)


@pytest.mark.parametrize("system", ["", "Be short."])
def test_turns_read_only_what_is_new(system: str) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    with attach(model()) as session:
        chat = Chat(session, tokenizer, system=system)
        read = 0
        for number, turn in enumerate(TURNS):
            want = whole(session, chat, turn)
            session.reset_report()
            reply = chat.ask(turn, max_new_tokens=NEW, pad_token_id=PAD_ID)
            assert reply.made.tokens[0].tolist() == want and reply.tokens == len(want)
            rows = {r.rows for r in session.report().layers if r.phase == "prefill"}
            assert rows == {reply.prompt_tokens - reply.reused_tokens}
            assert (reply.reused_tokens > 0) == (number > 0)
            assert reply.stopped == (want[-1] == EOS_ID)
            read += reply.prompt_tokens - reply.reused_tokens
        roles = [m["role"] for m in chat.messages]
        assert roles == (["system"] if system else []) + ["user", "assistant"] * 3
        assert chat.messages[-1]["content"] == tokenizer.decode(want, skip_special_tokens=True).strip()
    assert read < 2 * reply.prompt_tokens


@pytest.mark.parametrize("method", METHODS)
def test_methods_and_a_turn_taken_back(method: str) -> None:
    """A turn that is asked again after it was taken back gets the same answer, whatever the method keeps."""
    with attach(model(), decode=method) as session:
        chat = Chat(session, tiny_tokenizer(chat=True))
        chat.ask(TURNS[0], max_new_tokens=NEW)
        first = chat.ask(TURNS[1], max_new_tokens=NEW)
        before = chat.messages
        chat.take_back()
        again = chat.ask(TURNS[1], max_new_tokens=NEW)
        assert chat.messages == before and again.text == first.text and again.read_again > 0
        chat.take_back()
        chat.take_back()
        with pytest.raises(InvalidInput, match="no turn to take back"):
            chat.take_back()
        assert chat.messages == ()


def test_text_of_a_turn_is_no_control_token() -> None:
    """A turn that spells out </s> has the bytes of that text."""
    tokenizer = tiny_tokenizer(chat=True)
    with attach(model()) as session:
        ids = Chat(session, tokenizer)._tokens([{"role": "user", "content": "a</s>b"}])
    assert ids.count(EOS_ID) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "[user]a</s>b[assistant]"


def test_a_template_that_rewrites_earlier_turns() -> None:
    """Answers of earlier turns are left out: what no longer fits is read again, and the reply tells how much."""
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with attach(model()) as session:
        chat = Chat(session, tokenizer)
        first = chat.ask(TURNS[0], max_new_tokens=NEW)
        want = whole(session, chat, TURNS[1])
        second = chat.ask(TURNS[1], max_new_tokens=NEW)
        assert second.made.tokens[0].tolist() == want
        assert second.reused_tokens == first.prompt_tokens and second.read_again == first.tokens - 1
        with pytest.raises(InvalidInput, match=r"control tokens \('</s>'\), and the chat template changes turns"):
            chat.ask("x</s>y", max_new_tokens=NEW)


def test_settings_and_errors() -> None:
    tokenizer, broken = tiny_tokenizer(chat=True), tiny_tokenizer(chat=True)
    broken.chat_template = "{{ raise_exception('no system role') }}"
    with attach(model()) as session:
        chat = Chat(session, tokenizer)
        chat.ask(TURNS[0], max_new_tokens=NEW, repetition_penalty=1.2)
        before, columns = chat.messages, chat._cache.columns
        for options, message in (
            ({"text": "  "}, "the turn is empty"),
            ({"text": "\ud800"}, "not UTF-8"),
            ({"text": "x", "past_key_values": session.new_cache()}, "past_key_values: a chat has"),
            ({"text": "x" * 5000}, "the model's context is 4096 tokens"),
            ({"text": "x", "temperature": 0.5}, "do_sample=True"),
        ):
            with pytest.raises(InvalidInput, match=message):
                chat.ask(**options)
        with pytest.raises(ZeroDivisionError):
            chat.ask("x", max_new_tokens=NEW, logits_processor=[lambda ids, scores: 1 // 0])
        assert chat.messages == before and chat._cache.columns <= columns
        want = whole(session, chat, TURNS[1])
        assert chat.ask(TURNS[1], max_new_tokens=NEW).made.tokens[0].tolist() == want
        with pytest.raises(ModelFileError, match="no system role"):
            Chat(session, broken).ask("x")
        with pytest.raises(InvalidInput, match="has no chat template"):
            Chat(session, tiny_tokenizer())
    with pytest.raises(InvalidInput, match="the session is closed"):
        Chat(session, tokenizer)


def test_a_full_cache_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from longreach import CacheConfig

    with attach(model(), cache=CacheConfig(capacity=64)) as session:
        chat = Chat(session, tiny_tokenizer(chat=True))
        chat.ask("hi", max_new_tokens=4)
        with pytest.raises(CapacityError):
            chat.ask("x" * 60, max_new_tokens=4)
        assert len(chat.messages) == 2
        chat.ask("ok", max_new_tokens=4)


@pytest.mark.parametrize("system", ["", "Be short."])
@pytest.mark.parametrize("method", METHODS)
def test_a_document_is_read_ahead_and_from_a_file(method: str, system: str, tmp_path: Path) -> None:
    """The same answers as with the document in the first turn; a saved one is not read again."""
    tokenizer, document = tiny_tokenizer(chat=True), "The code is 42. " * 9
    with attach(model(), decode=method) as session:
        plain = Chat(session, tokenizer, system=system)
        want = [
            plain.ask(f"{document.rstrip()}\n\n{TURNS[0]}", max_new_tokens=NEW),
            plain.ask("Why?", max_new_tokens=NEW),
        ]
        chat, read = Chat(session, tokenizer, system=system, document=document), list[int]()
        assert (
            chat.read_ahead(read.append, prefill_chunk_size=40) == sum(read) == len(chat.beginning()) and len(read) > 2
        )
        chat.save(tmp_path / "cache")
        got = [chat.ask(turn, max_new_tokens=NEW) for turn in (TURNS[0], "Why?")]
        assert chat.messages[-4:] == (
            {"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": want[0].text},
            {"role": "user", "content": "Why?"}, {"role": "assistant", "content": want[1].text},
        )  # fmt: skip
        assert [r.text for r in got] == [r.text for r in want] and got[0].reused_tokens == sum(read)
        assert chat.read_ahead(read.append) == chat._cache.columns  # within a conversation it does nothing
    with attach(model(), decode=method) as session:
        chat = Chat(session, tokenizer, system=system, document=document, cache=session.load_cache(tmp_path / "cache"))
        told = list[int]()
        assert chat.read_ahead(told.append) == sum(read) and told == [sum(read)]
        again = [chat.ask(turn, max_new_tokens=NEW) for turn in (TURNS[0], "Why?")]
        assert [r.text for r in again] == [r.text for r in want] and again[0].reused_tokens == sum(read)
        other = Chat(session, tokenizer, document="Other", cache=session.load_cache(tmp_path / "cache"))
        assert other.ask(TURNS[0], max_new_tokens=NEW).reused_tokens < 20


def test_caches_that_a_chat_cannot_use() -> None:
    with attach(model()) as session:
        for cache in (session.new_cache(), session.new_cache(2)):
            with pytest.raises(InvalidInput, match="cache: expected one that this session's load_cache"):
                Chat(session, tiny_tokenizer(chat=True), cache=cache)
        with pytest.raises(InvalidInput, match="not UTF-8"):
            Chat(session, tiny_tokenizer(chat=True), document="\udcff")
