"""Fusion under tensor parallelism: two ranks give one process's tokens, find each other's chunks, and fail together.

Starting ranks takes longer than what they do here, so the ranks of the first family run all checks one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from longreach import A3, PIE, CacheBlend, ChunkStore, Dependence, Documents, FullReuse, SnapKV, attach
from longreach.adapters.transformers.fingerprint import fingerprint
from longreach.adapters.transformers.fusing.loading import Loading
from longreach.adapters.transformers.fusing.one_pass import FusedPass
from longreach.adapters.transformers.ranks import Ranks, in_pass, together
from longreach.errors import OtherRankFailed, StoreError, Unsupported
from longreach.methods.fusion import A3Deep
from longreach.methods.slots import Fusion
from longreach.ops import HeadShard
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
NEW = 5


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


class Launch(NamedTuple):
    """What one process found, and each of two ranks, by function."""

    one: dict[str, Any]
    two: list[dict[str, Any]]


def several(rank: int, world: int, calls: list[tuple[str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Results of functions of this module, called one after the other."""
    return {name: globals()[name](rank, world, *arguments) for name, arguments in calls}


@pytest.fixture(scope="module")
def launched(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launch]:
    """The family's answers by one process, which fills a store, and by two ranks, which fill another; each then uses
    the other's. The first family's ranks go on to what goes wrong."""

    def launch(family: str) -> Launch:
        if family not in known:
            place = tmp_path_factory.mktemp("stores")
            folder, by_one, by_two = folders[family], str(place / "one"), str(place / "two")
            first = answers(0, 1, family, folder, by_one, None)
            calls: list[tuple[str, tuple[Any, ...]]] = [("answers", (family, folder, by_two, by_one))]
            if family == FAMILIES[0]:
                calls += [(name, (folder, str(place / "own"))) for name in ("misses", "failures")] + [("blocks", ())]
            two = run_on_ranks(f"{HERE}:several", calls, seconds=400.0)
            known[family] = Launch(first | answers(0, 1, family, folder, by_one, by_two), two)
        return known[family]

    known = dict[str, Launch]()
    return launch


@pytest.fixture(scope="module", params=["llama", *(pytest.param(f, marks=pytest.mark.sweep) for f in FAMILIES[1:])])
def results(request: pytest.FixtureRequest, launched: Callable[[str], Launch]) -> tuple[str, list[dict[str, Any]]]:
    """The family, and what one process and two ranks answered."""
    one, two = launched(request.param)
    return request.param, [one, *(found["answers"] for found in two)]


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


