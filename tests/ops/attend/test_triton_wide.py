"""attend's kernel for wide heads and large groups against the oracle: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import KVView, RowRange, Rows, ScoringKeys, Span, Spans, absolute, attend, relative, score_keys
from longreach.ops.attend import Entries, attend_amend
from longreach.ops.attend import triton as kernels
from longreach.ops.attend import triton_wide as wide
from longreach.ops.head_parts import part_of
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.selections import Kind, prompt_tiles, random_lists, random_selection
from tests.ops.attend import test_amend, test_score_and_pool
from tests.ops.attend.kept import check_kept, check_values
from tests.ops.attend.kernels import HALF, check, here

KINDS: tuple[Kind, ...] = ("spans", "lists", "packed")


def latent(kv: KVView) -> KVView:
    """The view of a latent cache: values are the keys."""
    return replace(kv, v=kv.k, values_in_keys=True)


@pytest.mark.parametrize(("dim", "group", "page", "dtype"), [
    (512, 1, None, HALF), (512, 8, 8, torch.float32), (264, 3, 8, torch.float32), (16, 128, None, HALF),
    (40, 24, 8, HALF),
])  # fmt: skip
def test_shapes(dim: int, group: int, page: int | None, dtype: torch.dtype) -> None:
    kv = random_kv([45, 0, 21], heads=2, dim=dim, page=page, dtype=dtype)
    rows = random_rows(kv, 2, group=group, seed=1)
    check(rows, kv, Spans.dense(), sink_logit=torch.randn(2 * group))
    check(rows, kv, random_lists(rows, kv, weighted=True), softcap=3.0)


@pytest.mark.parametrize(("group", "page", "count"), [(32, None, 2), (128, 8, 1)])
def test_values_that_are_the_keys(group: int, page: int | None, count: int) -> None:
    kv = latent(random_kv([40, 27][-count:], heads=1, dim=576, page=page, dtype=HALF))
    rows = random_rows(kv, count, group=group, seed=2)
    check(rows, kv, Spans.dense() if count == 1 else random_lists(rows, kv))
    apart = replace(kv, v=kv.k.clone(), values_in_keys=False)
    both = [attend(here(rows), here(view), Spans.dense(), scale=0.05, impl="triton") for view in (kv, apart)]
    assert torch.equal(both[0].out, both[1].out) and torch.equal(both[0].lse, both[1].lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evicted", [False, True])
def test_selections(kind: Kind, evicted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of KV heads and of query heads, where the heads of a KV head are of several items."""
    monkeypatch.setattr(wide, "most_rows", lambda *_: 9)
    kv = random_kv([33, 21], heads=2, dim=24, page=5, evicted=evicted)
    rows = random_rows(kv, 2, group=18)
    for number, dealt in enumerate((kernels.MOST_DEALT, 0)):
        monkeypatch.setattr(kernels, "MOST_DEALT", dealt)
        for per in ("kv", "query"):
            check(rows, kv, random_selection(kind, rows, kv, per=per, seed=number))


def test_rows_of_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification of several tokens, and a prompt's rows, which are not dealt out."""
    kv = random_kv([40], heads=2, dim=272, page=16, dtype=HALF)
    rows = Rows(
        torch.randn(7, 6, 272).to(HALF), torch.zeros(7, dtype=torch.int64), 33 + torch.arange(7), (RowRange(7, 0),)
    )
    for prompt in (256, 7):
        monkeypatch.setattr(wide, "PROMPT", prompt)
        check(rows, kv, Spans((Span(absolute(0), absolute(3)), Span(relative(-20), relative(1)))))
        check(rows, kv, random_lists(rows, kv, shared=True))


@pytest.mark.parametrize(("group", "tokens", "mapped", "page"), [(1, 3, None, 16), (24, 8, 1, None), (32, 4, None, 3)])
def test_tiles_of_a_prompt(group: int, tokens: int, mapped: int | None, page: int | None) -> None:
    kv = random_kv([17, 40], heads=2, dim=264 if group == 1 else 16, page=page, dtype=HALF)
    rows, selection = prompt_tiles(kv, group, tokens, mapped=mapped, seed=group)
    check(rows, kv, selection, sink_logit=torch.randn(2 * group))


