"""Documents: stored once, read in any order, asked by any question."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import longreach
from longreach import A3, PIE, ChunkPool, ChunkStore, Documents, SnapKV, attach
from longreach.adapters.transformers.prompt_reader import Answer, Reader
from longreach.adapters.transformers.prompt_tokens import frame
from longreach.errors import ConcurrentUse, InvalidInput, ModelFileError, StoreError
from longreach.testing.tiny import tiny_tokenizer
from tests.adapters.transformers.reference import model_of

TEXTS = ["The archive opens at nine. Its code is 4711.\n\nAsk at the desk.", "Boats leave at noon.", "Öl und Käse. 🧀"]
SYSTEM, QUESTION = "Answer from the documents.", "When do boats leave?"


def asked(documents: Documents, question: str = QUESTION, new: int = 12) -> str:
    return "".join(documents.ask(question, new))


def plain(model: Any, ids: list[int], new: int = 12) -> list[int]:
    """Greedy tokens after a plain prefill of the same tokens."""
    with attach(model) as session:
        reader = Reader(session)
        return list(reader.decode(reader.read(ids), new, Answer()))


@pytest.mark.parametrize("chat", [False, True])
def test_at_ratio_1_it_is_the_models_own_answer(chat: bool, tmp_path: Path) -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer(chat=chat)
    with attach(model, fuse=A3(ratio=1.0)) as session, ChunkStore(tmp_path) as store:
        documents = Documents(session, tokenizer, system=SYSTEM, store=store, chunk_tokens=16)
        documents.read(TEXTS[:2])
        documents.read(TEXTS[2:])
        ids = list(documents.prompt(QUESTION).ids)
        text, account = asked(documents), documents.account
    assert account is not None and account.answer.tokens == plain(model, ids)
    assert text == tokenizer.decode(account.answer.tokens, skip_special_tokens=True).lstrip()
    assert account.fusion.tokens == len(ids) and account.fusion.reused == 0
    assert 0 < account.read_seconds <= account.first_token_seconds


@pytest.mark.parametrize("chat", [False, True])
def test_characters_are_unchanged_and_special_tokens_come_once(chat: bool) -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer(chat=chat)
    with attach(model, fuse=PIE()) as session:
        documents = Documents(session, tokenizer, system=SYSTEM, chunk_tokens=16)
        documents.read(TEXTS)
        prompt = documents.prompt(QUESTION)
    told = tokenizer.decode(list(prompt.ids), skip_special_tokens=True)
    body = "\n\n".join(TEXTS)
    turns = f"[system]{SYSTEM}[user]{body}\n\n{QUESTION}[assistant]"
    assert told == (turns if chat else f"{SYSTEM}\n\n{body}\n\nQuestion: {QUESTION}\nAnswer:")
    assert prompt.ids.count(tokenizer.bos_token_id) == 1 and prompt.ids[0] == tokenizer.bos_token_id
    assert all(tuple(chunk.prefix.tolist()) == tuple(documents.head) for _, chunk in prompt.chunks)
    stored = sum(len(chunk.tokens) for _, chunk in prompt.chunks)
    assert stored == sum(len(text.encode()) for text in TEXTS)


def test_what_is_stored_is_found_in_any_order_and_twice(tmp_path: Path) -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    with attach(model, fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        first = Documents(session, tokenizer, system=SYSTEM, store=store, chunk_tokens=16)
        first.read([TEXTS[0], TEXTS[0]])
        states = [origin.state for origin in first.origins]
        half = len(states) // 2
        assert states == ["computed"] * half + ["stored"] * half, "a document given twice is stored once"
        assert len(store.entries()) == half and [o.document for o in first.origins] == [0] * half + [1] * half
        again = Documents(session, tokenizer, system=SYSTEM, store=store, chunk_tokens=16)
        again.read([TEXTS[1], TEXTS[0]])
        assert {o.state for o in again.origins if o.document == 1} == {"stored"}
        placed = [start for start, _ in first.prompt(QUESTION).chunks]
        assert len(placed) == 2 * half and asked(first) and asked(again)
        other = Documents(session, tokenizer, system="Another one.", store=store, chunk_tokens=16)
        other.read([TEXTS[0]])
        assert {o.state for o in other.origins} == {"computed"}, "behind another system prompt they are other chunks"


def test_every_question_starts_anew_with_eviction_too() -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    with attach(model, fuse=A3(ratio=0.2), evict=SnapKV(capacity=90)) as session:
        documents = Documents(session, tokenizer, system=SYSTEM, chunk_tokens=16)
        documents.read(TEXTS)
        first = asked(documents)
        asked(documents, "And who?")
        assert asked(documents) == first
        with pytest.raises(InvalidInput, match="capacity 90 is less than the"):
            asked(documents, "why " * 30)
        assert asked(documents) == first


def test_a_broken_chunk_is_computed_again_and_a_store_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    with attach(model, fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        Documents(session, tokenizer, store=store, chunk_tokens=16).read(TEXTS[:1])
        (path, *_) = sorted(tmp_path.rglob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-9])
        again = Documents(session, tokenizer, store=store, chunk_tokens=16)
        with pytest.warns(UserWarning, match="set aside|broken|truncated"):
            again.read(TEXTS[:1])
        assert [o.state for o in again.origins].count("recomputed") == 1

        def fails(*args: Any) -> Any:
            raise StoreError("the disk is gone")

        monkeypatch.setattr(store, "load", fails)
        told = Documents(session, tokenizer, store=store, chunk_tokens=16)
        told.read(TEXTS[:1])
        assert {str(o.error) for o in told.origins} == {"the disk is gone"} and asked(told)


# answers at the same time


def test_a_second_answer_is_refused_and_the_first_goes_on() -> None:
    with attach(model_of("llama"), fuse=A3(ratio=0.2)) as session:
        documents = Documents(session, tiny_tokenizer(), chunk_tokens=16)
        documents.read(TEXTS)
        want, account = asked(documents), documents.account
        batch = documents.ask_all([QUESTION, "Who?"], 4)
        accounts = documents.accounts
        first = documents.ask(QUESTION, 12)
        text, refused = next(first), list[ConcurrentUse]()

        def refuse(call: Callable[[], Any]) -> None:
            with pytest.raises(ConcurrentUse, match="finish or close it first") as error:
                call()
            refused.append(error.value)

        calls = (lambda: asked(documents, "And who?"), lambda: documents.ask_all([QUESTION, "Who?"], 4))
        for call in calls:
            refuse(call)
            thread = threading.Thread(target=refuse, args=(call,))
            thread.start()
            thread.join()
        assert len(refused) == 4 and documents.account is None and documents.accounts is accounts
        assert text + "".join(first) == want and account is not None
        assert documents.account is not None and documents.account.answer.tokens == account.answer.tokens
        first = documents.ask(QUESTION, 12)
        next(first)
        first.close()  # type: ignore[attr-defined]
        assert documents.ask_all([QUESTION, "Who?"], 4) == batch and asked(documents) == want


def test_threads_that_ask_at_once_get_their_answer_or_are_refused() -> None:
    with attach(model_of("llama"), fuse=PIE()) as session:
        documents = Documents(session, tiny_tokenizer(), chunk_tokens=16)
        documents.read(TEXTS)
        want, together, found = asked(documents), threading.Barrier(4), list[str]()

        def work() -> None:
            together.wait(30)
            try:
                found.append(asked(documents))
            except ConcurrentUse as error:
                found.append(type(error).__name__)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and want in found and {*found} <= {want, "ConcurrentUse"}
        assert asked(documents) == want


# bad input


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "expected a list of documents with at least one text"),
        ("one text", "expected a list of documents"),
        ([TEXTS[0], "  \n"], "document 1 is empty; leave it out"),
        ([b"bytes"], "document 0: expected text [(]str[)], got bytes; decode it first"),
        (None, "expected a list of documents with at least one text"),
        (b"bytes", "expected a list of documents"),
        ((text for text in ()), "expected a list of documents with at least one text"),
        (["\ud800"], "this one holds bytes that are not UTF-8"),
    ],
)
def test_documents_that_are_none(texts: Any, message: str) -> None:
    with attach(model_of("llama"), fuse=PIE()) as session:
        documents = Documents(session, tiny_tokenizer())
        with pytest.raises(InvalidInput, match=message):
            documents.read(texts)
        assert documents.chunks == [] and documents.origins == []


@pytest.mark.parametrize("reserve", ["x", -5, 1.5, True])
def test_a_reserve_that_is_no_count(reserve: Any) -> None:
    with attach(model_of("llama"), fuse=PIE()) as session:
        documents = Documents(session, tiny_tokenizer())
        with pytest.raises(InvalidInput, match=f"reserve: expected a count of tokens >= 0, got {reserve!r}"):
            documents.read(TEXTS, reserve=reserve)


def test_texts_and_questions_may_come_from_a_generator() -> None:
    with attach(model_of("llama"), fuse=PIE()) as session:
        documents = Documents(session, tiny_tokenizer(), chunk_tokens=16)
        documents.read(text for text in TEXTS)
        assert len(documents.chunks) == len(TEXTS)
        want = documents.ask_all([QUESTION, "Who?"], 4)
        assert documents.ask_all((question for question in (QUESTION, "Who?")), 4) == want


def test_a_question_that_eviction_cannot_keep_is_refused_before_documents_are_read() -> None:
    with attach(model_of("llama"), fuse=PIE(), evict=SnapKV(capacity=60)) as session:
        documents = Documents(session, tiny_tokenizer(), system=SYSTEM)
        documents.question_tokens("Who?")
        with pytest.raises(InvalidInput, match=r"capacity 60 is less than the 99 tokens that stay, 29 at"):
            documents.question_tokens(QUESTION + " And who is there at the gate?")


def test_questions_that_cannot_be_asked() -> None:
    with attach(model_of("llama"), fuse=PIE()) as session:
        documents = Documents(session, tiny_tokenizer())
        with pytest.raises(InvalidInput, match="no documents were read; call read first"):
            documents.ask(QUESTION)
        documents.read(TEXTS)
        with pytest.raises(InvalidInput, match="the question is empty"):
            documents.ask(" ")
        with pytest.raises(InvalidInput, match="the question must be text; this one holds bytes that are not UTF-8"):
            documents.ask("\udcff what")
        for question, new in ((QUESTION, 5000), ("x" * 5000, 5)):
            for ask in (documents.ask, lambda question, new: documents.ask_all([question], new)):
                with pytest.raises(
                    InvalidInput, match=r"context is 4096 tokens; shorten the question or the answer by"
                ):
                    ask(question, new)
        for new in (0, -1, 1.5, True, None):
            for ask in (documents.ask, lambda question, new: documents.ask_all([question], new)):
                with pytest.raises(InvalidInput, match=f"max_new_tokens: expected a count >= 1, got {new}"):
                    ask(QUESTION, new)  # type: ignore[arg-type]


def test_sessions_models_and_templates_that_do_not_do() -> None:
    model, tokenizer = model_of("llama"), tiny_tokenizer(chat=True)
    with attach(model) as session, pytest.raises(InvalidInput, match="attach with fuse='a3'"):
        Documents(session, tokenizer)
    other = copy.copy(tokenizer)
    other.chat_template = "{{ messages | length }}"
    with attach(model, fuse="a3") as session:
        with pytest.raises(InvalidInput, match="cannot hold documents"):
            Documents(session, other)
        other.chat_template = "{% for m in messages %}{{ m.content }}, again: {{ m.content }}{% endfor %}"
        with pytest.raises(InvalidInput, match="must contain the user's message once, unchanged"):
            Documents(session, other)
        other.chat_template = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
        Documents(session, other)
        Documents(session, other, system=" \n")
        with pytest.raises(InvalidInput, match="the chat template leaves the system prompt out or changes it"):
            Documents(session, other, system=SYSTEM)
        other.chat_template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        assert Documents(session, other, system=f"{SYSTEM}\n").head == Documents(session, other, system=SYSTEM).head
        other.chat_template = "{{ raise_exception('no system role') }}"
        with pytest.raises(ModelFileError, match=r"no system role.*leave the system prompt out"):
            Documents(session, other, system=SYSTEM)
        with pytest.raises(ModelFileError, match=r"no system role'?\); mend it or remove it"):
            Documents(session, other)
        model.train()
        try:
            with pytest.raises(InvalidInput, match="training mode"):
                Documents(session, tokenizer)
        finally:
            model.eval()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"system": None}, "system: expected text .*got None"),
        ({"system": b"x"}, "system: expected text"),
        ({"chunk_tokens": "a"}, "chunk tokens: expected a count >= 1, got 'a'"),
        ({"chunk_tokens": 0}, "chunk tokens: expected a count >= 1, got 0"),
        ({"chunk_tokens": 1.5}, "chunk tokens: expected a count >= 1, got 1.5"),
        ({"store": "folder"}, "store: expected a ChunkStore or None, got 'folder'; open it with"),
        ({"prefill_chunk": 1.5}, "prefill chunk: expected a count of tokens >= 1, got 1.5"),
        ({"prefill_chunk": 0}, "prefill chunk: expected a count of tokens >= 1, got 0"),
        ({"known": 3}, r"known: expected a Fingerprint or None, got 3; take one with fingerprint[(]model[)]"),
        ({"pool": 3}, "pool: expected a ChunkPool or None, got 3"),
    ],
)
def test_arguments_of_other_types(given: dict[str, Any], message: str) -> None:
    with attach(model_of("llama"), fuse=PIE()) as session, pytest.raises(InvalidInput, match=message):
        Documents(session, tiny_tokenizer(), **given)


def test_frames() -> None:
    assert frame(tiny_tokenizer(), "").head == () and not frame(tiny_tokenizer()).templated
    with pytest.raises(InvalidInput, match="the system prompt must be text"):
        frame(tiny_tokenizer(), "\udcff")
    assert longreach.Documents is Documents


def test_documents_share_a_pool(tmp_path: Path) -> None:
    """What one of them held another takes from memory, even if the store loses it."""
    pool, texts = ChunkPool(1 << 24, pinned=False), TEXTS
    answers = []
    with attach(model_of("llama"), fuse="pie") as session, ChunkStore(tmp_path) as store:
        for round in range(2):
            documents = Documents(session, tiny_tokenizer(), store=store, chunk_tokens=8, pool=pool)
            documents.read(texts)
            answers.append(asked(documents))
            states = {origin.state for origin in documents.origins}
            assert states == {"held"} if round else states <= {"computed", "held"} and "computed" in states
            assert documents.chunks[0][0] is pool.get(documents.chunks[0][0].key)
            store.gc(max_bytes=0)
    assert answers[0] == answers[1]
    assert documents.account is not None and documents.account.fusion.loaded_bytes == 0, "nothing is copied on a CPU"
    assert documents.account.fusion.waited_seconds is None, "and no wait was measured"
