"""Documents and their store: what is exact, what is lost or broken, what must not be used, and what Ctrl-C leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from longreach import A3, PIE, ChunkPool, ChunkStore, Dependence, Documents, attach
from longreach.adapters.transformers import Precompute
from longreach.adapters.transformers.documents import ChunkSources
from longreach.adapters.transformers.fusing import read
from longreach.adapters.transformers.prompt_reader import Reader
from longreach.errors import InvalidInput, StoreError, Unsupported
from longreach.store.local import LocalFolder
from longreach.testing.tiny import tiny_model, tiny_tokenizer
from tests.adapters.transformers.fusing.test_read import held, longrope
from tests.adapters.transformers.reference import model_of
from tests.adapters.transformers.test_documents import QUESTION, SYSTEM, TEXTS, asked, plain
from tests.tiers import families

FIRST, SECOND, THIRD = TEXTS


def documents(session: Any, store: ChunkStore | None = None, **more: Any) -> Documents:
    return Documents(session, tiny_tokenizer(), **{"system": SYSTEM, "store": store, "chunk_tokens": 16, **more})


def states(one: Documents) -> list[str]:
    return [origin.state for origin in one.origins]


# exact


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", families(2))
def test_a_prompt_of_exact_chunks_recomputes_nothing_and_is_a_plain_prefill(
    name: str, chat: bool, tmp_path: Path
) -> None:
    model, tokenizer = model_of(name), tiny_tokenizer(chat=chat)
    with ChunkStore(tmp_path) as store:
        with attach(model, fuse=PIE()) as session:
            Documents(session, tokenizer, system=SYSTEM, store=store, chunk_tokens=16).read(TEXTS, exact=True)
        for fusion in (PIE(), A3(ratio=0.5), Dependence(ratio=0.5)):
            with attach(model, fuse=fusion) as session:
                mine = Documents(session, tokenizer, system=SYSTEM, store=store, chunk_tokens=16)
                mine.read(TEXTS[:1])
                mine.read(TEXTS[1:])
                assert set(states(mine)) == {"stored"} and all(origin.exact for origin in mine.origins)
                prompt = mine.prompt(QUESTION)
                reader = Reader(session)
                logits, report = read(session, reader.cache, prompt)
                kept = held(reader, len(prompt.ids))
                assert (report.recomputed, report.reused) == (0, 0)
                assert report.exact == sum(origin.tokens for origin in mine.origins)
                asked(mine)
            assert mine.account is not None and mine.account.answer.tokens == plain(model, list(prompt.ids))
            with attach(model) as session:
                reader = Reader(session)
                torch.testing.assert_close(logits, reader.read(list(prompt.ids)), rtol=1e-4, atol=1e-4)
                for got, want in zip(kept, held(reader, len(prompt.ids)), strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_exact_chunks_go_before_others_and_only_where_they_are(tmp_path: Path) -> None:
    """A leading set of documents, then others; in another order nothing of it is found but what stands first."""
    with attach(model_of("llama"), fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        lead = documents(session, store)
        lead.read([FIRST, SECOND], exact=True)
        assert set(states(lead)) == {"computed"}
        mine = documents(session, store)
        mine.read([FIRST, SECOND, THIRD])
        assert [o.exact for o in mine.origins] == [o.document < 2 for o in mine.origins]
        assert states(mine) == ["stored" if o.document < 2 else "computed" for o in mine.origins]
        turned = documents(session, store)
        turned.read([SECOND, FIRST])
        assert [o.state for o in turned.origins if o.document == 0] == ["computed"] * 2
        begin = [o for o in turned.origins if o.document == 1]
        assert [o.state for o in begin] == ["stored"] + ["computed"] * (len(begin) - 1), "its first chunk is as alone"
        assert not any(o.exact for o in begin) and asked(turned) and asked(mine)
        for one, exact in ((mine, lead.origins), (turned, turned.origins[:2])):
            report = one.account.fusion if one.account else None
            assert report is not None and report.exact >= sum(o.tokens for o in exact if o.exact)


def test_what_is_exact_must_fit_the_context() -> None:
    model = tiny_model("llama", max_position_embeddings=120)
    with attach(model, fuse=PIE()) as session:
        mine = documents(session)
        told = list[int]()
        with pytest.raises(InvalidInput, match="is longer than the model's context of 120 tokens"):
            mine.read([FIRST, FIRST, FIRST], told.append, exact=True)
        assert told == [] and mine.chunks == [], "refused before anything is computed"


# dependence on the way


def test_chunks_get_their_dependence_on_the_way(tmp_path: Path) -> None:
    with attach(model_of("llama"), fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        documents(session, store).read([FIRST, SECOND])
    with attach(model_of("llama"), fuse=Dependence(ratio=0.2)) as session, ChunkStore(tmp_path) as store:
        for measured in (True, False):
            mine, told = documents(session, store), list[int]()
            mine.read([FIRST, SECOND], told.append)
            assert set(states(mine)) == {"stored"}
            # the first chunk is exact, so that its numbers are not needed
            assert [o.dependence_computed for o in mine.origins] == [False] + [measured] * (len(mine.origins) - 1)
            assert sum(told) == mine.count([FIRST, SECOND]) == 2 * sum(o.tokens for o in mine.origins)
            assert asked(mine) and mine.account is not None
            fusion = mine.account.fusion
            assert fusion.recomputed == min(round(0.2 * fusion.tokens), fusion.tokens - fusion.exact - fusion.computed)


def test_a_document_alone_needs_no_dependence_until_it_stands_elsewhere(tmp_path: Path) -> None:
    with attach(model_of("llama"), fuse=Dependence()) as session, ChunkStore(tmp_path) as store:
        alone = documents(session, store, chunk_tokens=512)
        alone.read([FIRST])
        assert not alone.origins[0].dependence_computed and asked(alone)
        alone.read([SECOND])
        assert alone.origins[1].dependence_computed and asked(alone)
        turned = documents(session, store, chunk_tokens=512)
        turned.read([SECOND, FIRST])
        assert states(turned) == ["stored"] * 2 and [o.dependence_computed for o in turned.origins] == [False, True]
        assert asked(turned)


@pytest.mark.parametrize("fusion", [PIE(), Dependence(ratio=0.3)], ids=repr)
def test_a_document_given_twice_is_stored_once_and_placed_twice(fusion: Any, tmp_path: Path) -> None:
    with attach(model_of("llama"), fuse=fusion) as session, ChunkStore(tmp_path) as store:
        twice = documents(session, store, chunk_tokens=512)
        twice.read([SECOND, SECOND])
        assert len(store.entries()) == 1 and [start for start, _ in twice.prompt(QUESTION).chunks] == [29, 51]
        assert asked(twice) and twice.account is not None and twice.account.fusion.exact == 20
        without = documents(session, None, chunk_tokens=512)
        without.read([SECOND, SECOND])
        assert asked(without) == asked(twice)


def test_what_stands_first_has_dependence_where_long_prompts_make_it_inexact() -> None:
    """longrope: nothing is exact in a prompt that is rotated by other frequencies than its chunks."""
    with attach(longrope(), fuse=Dependence(ratio=1.0)) as session:
        mine = documents(session)
        mine.read(TEXTS)
        assert all(origin.dependence_computed for origin in mine.origins)
        asked(mine)
        assert mine.account is not None and mine.account.fusion.exact == mine.account.fusion.reused == 0


# lost and broken chunks


@pytest.mark.parametrize("max_bytes", [None, 1, 20_000])  # of the pool: none, smaller than a chunk, than all chunks
@pytest.mark.parametrize("how", ["removed", "truncated", "changed"])
def test_what_becomes_of_files_after_they_were_read_does_not_matter(
    how: str, max_bytes: int | None, tmp_path: Path
) -> None:
    pool = None if max_bytes is None else ChunkPool(max_bytes, pinned=False)
    with attach(model_of("llama"), fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        documents(session, store).read(TEXTS)
        mine = documents(session, store, pool=pool)
        mine.read(TEXTS)
        assert max_bytes is None or len(pool or ()) < len(mine.origins), "some chunks have left the pool"
        want = asked(mine)
        for path in tmp_path.glob("*.safetensors"):
            if how == "removed":
                path.unlink()
            elif how == "truncated":
                os.truncate(path, 100)
            else:
                path.write_bytes(b"\xff" * path.stat().st_size)
        assert set(states(mine)) == {"stored"} and asked(mine) == want


def test_a_disk_that_fails_to_read_a_chunk_is_told_and_the_chunk_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longreach.store import local

    load, calls = local._load, list[int]()

    def failing(fd: int, size: int) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return load(fd, size)

    with attach(model_of("llama"), fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        first = documents(session, store)
        first.read(TEXTS)
        monkeypatch.setattr(local, "_load", failing)
        mine = documents(session, store)
        with pytest.warns(UserWarning, match="the disk fails to read it"):
            mine.read(TEXTS)
        assert states(mine).count("recomputed") == 1 and asked(mine) == asked(first)


# models that are not the chunks'


@pytest.mark.parametrize("other", ["another model", "another dtype"])
def test_a_store_of_another_model_or_dtype_is_a_miss(other: str, tmp_path: Path) -> None:
    theirs = tiny_model("llama", seed=7) if other == "another model" else tiny_model("llama").bfloat16()
    with ChunkStore(tmp_path) as store:
        with attach(theirs, fuse=PIE()) as session:
            documents(session, store).read(TEXTS)
        count = len(store.entries())
        with attach(model_of("llama"), fuse=PIE()) as session:
            mine = documents(session, store)
            mine.read(TEXTS)
            assert set(states(mine)) == {"computed"} and len(store.entries()) == 2 * count and asked(mine)


def test_weights_changed_after_precompute_are_refused_until_documents_are_made_anew(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with attach(model, fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        mine = documents(session, store)
        mine.read([FIRST])
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        for call in (lambda: mine.ask(QUESTION), lambda: mine.read([SECOND])):
            with pytest.raises(Unsupported, match="have changed since"):
                call()
        assert len(mine.chunks) == 1
        anew = documents(session, store)
        anew.read([FIRST])
        assert set(states(anew)) == {"computed"} and asked(anew)


def test_a_model_in_training_mode_reads_and_answers_nothing() -> None:
    model = tiny_model("llama")
    with attach(model, fuse=PIE()) as session:
        mine = documents(session)
        mine.read([FIRST])
        model.model.layers[1].train()
        for call in (lambda: mine.ask(QUESTION), lambda: mine.read([SECOND]), lambda: documents(session)):
            with pytest.raises(InvalidInput, match=r"call model\.eval\(\)"):
                call()
        model.eval()
        assert asked(mine)


# lengths and contents


def test_documents_longer_than_the_context() -> None:
    model = tiny_model("llama", max_position_embeddings=100)
    with attach(model, fuse=PIE()) as session:
        mine, told = documents(session), list[int]()
        with pytest.raises(InvalidInput, match=r"is longer than the model's context of 100 tokens.*--chunk-tokens"):
            documents(session, chunk_tokens=90).read([FIRST, "long " * 30], told.append)
        assert told == []
        too_long = r"the model's context is 100 tokens; shorten the documents by {} tokens"
        room = 100 - len(mine.head)
        with pytest.raises(InvalidInput, match=too_long.format(5)):
            mine.read(["x" * (room + 4)], told.append)
        with pytest.raises(InvalidInput, match=too_long.format(20)):
            mine.read(["x" * (room - 10)], told.append, reserve=30)
        mine.read(["x" * (room - 11)])
        with pytest.raises(InvalidInput, match=too_long.format(12)):
            mine.read(["y" * 20], told.append)  # with the separator
        assert told == [] and len(mine.chunks) == 1, "refused before anything is computed"
        with pytest.raises(InvalidInput, match=too_long.format(r"\d+")):
            mine.ask("?", 5)
        mine.clear()
        with pytest.raises(InvalidInput, match="no documents were read"):
            mine.ask("?", 5)
        mine.read(["Short."])
        assert (mine.chunks[0][0].tokens.numel(), len(mine.origins)) == (6, 1) and asked(mine, "?", 5)
        with pytest.raises(
            InvalidInput, match=r"prefix of 124 is longer than the model's context of 100 tokens; shorten the system"
        ):
            documents(session, system="x" * 121).read([FIRST])


def test_texts_of_any_characters_are_texts() -> None:
    odd = "\x00\x01\x7f\ufeff\u200b\r\n\t" + "\U0001f9c0" * 9 + "</s>"
    with attach(model_of("llama"), fuse=PIE()) as session:
        mine = documents(session)
        mine.read([odd])
        assert tiny_tokenizer().decode([t for _, c in mine.prompt(QUESTION).chunks for t in c.tokens.tolist()]) == odd
        assert asked(mine) is not None


# Ctrl-C


def interrupting(method: Any, at: int) -> Any:
    calls = list[int]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return method(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("where", "name", "left"),
    [(Precompute, "_forward", None), (Precompute, "_require_sample", None), (LocalFolder, "write", None),
     (LocalFolder, "load", None), (os, "rename", None)],
    ids=["a pass", "a computed chunk", "a put", "a load", "a rename"],
)  # fmt: skip
def test_ctrl_c_while_documents_are_read(
    where: Any, name: str, left: None, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No document is added, nothing half-done is in the store, and what was read before is still there."""
    with attach(model_of("llama"), fuse=Dependence(ratio=0.2)) as session, ChunkStore(tmp_path) as store:
        mine = documents(session, store)
        mine.read([SECOND])
        want, origins = asked(mine), list(mine.origins)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupting(getattr(where, name), at))
            with pytest.raises(KeyboardInterrupt):
                mine.read([FIRST, THIRD])
        assert mine.origins == origins and len(mine.chunks) == 1 and asked(mine) == want
        assert store.verify_all().broken == () and not list((tmp_path / "writing").iterdir())
        mine.read([FIRST, THIRD])
        fresh = documents(session)
        fresh.read([SECOND])
        fresh.read([FIRST, THIRD])
        assert asked(mine) == asked(fresh)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("fusion", [PIE(), A3(ratio=0.2)], ids=repr)
