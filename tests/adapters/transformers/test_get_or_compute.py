"""A chunk is right wherever it came from, and a store that fails is told of and not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longreach import attach
from longreach.adapters.transformers import Precompute, get_or_compute
from longreach.errors import InvalidInput, StoreError, Unsupported
from longreach.store import ChunkStore
from longreach.store.local import LocalFolder
from longreach.testing.tiny import random_tokens, tiny_model
from tests.adapters.transformers.reference import model_of

TOKENS = [int(t) for t in random_tokens(1, 40, seed=8)[0]]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


def test_computed_then_stored_then_recomputed(tmp_path: Path) -> None:
    with attach(model_of("gemma2")) as session, ChunkStore(tmp_path / "s") as store:
        work, told = Precompute(session, [257], chunk=16), list[int]()
        first = get_or_compute(work, store, TOKENS, told.append)
        assert (first.state, first.error) == ("computed", None) and told == [16, 16, 8]
        second = get_or_compute(work, store, TOKENS, told.append)
        assert second.state == "stored" and told[3:] == [40] and same(first.chunk, second.chunk)
        (file,) = (tmp_path / "s").glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.warns(UserWarning, match="set aside"):
            third = get_or_compute(work, store, TOKENS)
        assert third.state == "recomputed" and same(first.chunk, third.chunk)
        assert get_or_compute(work, store, TOKENS).state == "stored"


def test_without_a_store() -> None:
    with attach(model_of("llama")) as session:
        got = get_or_compute(Precompute(session), None, TOKENS)
        assert (got.state, got.error) == ("computed", None)
        with pytest.raises(InvalidInput, match="no tokens"):
            get_or_compute(Precompute(session), None, [])


@pytest.mark.parametrize("method", ["read", "write"])
def test_a_store_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The chunk is handed out; why it is not stored comes with it."""

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    with attach(model_of("llama")) as session, ChunkStore(tmp_path / "s") as store:
        work = Precompute(session)
        want = work.compute(TOKENS)
        monkeypatch.setattr(LocalFolder, method, fail)
        got = get_or_compute(work, store, TOKENS)
    assert isinstance(got.error, StoreError) and "Input/output error" in str(got.error) and same(got.chunk, want)
    assert list((tmp_path / "s").glob("*.safetensors")) == []


def _written_to(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1


@pytest.mark.parametrize("change", [_written_to, lambda m: m.bfloat16().float()], ids=["written to", "cast and back"])
def test_a_stored_chunk_is_not_that_of_weights_that_changed(tmp_path: Path, change: Any) -> None:
    model = tiny_model("llama")
    with attach(model) as session, ChunkStore(tmp_path / "s") as store:
        work = Precompute(session)
        assert get_or_compute(work, store, TOKENS).state == "computed"
        change(model)
        with pytest.raises(Unsupported, match="have changed since"):
            get_or_compute(work, store, TOKENS)
        with pytest.raises(Unsupported, match="have changed since"):
            work.key(TOKENS)
        anew = get_or_compute(Precompute(session), store, TOKENS)
    assert anew.state == "computed" and len(list((tmp_path / "s").glob("*.safetensors"))) == 2


def test_a_model_in_training_mode_fills_no_store(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_dropout=0.5)
    with attach(model) as session, ChunkStore(tmp_path / "s") as store:
        work = Precompute(session)
        for part in (model, model.model.layers[1].self_attn):
            part.train()
            for call in (
                lambda: get_or_compute(work, store, TOKENS),
                lambda: get_or_compute(work, None, TOKENS),
                lambda: work.key(TOKENS),
            ):
                with pytest.raises(InvalidInput, match=r"call model\.eval\(\)"):
                    call()
            with pytest.raises(InvalidInput, match=r"call model\.eval\(\)"):
                Precompute(session)
            model.eval()
        assert store.entries() == [] and get_or_compute(work, store, TOKENS).state == "computed"


def test_what_is_written_behind_torchs_back_is_not_stored(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with attach(model) as session, ChunkStore(tmp_path / "s") as store:
        work = Precompute(session)
        model.model.layers[1].mlp.up_proj.weight.data.mul_(1.001)
        with pytest.raises(Unsupported, match="have changed since"):
            get_or_compute(work, store, TOKENS)
        assert store.entries() == []


def test_what_others_find_broken_meanwhile_is_not_this_chunks_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(model_of("llama")) as session, ChunkStore(tmp_path / "s") as store:
        work, read = Precompute(session), LocalFolder.read

        def meanwhile(self: LocalFolder, name: str) -> Any:
            store._counts.broken("data changed", True)
            return read(self, name)

        monkeypatch.setattr(LocalFolder, "read", meanwhile)
        assert get_or_compute(work, store, TOKENS).state == "computed"


def test_a_prefix_that_refused_weights_made_makes_no_later_chunk(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with attach(model) as session, ChunkStore(tmp_path / "s") as store:
        want = Precompute(session, [257, 3, 5]).compute(TOKENS)
        for warm in (False, True):
            work = Precompute(session, [257, 3, 5])
            if warm:
                work.compute(TOKENS[:5])
            weight = model.model.layers[0].self_attn.v_proj.weight.data
            kept = weight.clone()
            weight.mul_(3)
            with pytest.raises(Unsupported, match="have changed since"):
                get_or_compute(work, store, TOKENS)
            weight.copy_(kept)
            assert same(work.compute(TOKENS), want)
        got = get_or_compute(work, store, TOKENS)
        assert got.state == "computed" and same(got.chunk, want)


def test_a_configuration_changed_since_has_no_key(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=None)
    with attach(model) as session, ChunkStore(tmp_path / "s") as store:
        work = Precompute(session)
        want = work.compute(TOKENS)
        model.config.sliding_window = 4
        for call in (
            lambda: get_or_compute(work, store, TOKENS),
            lambda: work.key(TOKENS),
            lambda: work.compute(TOKENS),
        ):
            with pytest.raises(Unsupported, match=r"configuration .* have changed since"):
                call()
        assert Precompute(session).key(TOKENS) != want.key and store.entries() == []
        model.config.sliding_window = None
        assert same(get_or_compute(work, store, TOKENS).chunk, want)


def test_tokens_may_come_as_any_integers(tmp_path: Path) -> None:
    """What is no token ids at all is refused before anything is computed."""
    with attach(model_of("llama")) as session, ChunkStore(tmp_path / "s") as store:
        work = Precompute(session, torch.tensor([257, 3]))
        want = work.compute(TOKENS)
        for tokens in (torch.tensor(TOKENS), np.array(TOKENS), tuple(TOKENS)):
            assert same(work.compute(tokens), want) and same(get_or_compute(work, store, tokens).chunk, want)
        assert len(store.entries()) == 1
        wrong: tuple[Any, ...] = (None, 5, "12", [1.5], [True], torch.zeros(3), torch.zeros(2, 2, dtype=torch.long))
        for tokens in wrong:
            for call in (work.check, work.key, work.compute, lambda given: get_or_compute(work, None, given)):
                with pytest.raises(InvalidInput, match="token ids"):
                    call(tokens)
            with pytest.raises(InvalidInput, match="token ids"):
                Precompute(session, tokens)