@pytest.mark.parametrize(("size", "total"), [(2, 2), (2, 4), (4, 2), (4, 1)])
def test_errors_count_each_head_once_however_many_ranks_hold_it(size: int, total: int) -> None:
    """With fewer KV heads than ranks, several ranks hold the same one."""
    count = max(1, total // size)
    norms = torch.rand(total, 3, 4, generator=torch.Generator().manual_seed(1)) + 0.1  # of each head
    sums = list[torch.Tensor]()

    def summing(x: torch.Tensor) -> torch.Tensor:
        sums.append(x)
        return x

    for rank in range(size):
        first = rank * total // size
        facts = SimpleNamespace(shards={7: HeadShard(first, count, total)})
        some = SimpleNamespace(
            ranks=SimpleNamespace(size=size, sum=summing), session=SimpleNamespace(facts=facts), errors={7: None}
        )
        mine = norms[first : first + count].square().sum(0, keepdim=True).sqrt()  # [L, B, 4]
        FusedPass._of_all_heads(some, mine)  # type: ignore[arg-type]
    want = norms.square().sum(0).sqrt()
    torch.testing.assert_close(torch.stack(sums).sum(0)[0].sqrt(), want)


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
        with ChunkStore(Path(place) / f"exact {rank}") as leading:
            for _ in range(2):  # one rank's store has them after the first time
                lead = documents(session, leading)
                lead.read(TEXTS[:2], exact=True)
            documents(session, leading).read(TEXTS[1::-1])  # the same chunks behind the system prompt alone
            if rank:
                path = Path(place) / f"exact {rank}" / f"{lead.chunks[1][0].key.name}.safetensors"
                path.write_bytes(path.read_bytes()[:-9])
            again = documents(session, leading)
            again.read(TEXTS[:2])
            found["one exact chunk broken"] = [(origin.state, origin.exact) for origin in again.origins]
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
def missed(launched: Callable[[str], Launch]) -> list[dict[str, Any]]:
    return [found["misses"] for found in launched(FAMILIES[0]).two]


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
    broken = [[state for state, _ in found["one exact chunk broken"]] for found in (one, two)]
    assert all(exact for found in (one, two) for _, exact in found["one exact chunk broken"])
    assert [states.count("recomputed") for states in broken] == [0, 1] and broken[0].count("computed") == 1
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


# one rank fails


class Failed(NamedTuple):
    """An error of a rank: its class, text and notes; the documents, and columns of the cache, that it left."""

    kind: str
    text: str
    notes: str
    documents: int
    columns: int


class Case(NamedTuple):
    """What fails on one rank: (target, name) raises `error` in the place of what it does, or after it."""

    rank: int
    error: BaseException
    said: str  # to the other rank
    target: str
    name: str
    after: bool = False


READ = {  # while a document is added, of which there is one
    "a chunk is fetched": Case(1, RuntimeError("a torn page"), "RuntimeError: a torn page", "store", "load"),
    "between passes": Case(1, KeyboardInterrupt(), "KeyboardInterrupt", "progress", "done"),
    "a full disk": Case(0, OSError(28, "No space"), "OSError: [Errno 28] No space", "store", "put"),
    "keys": Case(1, MemoryError("keys"), "MemoryError: keys", "work", "keys"),
}
ASK = {  # while a question is asked
    "its prompt": Case(1, ValueError("none"), "ValueError: none", "documents", "prompt"),
    "room": Case(1, MemoryError("no room"), "OutOfMemory: memory ran out", "cache", "reserve"),
    "loading": Case(0, RuntimeError("no stream"), "RuntimeError: no stream", "Loading", "__init__"),
    "choosing": Case(1, KeyboardInterrupt(), "KeyboardInterrupt", "A3", "choose"),
    "chosen": Case(0, torch.OutOfMemoryError("no room"), "OutOfMemoryError: no room", "A3", "choose", after=True),
    "the report": Case(1, RuntimeError("bad\ncard, " + 2000 * "x"), "RuntimeError: bad\ncard", "pass", "reports"),
}


@contextmanager
def raising(case: Case, target: Any, here: bool) -> Iterator[None]:
    stored, left = getattr(target, case.name), [case.error] if here else []

    def failing(*args: Any, **kwargs: Any) -> Any:
        found = stored(*args, **kwargs) if case.after or not left else None
        if left:
            raise left.pop()
        return found

    with patch.object(target, case.name, failing):
        yield
    assert not left, f"{case.name} was not called"


def failures(rank: int, world: int, folder: str, place: str) -> dict[str, Any]:
    """By case what each rank raised, and answers in between."""
    model, found = model_in(folder, world), dict[str, Any]()
    with attach(model, fuse=A3(ratio=0.2)) as session, ChunkStore(Path(place) / "failures") as store:
        documents = Documents(
            session, tiny_tokenizer(), system=SYSTEM, store=store, chunk_tokens=16, prefill_chunk=5,
            known=fingerprint(model),
        )  # fmt: skip
        cache, progress = documents._reader.cache, Mock()
        targets = {
            "store": store, "progress": progress, "work": documents._work, "documents": documents, "cache": cache,
            "Loading": Loading, "A3": A3, "pass": FusedPass,
        }  # fmt: skip

        def answer() -> list[int]:
            list(documents.ask(QUESTION, NEW))
            assert documents.account is not None
            return documents.account.answer.tokens

        def failing(name: str, call: Callable[[], Any], case: Case) -> None:
            try:
                with raising(case, targets[case.target], rank == case.rank):
                    call()
            except BaseException as error:
                notes = " ".join(note for one in (error, error.__cause__) for note in getattr(one, "__notes__", ()))
                batches = [] if documents._batches is None else documents._batches[1]._caches.values()
                columns = sum(one.columns for one in (cache, *batches))
                found[name] = Failed(type(error).__name__, str(error), notes, len(documents.chunks), columns)

        documents.read(TEXTS[:1])
        found["first answer"] = answer()
        for name, case in READ.items():
            failing(name, lambda: documents.read(TEXTS[1:2], lambda done: progress.done(done)), case)
        found["answer after READ"] = answer()
        documents.read(TEXTS[1:2])
        found["second answer"] = answer()
        for name, case in ASK.items():
            failing(name, answer, case)
            if case.target != "cache":
                failing(f"{name}, of several", lambda: documents.ask_all(["Code?", QUESTION], NEW), case)
        found["answer after ASK"] = answer()
        documents.ask_all(["Code?", QUESTION], NEW)
        found["batch after ASK"] = documents.accounts[1].answer.tokens
        model.train(rank == 0)  # a choice that is one rank's alone
        for name, call in {"read": lambda: documents.read(TEXTS[2:]), "ask": answer}.items():
            try:
                call()
            except Exception as error:
                found[f"{name} in training mode"] = str(error)
    return found


def blocks(rank: int, world: int) -> dict[str, Any]:
    """What each rank raises in nested blocks, and within a pass, which the group's timeout ends."""
    ranks, found = Ranks(dist.group.WORLD, torch.device("cpu")), dict[str, Any]()  # type: ignore[arg-type]
    try:
        with together(ranks), together(ranks):
            found["values"], found["sum"] = ranks.all_values(rank - 5), ranks.sum(torch.tensor([1.5])).item()
            if rank:
                raise StoreError("öl" * 600)
            ranks.all_values(1)
            found["came too far"] = True
    except (StoreError, OtherRankFailed) as error:
        found["nested"] = type(error).__name__, str(error)
        with together(ranks), in_pass(ranks):  # an error is announced though another is being handled
            found["handled"] = [ranks.all_values(rank)]
        try:
            with together(ranks):
                assert rank == 0, "again"
        except (AssertionError, OtherRankFailed) as again:
            found["again"] = str(again)
    alone = Ranks(dist.new_group(timeout=timedelta(seconds=1)), torch.device("cpu"))  # type: ignore[arg-type]
    try:
        with together(alone), in_pass(alone):
            if rank:
                raise KeyboardInterrupt
            dist.all_reduce(torch.ones(1), group=alone.group)
    except BaseException as error:
        found["in a pass"] = type(error).__name__, " ".join(error.__notes__)
    return found


@pytest.fixture(scope="module")
def failed(launched: Callable[[str], Launch]) -> list[dict[str, Any]]:
    return [found["failures"] for found in launched(FAMILIES[0]).two]


@pytest.mark.parametrize("name", [*READ, *ASK, *(f"{name}, of several" for name in ASK if name != "room")])
def test_an_error_on_one_rank_is_raised_by_both(name: str, failed: list[dict[str, Any]]) -> None:
    case = (READ | ASK)[name.removesuffix(", of several")]
    mine, other = failed[case.rank][name], failed[1 - case.rank][name]
    assert mine.kind == case.said.partition(":")[0] or mine.kind == "OutOfMemory"
    assert f"rank {case.rank} of 2; the other ranks raise OtherRankFailed" in mine.notes
    assert other.kind == "OtherRankFailed" and not other.notes
    assert other.text.startswith(f"rank {case.rank} of 2 failed: {case.said}")
    assert mine.documents == other.documents == (1 if name in READ else 2)
    before = name in READ or case.target == "documents"  # before the cache is emptied for the prompt
    assert mine.columns == other.columns and bool(mine.columns) == before


def test_after_errors_answers_are_those_from_before(failed: list[dict[str, Any]]) -> None:
    one, two = failed
    for first, then in (("first answer", "answer after READ"), ("second answer", "answer after ASK")):
        assert one[first] == two[first] == one[then] == two[then]
    assert one["batch after ASK"] == two["batch after ASK"] == one["second answer"]
    for what in ("read", "ask"):
        said = [found[f"{what} in training mode"] for found in failed]
        assert said[0].startswith("the model is in training mode")
        assert said[1].startswith("rank 0 of 2 failed: InvalidInput: the model is in training mode")


def test_an_error_in_a_pass_is_left_to_the_groups_timeout(launched: Callable[[str], Launch]) -> None:
    waiting, alone = (found["blocks"]["in a pass"] for found in launched(FAMILIES[0]).two)
    assert alone[0] == "KeyboardInterrupt" and "The other ranks wait in it until" in alone[1]
    assert waiting[0] == "RuntimeError", "gloo's timeout"


def test_blocks_are_nested_and_repeated(launched: Callable[[str], Launch]) -> None:
    found = [found["blocks"] for found in launched(FAMILIES[0]).two]
    for rank, one in enumerate(found):
        assert one["values"] == [-5, -4] and one["sum"] == 3.0 and "came too far" not in one
        assert one["nested"][0] == ("OtherRankFailed", "StoreError")[rank] and one["handled"] == [[0, 1]]
        assert one["again"].startswith(("rank 1 of 2 failed: AssertionError: again", "again")[rank])
    assert "StoreError: " + "öl" * 300 in found[0]["nested"][1]