def test_ctrl_c_while_a_question_is_asked(fusion: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(model_of("llama"), fuse=fusion) as session:
        mine = documents(session)
        mine.read(TEXTS)
        want = asked(mine)
        with monkeypatch.context() as patch:
            patch.setattr(LlamaMLP, "forward", interrupting(LlamaMLP.forward, at))
            with pytest.raises(KeyboardInterrupt):
                asked(mine)
        assert mine.account is None and mine._reader.cache.columns == 0 and asked(mine) == want
        answer = mine.ask(QUESTION, 12)
        next(answer)
        with pytest.raises(KeyboardInterrupt):
            answer.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
        assert mine.account is None and asked(mine) == want


# accounts


def test_the_account_has_where_chunks_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(model_of("llama"), fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        first = documents(session, store)
        first.read([FIRST, FIRST])
        count = len(first.origins) // 2

        def sources(one: Documents) -> Any:
            asked(one)
            assert one.account is not None
            one.ask_all([QUESTION], 2)
            assert one.accounts[0].chunks == one.account.chunks
            return one.account.chunks

        assert sources(first) == ChunkSources(0, count, count, 0, (), None), "an empty store has nothing else"
        path = sorted(tmp_path.rglob("*.safetensors"))[0]
        path.write_bytes(path.read_bytes()[:-9])
        broken = documents(session, store, pool=ChunkPool(pinned=False))
        with pytest.warns(UserWarning, match="is not used"):
            broken.read([FIRST, FIRST])
        assert sources(broken) == ChunkSources(count, count - 1, 0, 1, (), None)
        monkeypatch.setattr(store, "load", interrupting_with(StoreError("the disk is gone")))
        lost = documents(session, store)
        lost.read([FIRST])
        assert sources(lost) == ChunkSources(0, 0, count, 0, ("the disk is gone",), None)


def interrupting_with(error: Exception) -> Any:
    def fails(*args: Any) -> Any:
        raise error

    return fails


def test_the_account_says_of_what_a_store_is_that_had_none(tmp_path: Path) -> None:
    ways: list[tuple[Any, dict[str, Any], str]] = [
        (tiny_model("llama", seed=5), {}, "of another model, or of other weights"),
        (tiny_model("llama").bfloat16(), {}, r"of another dtype (float32)"),
        (tiny_model("llama"), {"system": "Be brief."}, "behind another system prompt or other documents"),
        (tiny_model("llama"), {"chunk_tokens": 7}, "of other documents, or cut otherwise"),
    ]
    for number, (model, more, why) in enumerate(ways):
        with ChunkStore(tmp_path / str(number)) as store:
            with attach(tiny_model("llama"), fuse=PIE()) as session:
                documents(session, store).read([FIRST])
            with attach(model, fuse=PIE()) as session:
                for absent in (True, False):
                    mine = documents(session, store, **more)
                    mine.read([FIRST, FIRST])
                    asked(mine)
                    assert mine.account is not None
                    said = mine.account.chunks.absent
                    assert said is None if not absent else f"chunks 5 {why}." in str(said)
                mine.clear()
                assert mine.absent is None


@pytest.mark.parametrize("held", [False, True])
def test_a_broken_exact_chunk_is_computed_again_and_stays_exact(held: bool, tmp_path: Path) -> None:
    """Also where the store, or the pool, has the chunk behind the system prompt alone."""
    with attach(model_of("llama"), fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        pool = ChunkPool(pinned=False)
        documents(session, store, pool=pool if held else None).read([FIRST, SECOND])  # the second is not exact
        others = {entry.name for entry in store.entries()}
        lead = documents(session, store)
        lead.read([FIRST, SECOND], exact=True)
        (exact, *_) = [e.name for e in store.entries() if e.name not in others]
        number = [chunk.key.name for each in lead.chunks for chunk in each].index(exact)
        path = tmp_path / f"{exact}.safetensors"
        path.write_bytes(path.read_bytes()[:-9])

        again = documents(session, store, pool=pool if held else None)
        with pytest.warns(UserWarning, match="is not used"):
            again.read([FIRST, SECOND])
        assert [n for n, state in enumerate(states(again)) if state == "recomputed"] == [number]
        assert all(origin.exact for origin in again.origins) and path.exists()
        answer = asked(again)
        assert again.account is not None and again.account.chunks.recomputed == 1
        assert again.account.fusion.reused == 0 and answer == asked(lead)

        path.unlink()  # no file: the chunk behind the system prompt is used
        missed = documents(session, store)
        missed.read([FIRST, SECOND])
        assert set(states(missed)) == {"stored"}
        assert [n for n, origin in enumerate(missed.origins) if not origin.exact] == [number]


def test_a_chunk_that_the_pool_holds_is_stored_too(tmp_path: Path) -> None:
    pool = ChunkPool(pinned=False)
    with attach(model_of("llama"), fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        documents(session, pool=pool).read(TEXTS)
        mine = documents(session, store, pool=pool)
        mine.read(TEXTS)
        assert set(states(mine)) == {"held"} and len(store.entries()) == len(mine.origins)
        written = store.report()["bytes_written"]
        documents(session, store, pool=pool).read(TEXTS)
        assert store.report()["bytes_written"] == written


# weights and sessions


@pytest.mark.parametrize("call", ["read", "ask", "ask_all"])
def test_weights_changed_behind_torchs_back_are_refused(call: str, tmp_path: Path) -> None:
    """As a merge of an adapter does."""
    model = tiny_model("llama")
    with attach(model, fuse=PIE()) as session, ChunkStore(tmp_path) as store:
        mine = documents(session, store)
        mine.read([FIRST])
        want = asked(mine)
        weight = model.model.layers[0].self_attn.k_proj.weight
        old = weight.detach().clone()
        weight.data.mul_(3)
        calls = {"read": lambda: mine.read([FIRST]), "ask": lambda: mine.ask(QUESTION),
                 "ask_all": lambda: mine.ask_all([QUESTION])}  # fmt: skip
        with pytest.raises(Unsupported, match=r"the model's weights .* have changed since"):
            calls[call]()
        weight.data.copy_(old)
        assert asked(mine) == want and len(mine.chunks) == 1


def test_a_closed_session_is_named() -> None:
    with attach(model_of("llama"), fuse=PIE()) as session:
        mine = documents(session)
        mine.read([FIRST])
    for call in (lambda: mine.ask(QUESTION), lambda: mine.ask_all([QUESTION]), lambda: mine.read([FIRST])):
        with pytest.raises(InvalidInput, match="the session is closed; attach to the model again"):
            call()
    with pytest.raises(InvalidInput, match="the session is closed"):
        read(session, session.new_cache(1), mine.prompt(QUESTION))
