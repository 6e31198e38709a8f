"""Fusion under tensor parallelism: two ranks give one process's tokens, and find each other's chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from longreach import A3, PIE, CacheBlend, ChunkStore, Dependence, Documents, FullReuse, SnapKV, attach
from longreach.adapters.transformers.fingerprint import fingerprint
from longreach.errors import StoreError, Unsupported
from longreach.methods.fusion import A3Deep
from longreach.methods.slots import Fusion
from longreach.testing.ranks import run_on_ranks
from longreach.testing.tiny import save_tiny, tiny_tokenizer

HERE = "tests.adapters.transformers.fusing.test_ranks"
FAMILIES = ("llama", "qwen3_moe", "phi3")  # one weight for gate and up of experts; every rank has all heads
SYSTEM, QUESTION = "Answer from the documents.", "When do boats leave?"
TEXTS = ["The archive opens at nine. Its code is 4711.\n\nAsk at the desk.", "Boats leave at noon.", "Öl und Käse. 🧀"]
FUSIONS: dict[str, Fusion] = {
    "pie": PIE(), "full_reuse": FullReuse(), "a3": A3(ratio=0.2), "a3 joint": A3(ratio=0.2, heads="joint"),
    "cacheblend": CacheBlend(ratio=0.2), "a3_deep": A3Deep(ratio=0.2), "dependence": Dependence(ratio=0.2),
}  # fmt: skip
EVICTIONS = {"": None, " snapkv": SnapKV(capacity=90)}
CASES = {family: tuple(FUSIONS) if family == "llama" else ("pie", "a3", "cacheblend") for family in FAMILIES}
NEW = 10


class Found(NamedTuple):
    """tokens and report of an answer, where its chunks came from, and the tokens of answers of a batch."""

    tokens: list[int]
    report: Any
    states: set[str]
    batch: list[list[int]]


def model_in(folder: str, world: int, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = {"distributed_config": DistributedConfig(tp_plan="auto")} if world > 1 else {}
    options = {"dtype": torch.float32, **options, **plan}
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def answers(rank: int, world: int, folders: dict[str, str], stores: list[str]) -> dict[str, Any]:
    """By family: the digest, and by store, fusion and eviction what was found."""
    found: dict[str, Any] = {}
    for family, folder in folders.items():
        model = model_in(folder, world)
        known = fingerprint(model)
        found[family] = known.digest
        for place in stores:
            for name in CASES[family]:
                for evicting, evict in EVICTIONS.items():
                    with (
                        attach(model, fuse=FUSIONS[name], evict=evict) as session,
                        ChunkStore(Path(place) / family) as store,
                    ):
                        documents = Documents(
                            session, tiny_tokenizer(), system=SYSTEM, store=store, chunk_tokens=16, known=known
                        )
                        documents.read(TEXTS)
                        list(documents.ask(QUESTION, NEW))
                        account = documents.account
                        documents.ask_all(["Code?", QUESTION], NEW)
                        batch = [one.answer.tokens for one in documents.accounts]
                    assert account is not None
                    states = {origin.state for origin in documents.origins}
                    here = family, Path(place).name, name + evicting
                    found["/".join(here)] = Found(account.answer.tokens, account.fusion, states, batch)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("models")
    return {
        family: str(save_tiny(place / family, family, eos_token_id=None, num_hidden_layers=3)) for family in FAMILIES
    }


@pytest.fixture(scope="module")
def results(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """One process fills a store, two ranks fill another; each then uses the other's."""
    by_one, by_two = (str(tmp_path_factory.mktemp("stores") / name) for name in ("by one", "by two"))
    one = answers(0, 1, folders, [by_one])
    two = run_on_ranks(f"{HERE}:answers", folders, [by_two, by_one], seconds=400.0)
    return one | answers(0, 1, folders, [by_two]), two


@pytest.mark.parametrize(("family", "fusion"), [(family, name) for family in FAMILIES for name in CASES[family]])
def test_two_ranks_give_one_processes_tokens(family: str, fusion: str, results: Any) -> None:
    one, two = results
    for evicting in EVICTIONS:
        want = one[f"{family}/by one/{fusion}{evicting}"]
        for place in ("by one", "by two"):
            for found in (one, *two):
                got = found[f"{family}/{place}/{fusion}{evicting}"]
                assert got.tokens == want.tokens == got.batch[1], (place, evicting)
                assert got.batch == want.batch
                mine, theirs = got.report, want.report
                assert (mine.exact, mine.recomputed, mine.reused) == (theirs.exact, theirs.recomputed, theirs.reused)
                for a, b in zip(mine.key_error + mine.value_error, theirs.key_error + theirs.value_error, strict=True):
                    assert a == (b if b is None else pytest.approx(b, rel=1e-3))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_are_stored_once_and_found_by_all(family: str, results: Any) -> None:
    one, two = results
    first, *others = (name + evicting for name in CASES[family] for evicting in EVICTIONS)
    assert one[f"{family}/by one/{first}"].states == {"computed"}
    assert all(found[f"{family}/by two/{first}"].states == {"computed"} for found in two)
    for name in others:
        assert one[f"{family}/by one/{name}"].states == one[f"{family}/by two/{name}"].states == {"stored"}
        for found in two:
            assert found[f"{family}/by one/{name}"].states == found[f"{family}/by two/{name}"].states == {"stored"}