@pytest.mark.parametrize(("dim", "group", "values"), [(576, 16, True), (16, 128, False), (24, 40, True)])
def test_kept_logits(dim: int, group: int, values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "most_rows", lambda *_: 32)
    kv = random_kv([50, 21], heads=1, dim=dim, page=8 if values else None, dtype=HALF)
    kv = latent(kv) if dim == 576 else kv
    rows = random_rows(kv, 2, group=group)
    check_kept(rows, kv, impl="triton", values=values, softcap=3.0)
    check_values(rows, kv, random_lists(rows, kv, weighted=True), impl="triton")


@pytest.mark.parametrize(("dim", "group"), [(264, 2), (16, 128)])
def test_scores_are_pooled_over_the_whole_group(dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "most_rows", lambda *_: 32)
    kv = random_kv([50, 21], heads=2, dim=dim, page=16, dtype=HALF)
    test_score_and_pool.check(random_rows(kv, 3, group=group), kv, "triton", sink_logit=torch.randn(2 * group))


def test_entries_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """MAC's pass: a span for each query head, cut in two, and the entries of the first part."""
    monkeypatch.setattr(wide, "most_rows", lambda *_: 8)
    kv = random_kv([40, 21], heads=1, dim=16, page=16)
    rows = random_rows(kv, 2, group=24, seed=3)
    starts = torch.randint(0, 20, (2, 24), generator=torch.Generator().manual_seed(1)).int()
    selection, split = Spans((Span(absolute(starts), relative(1)),), "query"), relative(-6)
    given = Entries(torch.randn(100, 16), torch.randn(100))
    take, put = torch.arange(48).int().view(2, 24), 50 + torch.arange(48).int().view(2, 24)
    take[0, 3] = -1
    (want_out, want_lse), (out, lse) = test_amend.expected(rows, kv, selection, split, given, take, None)
    mine = here(Entries(given.out.clone(), given.lse.clone()))
    got, before = attend_amend(
        here(rows), here(kv), here(selection), split, mine, here(take), here(put), scale=test_amend.SCALE,
        impl="triton",
    )  # fmt: skip
    for found, want in ((got.out, out), (got.lse, lse), (before, want_lse), (mine.out[put.long()], want_out)):
        torch.testing.assert_close(found.cpu().double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_that_no_row_selects_are_not_read(kind: Kind) -> None:
    kv = latent(random_kv([40, 21], heads=1, dim=264, page=4))
    rows = random_rows(kv, 3)
    selection = random_selection(kind, rows, kv, seed=1)
    clean = attend(here(rows), here(kv), here(selection), scale=0.25, impl="triton")
    read = selection.streamed(rows, kv)
    spoilt = latent(replace(kv, k=kv.k.clone(), values_in_keys=False))
    for b, length in enumerate((40, 21)):
        used = read[rows.seq == b][:, 0].any(0)
        poison(spoilt, b, 0, (n for n in range(length) if not bool(used[n])))
    again = attend(here(rows), here(spoilt), here(selection), scale=0.25, impl="triton")
    assert torch.equal(clean.out, again.out) and torch.equal(clean.lse, again.lse)


def test_other_shapes_and_passes_are_refused() -> None:
    kv = random_kv([5], heads=1, dim=584)
    with pytest.raises(Unsupported, match=r"up to 576 channels a head.*got 584 and 2; use impl='reference'"):
        attend(here(random_rows(kv, 1)), here(kv), Spans.dense(), scale=1.0, impl="triton")
    kv = random_kv([5], heads=1, dim=512)
    rows = random_rows(kv, 1)
    wants = replace(rows, q=rows.q.clone().requires_grad_())
    with pytest.raises(Unsupported, match=r"backward of attend.*up to 256 channels a head.*got 512 and 2"):
        attend(here(wants), here(kv), Spans.dense(), scale=1.0, impl="triton")
    keys = ScoringKeys(torch.zeros(kv.k.shape, dtype=torch.int8), torch.zeros(kv.k.shape[:3]))
    with pytest.raises(Unsupported, match=r"scores 8-bit keys of up to 256 channels.*got 512 and 2"):
        score_keys(here(rows), here(kv), scale=1.0, keys=here(keys), impl="triton")


def test_pieces_of_heads_and_channels() -> None:
    assert [wide.channels(n) for n in (24, 256, 264, 512, 576)] == [(32, 0), (256, 0), (256, 16), (512, 0), (512, 64)]
    assert [part_of(n, 32) for n in (8, 48, 128, 37)] == [8, 24, 32, 1]
    assert wide.most_rows(576, torch.bfloat16, 1) == 32 and wide.most_rows(576, torch.bfloat16, 256) == 64
