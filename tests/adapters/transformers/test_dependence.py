"""How far tokens move behind another chunk: by its definition in fp64, and only there where it belongs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longreach import PIE, ChunkPool, ChunkStore, Dependence, attach
from longreach.adapters.transformers import DependenceMeter, Precompute, Reader, get_or_compute
from longreach.adapters.transformers.dependence import movement, other_chunk
from longreach.adapters.transformers.fusing import FusedPrompt, read
from longreach.adapters.transformers.placement import places
from longreach.errors import InvalidInput
from longreach.store import Chunk
from longreach.testing.tiny import random_tokens, tiny_model
from tests.adapters.transformers.fusing.test_read import plain
from tests.adapters.transformers.reference import model_of
from tests.tiers import families


def tokens(length: int, seed: int) -> list[int]:
    return [int(t) for t in random_tokens(1, length, seed=seed)[0]]


HEAD, OTHER, TOKENS = tokens(5, 1), tokens(23, 2), tokens(37, 3)


def drawn(layers: int, seed: int) -> Chunk:
    torch.manual_seed(seed)
    both = [[torch.randn(2, 7, 3 + layer).bfloat16() for layer in range(layers)] for _ in range(2)]
    return Chunk.of("a model", [1], range(7), *both)


@pytest.mark.parametrize(
    ("layers", "middle"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [1, 2]), (12, [3, 4, 5, 6, 7, 8])]
)
def test_movement_by_its_definition(layers: int, middle: list[int]) -> None:
    one, two = drawn(layers, 0), drawn(layers, 1)
    want = []
    for n in range(7):
        parts = []
        for mine, theirs in ((one.keys, two.keys), (one.values, two.values)):
            for layer in middle:
                x, y = mine[layer].double(), theirs[layer].double()
                size = sum(float((x[:, i] ** 2).sum()) for i in range(7)) / 7
                parts.append(float(((x[:, n] - y[:, n]) ** 2).sum()) / size)
        want.append(sum(parts) / len(parts))
    got = movement(one, two)
    assert got.dtype == torch.float64 and not movement(one, one).any()
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


def test_what_is_all_zeros_moves_by_nothing() -> None:
    one, two = drawn(1, 0), drawn(1, 1)
    one.keys[0].zero_()
    values = movement(one, replace(two, keys=one.keys))
    assert torch.equal(movement(one, two), values) and bool(values.isfinite().all())


def test_the_other_chunk() -> None:
    a, b, c = (1, 2), (3,), (4,)
    assert other_chunk([[a, b], [c]], 0, 1) == a, "its document's first"
    assert other_chunk([[a, b], [c]], 0, 0) == c and other_chunk([[a, b], [c]], 1, 0) == a, "another document's first"
    assert other_chunk([[a, b]], 0, 0) is None, "there is none"
    assert other_chunk([[a, a], [c]], 0, 1) == c and other_chunk([[a], [a], [c]], 1, 0) == c, "not its own tokens"
    assert other_chunk([[a], [a]], 1, 0) == a, "but for nothing else"


def test_places_are_those_of_the_prompt() -> None:
    found = places([[(1, 2), (3,)], [(4, 5)]], [9, 9])
    assert [(p.document, p.tokens, p.before.tolist()) for p in found] == [
        (0, (1, 2), []), (0, (3,), [1, 2]), (1, (4, 5), [1, 2, 3, 9, 9])
    ]  # fmt: skip
    assert [p.other for p in found] == [(4, 5), (1, 2), (1, 2)]


@pytest.mark.parametrize("name", families(2))
def test_measured_behind_the_other_chunk_wherever_that_stands(name: str) -> None:
    """The same keys and values as of one text of head, other chunk and chunk; positions do not matter."""
    told = list[int]()
    with attach(model_of(name)) as session:
        work = Precompute(session, HEAD, chunk=16)
        meter, chunk = DependenceMeter(work), work.compute(TOKENS)
        got = meter.measured(chunk, OTHER, told.append)
        whole = Precompute(session, [*HEAD, *OTHER]).compute(TOKENS)
        again = meter.measured(chunk, OTHER)
    assert got.dependence is not None and got.key == chunk.key and told == [16, 16, 5]
    assert all(torch.equal(a, b) for a, b in zip(got.keys, chunk.keys, strict=True))
    torch.testing.assert_close(got.dependence, movement(chunk, whole), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(got.dependence, again.dependence, rtol=1e-3, atol=1e-9)
    assert bool((got.dependence > 0).any())


def test_the_other_chunk_is_cut_to_the_context() -> None:
    model = tiny_model("llama", max_position_embeddings=50)
    with attach(model) as session:
        work = Precompute(session, HEAD)
        meter, chunk = DependenceMeter(work), work.compute(TOKENS)
        got = meter.measured(chunk, OTHER).dependence
        want = meter.measured(chunk, OTHER[: 50 - 5 - 37]).dependence
        assert got is not None and want is not None and torch.equal(got, want)
        with pytest.raises(InvalidInput, match="leaves no room for another chunk before it; cut it into smaller"):
            meter.measured(work.compute([*TOKENS, *TOKENS[:8]]), OTHER)
        with pytest.raises(InvalidInput, match="expected a chunk computed behind the prefix of 5 tokens alone"):
            meter.measured(work.compute(TOKENS[:9], behind=OTHER), OTHER)


def test_the_store_gets_it_and_keeps_it(tmp_path: Path) -> None:
    with attach(model_of("llama")) as session, ChunkStore(tmp_path) as store:
        work, told = Precompute(session, HEAD), list[int]()
        meter = DependenceMeter(work)
        plain_one = get_or_compute(work, store, TOKENS, told.append)
        assert plain_one.chunk.dependence is None and not plain_one.dependence_computed and sum(told) == 37
        added = get_or_compute(work, store, TOKENS, told.append, dependence=(meter, OTHER))
        assert added.state == "stored" and added.dependence_computed and sum(told) == 3 * 37
        stored = get_or_compute(work, store, TOKENS, told.append, dependence=(meter, OTHER), mapped=False)
        assert stored.state == "stored" and not stored.dependence_computed and sum(told) == 5 * 37
        assert stored.chunk.dependence is not None and added.chunk.dependence is not None
        assert torch.equal(stored.chunk.dependence, added.chunk.dependence)
        assert get_or_compute(work, store, TOKENS).chunk.dependence is not None, "what is stored comes as it is"
        assert len(store.entries()) == 1
        fresh = get_or_compute(work, None, TOKENS, dependence=(meter, OTHER))
        assert fresh.state == "computed" and fresh.dependence_computed


def test_a_chunk_that_the_pool_holds_gets_it_too() -> None:
    pool = ChunkPool(pinned=False)
    with attach(model_of("llama")) as session:
        work = Precompute(session, HEAD)
        first = get_or_compute(work, None, TOKENS, pool=pool).chunk
        assert first.dependence is None
        measured = get_or_compute(work, None, TOKENS, dependence=(DependenceMeter(work), OTHER), pool=pool)
        assert measured.state == "held" and measured.dependence_computed
        held = pool.get(first.key)
        assert held is measured.chunk and held.dependence is not None and len(pool) == 1
        again = get_or_compute(work, None, TOKENS, dependence=(DependenceMeter(work), OTHER), pool=pool)
        assert again.chunk is held and not again.dependence_computed


def test_a_chunk_behind_everything_is_asked_for_first(tmp_path: Path) -> None:
    with attach(model_of("llama")) as session, ChunkStore(tmp_path) as store:
        work = Precompute(session, HEAD)
        meter = DependenceMeter(work)

        def got(**how: object) -> tuple[str, int]:
            one = get_or_compute(work, store, TOKENS, **how)  # type: ignore[arg-type]
            return one.state, len(one.chunk.prefix)

        assert got(behind=OTHER) == ("computed", 5) and got(behind=OTHER) == ("stored", 5)
        assert got(behind=OTHER, exact=True) == ("computed", 28)
        assert got(behind=OTHER, dependence=(meter, OTHER)) == got(behind=OTHER) == ("stored", 28)
        assert got(behind=OTHER[1:]) == got() == ("stored", 5)
        exact = get_or_compute(work, store, TOKENS, behind=OTHER, dependence=(meter, OTHER))
        assert exact.chunk.dependence is None and not exact.dependence_computed, "an exact chunk needs none"


def test_chunks_behind_growing_prefixes_read_only_what_is_new() -> None:
    model, text = tiny_model("llama"), tokens(90, 7)
    passes = list[int]()
    with attach(model) as session:
        work = Precompute(session, text[:10], chunk=64)
        forward = model.model.forward
        model.model.forward = lambda **kwargs: passes.append(kwargs["input_ids"].shape[1]) or forward(**kwargs)
        one = [work.compute(text[10:30]), work.compute(text[33:60], behind=text[10:33])]
        assert passes == [10, 20, 3, 27], "the first chunk is still there"
        work.compute(text[33:60])
        del model.model.__dict__["forward"]
        model.model.__dict__["forward"] = forward
        two = [Precompute(session, text[:first]).compute(text[first:last]) for first, last in ((10, 30), (33, 60))]
    for a, b in zip(one, two, strict=True):
        assert a.key == b.key and a.prefix.tolist() == b.prefix.tolist()
        for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


# the fused pass


def with_numbers(chunk: Chunk, seed: int) -> Chunk:
    generator = torch.Generator().manual_seed(seed)
    return replace(chunk, dependence=torch.rand(len(chunk.tokens), generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("name", families(2))
@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_the_fused_pass_runs_the_tokens_that_moved_most(name: str, ratio: float) -> None:
    model = model_of(name)
    head, question = tokens(7, 1), tokens(9, 4)
    with attach(model) as session:
        work = Precompute(session, head)
        chunks = [with_numbers(work.compute(tokens(n, n)), n) for n in (21, 33, 18)]
    chunks[0] = replace(chunks[0], dependence=None)  # exact where it stands: it needs none
    prompt = FusedPrompt.of([head, *chunks, question])
    moved = torch.cat([torch.zeros(28, dtype=torch.float64), *(_numbers(c) for c in chunks[1:])])
    count = min(round(ratio * len(prompt.ids)), 33 + 18)
    best = set(moved.argsort(descending=True)[:count].tolist())
    parts = prompt.parts(model.device)
    assert set(Dependence(ratio=ratio).choose(parts, None).tolist()) == best
    with attach(model, fuse=Dependence(ratio=ratio)) as session:
        logits, report = read(session, Reader(session).cache, prompt)
    assert (report.exact, report.recomputed, report.reused) == (21, count, 51 - count)
    if ratio == 1.0:
        torch.testing.assert_close(logits, plain(model, list(prompt.ids))[0], rtol=1e-4, atol=1e-4)
    if ratio == 0.0:
        with attach(model, fuse=PIE()) as session:
            assert torch.equal(logits, read(session, Reader(session).cache, prompt)[0])


def _numbers(chunk: Chunk) -> Tensor:
    assert chunk.dependence is not None
    return chunk.dependence


def test_chunks_without_it_are_refused_by_name() -> None:
    model, head = model_of("llama"), tokens(7, 1)
    with attach(model, fuse="dependence") as session:
        work = Precompute(session, head)
        chunks = [work.compute(tokens(n, n)) for n in (21, 33)]
        reader = Reader(session)
        prompt = FusedPrompt.of([head, chunks[0], with_numbers(chunks[1], 0), tokens(5, 2)])
        assert prompt.parts(model.device).dependence is not None
        swapped = FusedPrompt.of([head, with_numbers(chunks[1], 0), chunks[0], tokens(5, 2)])
        with pytest.raises(InvalidInput, match=r"store add --dependence.*Documents in a session with this method"):
            read(session, reader.cache, swapped)
        assert reader.cache.columns == 0 and read(session, reader.cache, prompt)[1].reused


def test_exactness_is_of_all_tokens_before() -> None:
    """Chunks whose prefix is as long as what precedes them, and not it, are none; random prefixes of the prompt are."""
    model, draw = model_of("llama"), random.Random(3)
    text = tokens(60, 9)
    with attach(model) as session:
        for _ in range(4):
            start = draw.randrange(1, 40)
            exact = Precompute(session, text[:start]).compute(text[start : start + 8])
            other = list(text[:start])
            at = draw.randrange(start)
            other[at] = (other[at] + 1) % 200
            near = Precompute(session, other).compute(text[start : start + 8])
            for chunk, sure in ((exact, 8), (near, 0)):
                parts = FusedPrompt.of([text[:start], chunk, text[start + 8 :]]).parts(model.device)
                assert int(parts.exact.sum()) == sure and (parts.dependence is not None) == bool(sure)