def test_answers_differ_enough_to_see_a_wrong_choice(results: Any) -> None:
    found = {tuple(results[0][f"llama/by one/{name}"].tokens) for name in FUSIONS}
    assert len(found) >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fingerprint_is_the_whole_models(family: str, results: Any) -> None:
    one, two = results
    assert [found[family] for found in two] == [one[family]] * 2


# one rank alone


def read_by(documents: Documents) -> tuple[list[int], list[tuple[str, bool]]]:
    documents.read(TEXTS[:2])
    list(documents.ask(QUESTION, NEW))
    assert documents.account is not None
    return documents.account.answer.tokens, [(origin.state, origin.error is None) for origin in documents.origins]


def misses(rank: int, world: int, folder: str, place: str) -> dict[str, Any]:
    """What ranks find where the store of rank 1 lacks a chunk, fails, or is none; and when a weight of its changes."""
    model = model_in(folder, world)
    known, found = fingerprint(model), dict[str, Any]()
    own = Path(place) / str(rank)  # a folder that the other rank does not see

    def documents(session: Any, store: ChunkStore | None) -> Documents:
        return Documents(session, tiny_tokenizer(), system=SYSTEM, store=store, chunk_tokens=16, known=known)

    with attach(model, fuse=A3(ratio=0.2)) as session, ChunkStore(own) as store:
        for name in ("own, at first", "own, again", "own, then"):
            found[name] = read_by(documents(session, store))
        keys = documents_keys(session, known)
        if rank:
            store.remove(keys[0])
        found["one lacks a chunk"] = read_by(documents(session, store))
        found["no store on one"] = read_by(documents(session, None if rank else store))
        if rank:
            store.load = fails  # type: ignore[assignment,method-assign]
        found["one fails"] = read_by(documents(session, store))
        again = documents(session, None)
        again.read(TEXTS[:1])
        down = model.model.layers[0].mlp.down_proj.weight
        found["holds"] = known.holds(model), known.sampled_alike(model)
        with torch.no_grad():
            if rank:
                down.to_local().mul_(2.0)
        found["holds then"] = known.holds(model), known.sampled_alike(model)
        for what, call in {"read": lambda: again.read(TEXTS[1:2]), "ask": lambda: again.ask(QUESTION)}.items():
            try:
                call()
            except Unsupported as error:
                found[what] = str(error)
        found["digest then"] = fingerprint(model).digest
        with torch.no_grad():
            if rank:
                model.model.norm.weight.mul_(2.0)  # which every rank holds whole
        try:
            fingerprint(model)
        except Unsupported as error:
            found["ranks differ"] = str(error)
    return found


def documents_keys(session: Any, known: Any) -> Any:
    """Keys of the chunks of the second text."""
    documents = Documents(session, tiny_tokenizer(), system=SYSTEM, chunk_tokens=16, known=known)
    documents.read(TEXTS[:2])
    return [chunk.key for chunk in documents.chunks[1]]


def fails(*args: Any) -> Any:
    raise StoreError("the disk is gone")


@pytest.fixture(scope="module")
def missed(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(f"{HERE}:misses", folders["llama"], str(tmp_path_factory.mktemp("own")), seconds=200.0)


def test_what_one_rank_lacks_all_compute(missed: list[dict[str, Any]]) -> None:
    one, two = missed
    tokens = one["own, at first"][0]
    for name in ("own, at first", "own, again", "own, then", "one lacks a chunk", "no store on one", "one fails"):
        assert one[name][0] == two[name][0] == tokens
    states = {name: [{state for state, _ in found[name][1]} for found in (one, two)] for name in one if "," in name}
    assert states["own, at first"] == states["own, again"] == [{"computed"}] * 2, "each puts what it is first to lack"
    assert states["own, then"] == [{"stored"}] * 2
    lacking = [[state for state, _ in found["one lacks a chunk"][1]] for found in (one, two)]
    assert lacking[0] == lacking[1] and lacking[0].count("computed") == 1
    assert {state for found in (one, two) for state, _ in found["no store on one"][1]} == {"computed"}
    assert {state for found in (one, two) for state, _ in found["one fails"][1]} == {"computed"}
    assert [{sound for _, sound in found["one fails"][1]} for found in (one, two)] == [{True}, {False}]


def test_changed_weights_on_one_rank_are_refused_on_all(missed: list[dict[str, Any]]) -> None:
    found = missed
    assert [f["holds"] for f in found] == [(True, True)] * 2
    assert [f["holds then"] for f in found] == [(True, True), (False, False)], "each looks at its own shards"
    for one in found:
        assert "have changed since" in one["read"] and "have changed since" in one["ask"]
        assert "2 ranks of this LlamaModel hold different weights" in one["ranks differ"]
    assert found[0]["digest then"] == found[1]["digest then"]
