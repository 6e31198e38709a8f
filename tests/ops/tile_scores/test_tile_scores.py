"""tile_log_sums and tile_scores: reference and Triton against the oracle, what they read, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, Unsupported
from longreach.ops import KVView, Rows, RowTiles, Spans, tile_log_sums, tile_scores, top_k
from longreach.ops.tile_scores import triton as kernel
from longreach.testing.inputs import random_kv
from longreach.testing.oracle import exact_attend, exact_logits, exact_pooled_scores
from longreach.testing.selections import prompt_tiles
from longreach.testing.tolerance import bounds, pooled_bound, unit_roundoff, within
from tests.ops.attend.kernels import HALF, HARDWARE, here, here_all, needs_gpu
from tests.ops.attend.test_prompt_tiles import drawn
from tests.tiers import swept

IMPLS = ["reference", "triton"]


def log_sums(rows: Rows, kv: KVView, tiles: RowTiles, **given: Any) -> torch.Tensor:
    """Where kernels run; the result on the CPU."""
    return tile_log_sums(here(rows), here(kv), here(tiles), **given).cpu()


def scores_of(rows: Rows, kv: KVView, tiles: RowTiles, lse: torch.Tensor, **given: Any) -> torch.Tensor:
    return tile_scores(here(rows), here(kv), here(tiles), here(lse), **given).cpu()


def check(rows: Rows, kv: KVView, tiles: RowTiles, impl: str, **logits: Any) -> torch.Tensor:
    """The scores, after comparing them and the lse of the rows in tiles with the oracle's."""
    want = exact_attend(rows, kv, Spans.dense(), **logits)
    unit = HARDWARE * unit_roundoff(torch.float32)
    tile, place = (tiles.rows >= 0).nonzero(as_tuple=True)
    number = tiles.rows[tile, place].long()
    lse = tile_log_sums(here(rows), here(kv), here(tiles), **here_all(logits), impl=impl)
    within("lse", lse.double().cpu()[number], want.lse[number], bounds(want, unit)[1][number])
    plain = {name: x for name, x in logits.items() if name != "sink_logit"}
    columns = max(tiles.start.tolist(), default=0) + 5
    scores = tile_scores(here(rows), here(kv), here(tiles), lse, columns=columns, **here_all(plain), impl=impl)
    got = scores.double().cpu()
    taken = Rows(rows.q[number], rows.seq[number], rows.pos[number])
    exact = exact_pooled_scores(taken, kv, **plain, lse=want.lse[number], tile=tile, tiles=tiles.rows.shape[0])
    for t, start in enumerate(tiles.start.where((tiles.rows >= 0).any(1), 0).tolist()):
        bound = pooled_bound(exact[t], want, unit)
        within("scores", got[t, :, :start], exact[t, :, :start], bound[:, :start])
        assert impl != "reference" or bool(got[t, :, start:].isnan().all())
    return scores


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", swept(range(40), 8))
def test_any_case(seed: int, impl: str) -> None:
    kv, options, logits = drawn(seed)
    rows, selection = prompt_tiles(kv, **options, seed=seed)
    assert selection.tiles is not None
    check(rows, kv, selection.tiles, impl, **logits)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("every", [2, 4])
def test_a_sample_of_the_rows(every: int, impl: str) -> None:
    """Tables with some of a tile's rows, in fewer places; other rows may hold anything."""
    kv = random_kv([70, 40, 33], heads=2, dim=16, page=16)
    rows, selection = prompt_tiles(kv, 2, 8, seed=3)
    assert selection.tiles is not None
    sampled = RowTiles(selection.tiles.rows[:, ::every].contiguous(), selection.tiles.start)
    check(rows, kv, sampled, impl, scale=0.3)
    used = sampled.rows[sampled.rows >= 0].long()
    q = torch.full_like(rows.q, torch.nan)
    q[used] = rows.q[used]
    lse = log_sums(rows, kv, sampled, scale=0.3, impl=impl)
    blind = log_sums(replace(rows, q=q), kv, sampled, scale=0.3, impl=impl)
    assert torch.equal(blind[used], lse[used])
    given: dict[str, Any] = {"columns": 70, "scale": 0.3, "impl": impl}
    for t, start in enumerate(sampled.start.where((sampled.rows >= 0).any(1), 0).tolist()):
        a, b = (scores_of(x, kv, sampled, lse, **given)[t, :, :start] for x in (rows, replace(rows, q=q)))
        # on a GPU the reference adds rows in any order
        assert torch.allclose(a, b, rtol=1e-5, atol=0) if impl == "reference" else torch.equal(a, b)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("every", "page", "tokens"), [(2, None, 8), (5, 16, 8), (16, None, 64), (3, None, 1)])
