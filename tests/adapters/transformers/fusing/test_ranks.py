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
OWN, OTHERS = ("pie", "a3", "cacheblend"), ("a3", "dependence")  # with each eviction; from the others' store
NEW = 6


def cases(family: str, own: bool) -> list[tuple[str, str]]:
    """(fusion, eviction) of what is asked of a store."""
    names = [name for name in FUSIONS if family == "llama" or name in OWN]
    if not own:
        return [(name, "") for name in names if name in OTHERS]
    return [(name, evicting) for evicting in EVICTIONS for name in names if not evicting or name in OWN]


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


def answers(rank: int, world: int, family: str, folder: str, own: str, others: str | None) -> dict[str, Any]:
    """The digest, and by store, fusion and eviction what was found. others: a store that others have filled."""
    model = model_in(folder, world)
    known = fingerprint(model)
    found: dict[str, Any] = {"digest": known.digest}
    for place in (own, others):
        if place is None:
            continue
        for name, evicting in cases(family, place == own):
            with (
                attach(model, fuse=FUSIONS[name], evict=EVICTIONS[evicting]) as session,
                ChunkStore(Path(place)) as store,
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
            where = "own" if place == own else "others"
            found[f"{where}/{name}{evicting}"] = Found(account.answer.tokens, account.fusion, states, batch)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("models")
    return {
        family: str(save_tiny(place / family, family, eos_token_id=None, num_hidden_layers=3)) for family in FAMILIES
    }


@pytest.fixture(scope="module", params=["llama", *(pytest.param(f, marks=pytest.mark.sweep) for f in FAMILIES[1:])])
def results(
    request: pytest.FixtureRequest, folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    """The family, and what one process found, which filled a store, and two ranks, which filled another. Each then
    used the other's."""
    family = request.param
    by_one, by_two = (str(tmp_path_factory.mktemp("stores") / name) for name in ("one", "two"))
    first = answers(0, 1, family, folders[family], by_one, None)
    two = run_on_ranks(f"{HERE}:answers", family, folders[family], by_two, by_one, seconds=400.0)
    return family, [first | answers(0, 1, family, folders[family], by_one, by_two), *two]


def test_two_ranks_give_one_processes_tokens(results: Any) -> None:
    family, (one, *two) = results
    for name, evicting in cases(family, True):
        want = one[f"own/{name}{evicting}"]
        others = [found[f"others/{name}"] for found in (one, *two) if not evicting and name in OTHERS]
        for got in (*(found[f"own/{name}{evicting}"] for found in two), *others):
            assert got.tokens == want.tokens == got.batch[1], (name, evicting)
            assert got.batch == want.batch
            mine, theirs = got.report, want.report
            assert (mine.exact, mine.recomputed, mine.reused) == (theirs.exact, theirs.recomputed, theirs.reused)
            for a, b in zip(mine.key_error + mine.value_error, theirs.key_error + theirs.value_error, strict=True):
                assert a == (b if b is None else pytest.approx(b, rel=1e-3))
    if family == "llama":
        assert len({tuple(one[f"own/{name}"].tokens) for name in FUSIONS}) >= 4, "else a wrong choice is not seen"


def test_chunks_are_stored_once_and_found_by_all(results: Any) -> None:
    family, (_, *two) = results
    (first, _), *rest = cases(family, True)
    for found in two:
        assert found[f"own/{first}"].states == {"computed"}
        assert all(found[f"own/{name}{evicting}"].states == {"stored"} for name, evicting in rest)
    for found in results[1]:
        assert all(found[f"others/{name}"].states == {"stored"} for name, _ in cases(family, False))


def test_the_fingerprint_is_the_whole_models(results: Any) -> None:
    one, *two = results[1]
    assert [found["digest"] for found in two] == [one["digest"]] * 2


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
