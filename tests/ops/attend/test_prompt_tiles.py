"""attend for tiles of a prompt: every implementation against the oracle, and what it reads."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, SelectionError, Unsupported
from longreach.ops import KVView, Lists, PackedLists, TileLists, attend
from longreach.ops.attend import triton_prompt_tiles as kernel
from longreach.testing.inputs import random_kv
from longreach.testing.selections import prompt_tiles
from tests.ops.attend.kernels import HALF, check, here, on_cpu
from tests.tiers import swept

LENGTHS = (1, 2, 17, 40, 64, 71, 90)
IMPLS = ["reference", "triton", pytest.param("numba", marks=on_cpu)]


def drawn(seed: int) -> tuple[KVView, dict[str, Any], dict[str, Any]]:
    """A view, options of `prompt_tiles`, and what shapes the logits."""
    dice = random.Random(seed)
    kv = random_kv(
        [dice.choice(LENGTHS) for _ in range(dice.choice((1, 2, 3)))],
        heads=dice.choice((1, 2, 3)),
        dim=dice.choice((8, 24, 40)),
        page=dice.choice((None, None, 1, 3, 16, 64)),
        memory=dice.choice(("plain", "packed", "tokens")),
        dtype=dice.choice((HALF, torch.float32)),
        ints=dice.choice((torch.int32, torch.int64)),
        seed=seed,
    )
    options = {
        "group": dice.choice((1, 2, 3, 4, 7)),
        "tokens": dice.choice((1, 3, 4, 8, 32)),
        "mapped": dice.choice((None, None, 1, 2)),
        "one": dice.random() < 0.2,
        "shuffled": dice.random() < 0.5,
    }
    sink = torch.randn(kv.heads * options["group"], generator=torch.Generator().manual_seed(seed))
    logits = {
        "scale": dice.choice((0.1, 0.35, 1.0)),
        "softcap": dice.choice((None, None, 1.5, 30.0)),
        "sink_logit": dice.choice((None, None, sink)),
    }
    return kv, options, logits


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", swept(range(40), 8))
def test_any_case(seed: int, impl: str) -> None:
    kv, options, logits = drawn(seed)
    rows, selection = prompt_tiles(kv, **options, seed=seed)
    if impl == "numba" and kv.k.dtype != torch.float32:
        kv = replace(kv, k=kv.k.float(), v=kv.v.float())
        rows = replace(rows, q=rows.q.float())
    check(rows, kv, selection, impl, **logits)


@pytest.mark.parametrize("piece", [8, 32])
def test_tiles_of_more_rows_than_a_program_has_are_cut(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "tuning", lambda *_: kernel.Tuning(piece, 16, 1, 1))
    kv = random_kv([150, 70], heads=2, dim=16, page=16, dtype=HALF)
    rows, selection = prompt_tiles(kv, 3, 32, seed=3)
    check(rows, kv, selection)


def test_a_tile_that_begins_at_the_first_slot_is_dense() -> None:
    """As methods attend densely: an empty list, and all keys are the tile's own."""
    kv = random_kv([100], heads=2, dim=16, dtype=HALF)
    rows, selection = prompt_tiles(kv, 2, 8, seed=1)
    assert selection.tiles is not None and isinstance(selection.lists, PackedLists)
    lists = replace(selection.lists, index=selection.lists.index[:0], offsets=torch.zeros_like(selection.lists.offsets))
    check(rows, kv, TileLists.of(lists, replace(selection.tiles, start=torch.zeros_like(selection.tiles.start))))


@pytest.mark.parametrize("impl", IMPLS)
def test_it_reads_what_the_selection_names(impl: str) -> None:
    """Other slots hold NaN, in all pages; the result is the same bits."""
    kv = random_kv([60, 33], heads=2, dim=16, page=8)
    rows, selection = prompt_tiles(kv, 2, 8, seed=5)
    plain = attend(here(rows), here(kv), here(selection), scale=0.3, impl=impl)
    read = torch.zeros(kv.sequences, kv.heads, kv.capacity, dtype=torch.bool)
    read.index_put_((rows.seq,), selection.streamed(rows, kv), accumulate=True)
    k, v = kv.k.clone(), kv.v.clone()
    for seq in range(kv.sequences):
        for g in range(kv.heads):
            for slot in range(int(kv.seq_lens[seq])):
                if not read[seq, g, slot]:
                    page, offset = kv.locate(torch.tensor(seq), torch.tensor(slot))
                    k[page, g, offset] = v[page, g, offset] = torch.nan
    got = attend(here(rows), here(replace(kv, k=k, v=v)), here(selection), scale=0.3, impl=impl)
    assert not bool(read.all()) and torch.equal(got.out, plain.out) and torch.equal(got.lse, plain.lse)
    assert torch.equal(selection.keys_read(rows, kv), selection.streamed(rows, kv).sum(-1))


def test_what_does_not_fit_is_refused() -> None:
    kv = random_kv([40], heads=2, dim=16)
    rows, selection = prompt_tiles(kv, 2, 8, seed=2)
    tiles, lists = selection.tiles, selection.lists
    assert tiles is not None and isinstance(lists, PackedLists) and lists.row_to_list is not None

    def refused(error: type[Exception], message: str, **changed: Any) -> None:
        with pytest.raises(error, match=message):
            attend(rows, kv, replace(selection, **changed), scale=1.0)

    refused(InvalidInput, "all_visible=True", lists=replace(lists, all_visible=False))
    refused(
        InvalidInput, "expected every row once, got row 0 0 times", tiles=replace(tiles, rows=tiles.rows.clamp(min=1))
    )
    refused(InvalidInput, "expected as many as lists", tiles=tiles.take(slice(1, None)))
    other = replace(lists, row_to_list=lists.row_to_list.flip(0))
    refused(InvalidInput, "expected the tile of each row", lists=other)
    late = lists.index.clone()
    late[-1] = int(rows.pos.max())
    refused(SelectionError, "expected keys before the tile, which begins at slot", lists=replace(lists, index=late))
    with pytest.raises(Unsupported, match="packed lists of whole tiles"):
        some = selection.take(torch.arange(len(rows.pos)))
        attend(here(rows), here(kv), here(some), scale=1.0, impl="triton")
    with pytest.raises(Unsupported, match="takes Spans and Lists, got TileLists"):
        attend(
            replace(here(rows), q=here(rows.q).requires_grad_()), here(kv), here(selection), scale=1.0, impl="triton"
        )


def test_some_rows_of_it() -> None:
    kv = random_kv([40, 20], heads=2, dim=16)
    rows, selection = prompt_tiles(kv, 2, 8, seed=4)
    index = torch.tensor([3, 0, 5])
    some = selection.take(index)
    assert isinstance(some.lists, Lists)
    got = attend(rows.take(index), kv, some, scale=0.3, impl="reference")
    want = attend(rows, kv, selection, scale=0.3, impl="reference")
    torch.testing.assert_close(got.out, want.out[index], rtol=0, atol=1e-6)