def test_log_sums_of_a_sample_of_the_keys(every: int, page: int | None, tokens: int, impl: str) -> None:
    """Slots from 64 on and more than 128 before a tile: one of so many is read, and counts as so many."""
    kv = random_kv([400, 150, 260], heads=2, dim=16, page=page)
    rows, selection = prompt_tiles(kv, 2, tokens, seed=every)
    tiles = selection.tiles
    assert tiles is not None
    logits = exact_logits(rows, kv, scale=0.3)  # [R, G, N, group]
    slot = torch.arange(kv.capacity)
    tile, place = (tiles.rows >= 0).nonzero(as_tuple=True)
    start = torch.zeros_like(rows.pos)
    start[tiles.rows[tile, place].long()] = tiles.start[tile]
    between = (slot >= 64) & (slot < start[:, None] - 128)
    left_out = between & ((slot - 64) % every != 0)
    assert bool(left_out.any())
    weighted = logits + between[:, None, :, None] * math.log(every)
    want = weighted.masked_fill(left_out[:, None, :, None], -torch.inf).logsumexp(2).flatten(1)
    k = kv.k.clone()
    for seq in range(3):  # what no row reads holds NaN
        for n in range(int(kv.seq_lens[seq])):
            if bool(left_out[rows.seq == seq, n].all()) and bool((rows.pos[rows.seq == seq] >= n).all()):
                at, offset = kv.locate(torch.tensor(seq), torch.tensor(n))
                k[at, :, offset] = torch.nan
    got = tile_log_sums(here(rows), here(replace(kv, k=k)), here(tiles), scale=0.3, every=every, impl=impl)
    exact = exact_attend(rows, kv, Spans.dense(), scale=0.3)
    unit = HARDWARE * unit_roundoff(torch.float32)
    within("lse", got.double().cpu(), want, bounds(exact, unit)[1] + 4 * unit * math.log(every))


@pytest.mark.parametrize("keys", [16, 48])
def test_however_slots_are_shared_out(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of slots, and tiles of several sequences in one program."""
    monkeypatch.setattr(kernel, "tuning", lambda *_: kernel.Tuning(64, 16, 1, 1, keys))
    kv = random_kv([100, 3, 64, 9], heads=2, dim=16)
    for tokens in (2, 8):
        rows, selection = prompt_tiles(kv, 2, tokens, seed=tokens)
        assert selection.tiles is not None
        check(rows, kv, selection.tiles, "triton", scale=0.3)


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_from_a_tile_on_are_not_scored(impl: str) -> None:
    """They hold NaN, and so does memory past what is filled; values are never read."""
    kv = random_kv([64], heads=2, dim=16, page=8)
    rows, selection = prompt_tiles(kv, 2, 8, seed=6)
    tiles = selection.tiles
    assert tiles is not None
    lse = log_sums(rows, replace(kv, v=torch.full_like(kv.v, torch.nan)), tiles, scale=0.3, impl=impl)
    for t in range(tiles.rows.shape[0]):
        one, start = tiles.take(slice(t, t + 1)), int(tiles.start[t])
        k = kv.k.clone()
        page, offset = kv.locate(torch.zeros(64 - start, dtype=torch.int64), torch.arange(start, 64))
        k[page, :, offset] = torch.nan
        blind = replace(kv, k=k, v=torch.full_like(kv.v, torch.nan))
        a, b = (scores_of(rows, x, one, lse, columns=64, scale=0.3, impl=impl)[..., :start] for x in (kv, blind))
        assert torch.equal(a, b) and not bool(a.isnan().any())


def test_equal_scores_give_equal_choices() -> None:
    """Of keys that score alike the older ones are chosen, by either implementation of top_k.

    Queries and keys are multiples of 1/4: their products are exact, so equal keys score alike on every processor.
    """
    kv = random_kv([48], heads=1, dim=16)
    kv = replace(kv, k=(4 * kv.k[:, :, :1]).round().div(4).expand_as(kv.k).contiguous())
    rows, selection = prompt_tiles(kv, 2, 8, seed=1)
    rows = replace(rows, q=(4 * rows.q).round() / 4)
    tiles = selection.tiles
    assert tiles is not None
    scores = {}
    for impl in IMPLS:
        lse = log_sums(rows, kv, tiles, scale=0.3, impl=impl)
        scores[impl] = scores_of(rows, kv, tiles, lse, columns=48, scale=0.3, impl=impl)
    count = tiles.start[:, None] // 2
    for made in scores.values():
        for impl in IMPLS:
            index, used = top_k(here(made), here(count), here(tiles.start), capacity=24, impl=impl)
            for t, start in enumerate(tiles.start.tolist()):
                assert index[t, 0, : int(used[t])].tolist() == list(range(start // 2))


def test_what_does_not_fit_is_refused() -> None:
    kv = random_kv([40], heads=2, dim=16)
    rows, selection = prompt_tiles(kv, 2, 8, seed=2)
    tiles = selection.tiles
    assert tiles is not None
    lse = torch.zeros(rows.q.shape[:2])
    # not of tensors on a GPU, for which it would wait
    with pytest.raises(InvalidInput, match=r"columns: expected at least \d+, the largest start, got 3"):
        tile_scores(rows, kv, tiles, lse, columns=3, scale=1.0)
    with pytest.raises(InvalidInput, match="lse: expected float"):
        scores_of(rows, kv, tiles, lse[:, :1], columns=40, scale=1.0)
    with pytest.raises(InvalidInput, match="every: expected a count >= 1, got 0"):
        log_sums(rows, kv, tiles, scale=1.0, every=0)
    with pytest.raises(InvalidInput, match="tiles: expected rows below"):
        log_sums(rows, kv, replace(tiles, rows=tiles.rows + 99), scale=1.0)
    with pytest.raises(Unsupported, match="slots that are positions, got slot_pos"):
        log_sums(rows, replace(random_kv([40], evicted=True)), tiles, scale=1.0)
    two = random_kv([40, 40], heads=2, dim=16)
    with pytest.raises(InvalidInput, match="rows of one sequence in each, got several in tile 0"):
        mixed = replace(rows, seq=torch.arange(len(rows.seq)) % 2)
        log_sums(mixed, two, replace(tiles, rows=tiles.rows.clamp(min=0)), scale=1.0)
    with pytest.raises(Unsupported, match="no backward pass"):
        log_sums(replace(rows, q=rows.q.requires_grad_()), kv, tiles, scale=1.0, impl="triton")


@pytest.mark.parametrize(
    ("dim", "group", "tokens", "held"), [(16, 6, 8, 4), (264, 2, 8, 16), (16, 128, 2, 128), (16, 3, 5, 6)]
)
def test_tiles_larger_than_a_program(
    dim: int, group: int, tokens: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut into fewer rows, and into some of the query heads of a KV head."""
    monkeypatch.setattr(kernel, "tuning", lambda *_: kernel.Tuning(held, 16, 1, 1, 32))
    kv = random_kv([40, 21], heads=2, dim=dim, page=16, dtype=HALF)
    rows, selection = prompt_tiles(kv, group, tokens, seed=1)
    assert selection.tiles is not None
    some = RowTiles(selection.tiles.rows[-4:], selection.tiles.start[-4:])
    check(rows, kv, some, "triton", scale=dim**-0.5, sink_logit=torch.randn(2 * group))


@needs_gpu
@pytest.mark.gpu
def test_shapes_of_real_prompts() -> None:
    """The last tiles of 32K tokens, bf16, 4 heads a KV head: both kernels against the reference in fp32."""
    length, tokens, some = 32_768, 32, 16
    k = torch.randn(1, 2, length, 128, device="cuda", dtype=torch.bfloat16)
    kv = KVView(k, k, torch.tensor([length], device="cuda"))
    count = tokens * some
    pos = torch.arange(length - count, length, device="cuda")
    rows = Rows(torch.randn(count, 8, 128, device="cuda", dtype=torch.bfloat16), torch.zeros_like(pos), pos)
    table = torch.arange(count, dtype=torch.int32, device="cuda").view(some, tokens)
    tiles = RowTiles(table, pos[::tokens].contiguous())
    given: dict[str, Any] = {"scale": 128**-0.5}
    found = {}
    for impl in IMPLS:
        lse = tile_log_sums(rows, kv, tiles, **given, impl=impl)
        found[impl] = lse, tile_scores(rows, kv, tiles, lse, columns=length, **given, impl=impl)
    torch.testing.assert_close(found["triton"][0], found["reference"][0], rtol=0, atol=1e-3)
    for t, start in enumerate(tiles.start.tolist()):
        a, b = (found[impl][1][t, :, :start] for impl in IMPLS)
        torch.testing.assert_close(b, a, rtol=2e-3, atol=1e-9)
