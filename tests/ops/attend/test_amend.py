"""attend_amend: what comes out, and what stands in memory afterwards, against fp64 sums over the same keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops import KVView, Lists, Partial, Rows, Span, Spans, absolute, relative
from longreach.ops.attend import Entries, attend_amend, attend_split
from longreach.ops.attend import triton as kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend
from tests.ops.attend.kernels import HALF, PLACE, held_to, here

on_a_cpu = pytest.mark.skipif(PLACE != "cpu", reason="Numba's kernels run on a CPU")
impls = pytest.mark.parametrize("impl", ["reference", "triton", pytest.param("numba", marks=on_a_cpu)])
SCALE, MEMORY = 0.25, 50


def entries(dim: int = 16, seed: int = 0) -> Entries:
    """Made-up results; NaN in every tenth."""
    draw = torch.Generator().manual_seed(seed)
    out, lse = torch.randn(MEMORY, dim, generator=draw), 2 + torch.rand(MEMORY, generator=draw)
    out[::10], lse[::10] = torch.nan, torch.nan
    return Entries(out, lse)


def places(rows: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """take and put: distinct entries, none among them; none that is taken is NaN."""
    order = torch.randperm(MEMORY, generator=torch.Generator().manual_seed(seed)).int()
    put = order[: rows * heads].view(rows, heads).clone()
    rest = order[rows * heads :]
    rest = rest[rest % 10 != 0]
    take = rest[torch.arange(rows * heads) % rest.numel()].view(rows, heads).clone()
    take[0, 0], put[1, 1] = -1, -1
    return take, put


def total(first: Partial, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two results in fp64."""
    lses = torch.stack([first.lse.double(), lse.double()])
    whole = lses.logsumexp(0)
    share = torch.where(whole == -torch.inf, 0.0, torch.exp(lses - whole.masked_fill(whole == -torch.inf, 0.0)))
    return share[0][..., None] * first.out.double() + share[1][..., None] * out.double(), whole


def expected(rows: Rows, kv: KVView, selection: Spans, split: Any, given: Entries, take: Tensor, sink: Tensor | None):
    """(entry, result), each (out, lse), from the reference's parts in fp64."""
    rows64 = Rows(rows.q.double(), rows.seq, rows.pos)
    kv64 = KVView(kv.k.double(), kv.v.double(), kv.seq_lens, kv.block_table, kv.slot_pos)
    before, after = attend_split(rows64, kv64, selection, split, scale=SCALE, impl="reference")
    none = take < 0
    out = given.out[take.clamp(min=0).long()].masked_fill(none[..., None], 0.0)
    entry = total(before, out, given.lse[take.clamp(min=0).long()].masked_fill(none, -torch.inf))
    result = total(after, *entry)
    if sink is not None:
        result = total(Partial(*result), torch.zeros_like(result[0]), sink.expand_as(result[1]))
    return entry, result


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("dealt", [True, False])
@impls
def test_parts_and_entries_add_up(impl: str, dealt: bool, sink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dealt:
        monkeypatch.setattr(kernels, "MOST_DEALT", 0)
    kv = random_kv([40, 0, 21], heads=2, dim=16, page=16)
    rows = random_rows(kv, 3, group=2, seed=3)
    starts = torch.randint(0, 30, (3, 4), generator=torch.Generator().manual_seed(1)).int()
    take, put = places(3, 4)
    sinks = torch.tensor([0.5, 3.0, -1.0, 1.0]) if sink else None
    for selection, split in (
        (Spans((Span(absolute(starts), relative(1)),), "query"), relative(-6)),
        (Spans.dense(), relative(-20)),
        (Spans((Span(absolute(0), absolute(4)), Span(relative(-20), relative(1)))), absolute(11)),
    ):
        given = entries()
        kept = Entries(*(here(x.clone()) for x in given))
        entry, result = expected(rows, kv, selection, split, given, take, sinks)
        got, lse = attend_amend(
            here(rows), here(kv), here(selection), here(split), kept, here(take), here(put), scale=SCALE,
            sink_logit=here(sinks), impl=impl,
        )  # fmt: skip
        close = {"rtol": 2e-5, "atol": 2e-5}
        torch.testing.assert_close(got.out.cpu().double(), result[0], **close)
        torch.testing.assert_close(got.lse.cpu().double(), result[1], **close)
        torch.testing.assert_close(lse.cpu().double(), entry[1], **close)
        written = torch.zeros(MEMORY, dtype=torch.bool)
        for r, h in torch.ones(3, 4).nonzero().tolist():
            if put[r, h] >= 0:
                n = int(put[r, h])
                written[n] = True
                torch.testing.assert_close(kept.out[n].cpu().double(), entry[0][r, h], **close)
                torch.testing.assert_close(kept.lse[n].cpu().double(), entry[1][r, h], **close)
        for held, before in zip(kept, given, strict=True):
            assert torch.equal(held.cpu()[~written].nan_to_num(9.0), before[~written].nan_to_num(9.0))


def test_one_stream_far_longer_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that finds nothing among heads that do: its pieces are put together in more than one chunk."""
    monkeypatch.setattr(Tuning, "programs", lambda self, device: 120)
    kv = random_kv([1900], heads=6, dim=128)
    rows = Rows(torch.randn(1, 6, 128), torch.tensor([0]), torch.tensor([1899]))
    starts = torch.tensor([[1890, 1895, 0, 1880, 1899, 1860]]).int()
    selection, split = Spans((Span(absolute(starts), relative(1)),), "query"), relative(-16)
    given = entries(128)
    kept = Entries(*(here(x.clone()) for x in given))
    take, put = torch.tensor([[1, 2, -1, 3, 4, 5]]).int(), torch.tensor([[11, 12, 13, 14, 15, 16]]).int()
    entry, result = expected(rows, kv, selection, split, given, take, None)
    got, lse = attend_amend(
        here(rows), here(kv), here(selection), split, kept, here(take), here(put), scale=SCALE, impl="triton"
    )
    close = {"rtol": 2e-5, "atol": 2e-5}
    for mine, theirs in ((got.out, result[0]), (got.lse, result[1]), (lse, entry[1])):
        torch.testing.assert_close(mine.cpu().double(), theirs, **close)
    torch.testing.assert_close(kept.out[11:17].cpu().double(), entry[0][0], **close)


@impls
def test_nothing_at_all(impl: str) -> None:
    """No keys, no entry: an empty result and an empty entry, not NaN; and no row."""
    kv = random_kv([0, 5], heads=2, dim=16)
    rows = Rows(torch.randn(1, 4, 16), torch.tensor([0]), torch.tensor([3]))
    none, kept = torch.full((1, 4), -1, dtype=torch.int32), Entries(here(torch.randn(4, 16)), here(torch.randn(4)))
    put = torch.arange(4, dtype=torch.int32).view(1, 4)
    given = here(kv), here(Spans.dense()), relative(-1), kept
    got, lse = attend_amend(here(rows), *given, here(none), here(put), scale=SCALE, impl=impl)
    assert not bool(got.out.any()) and bool((got.lse == -torch.inf).all() and (lse == -torch.inf).all())
    assert not bool(kept.out.any()) and bool((kept.lse == -torch.inf).all())
    got, lse = attend_amend(
        here(Rows(rows.q[:0], rows.seq[:0], rows.pos[:0])),
        *given,
        here(none[:0]),
        here(put[:0]),
        scale=SCALE,
        impl=impl,
    )
    assert got.out.shape == (0, 4, 16) and lse.shape == (0, 4)


@impls
def test_an_entry_with_nan_stays_with_who_takes_it(impl: str) -> None:
    kv = random_kv([20], heads=2, dim=16)
    rows = Rows(torch.randn(1, 4, 16), torch.tensor([0]), torch.tensor([19]))
    kept = Entries(*(here(x) for x in entries()))
    take = torch.tensor([[10, 11, 12, 13]], dtype=torch.int32)
    got, _ = attend_amend(
        here(rows),
        here(kv),
        here(Spans.window(4)),
        relative(-1),
        kept,
        here(take),
        here(take - 10),
        scale=SCALE,
        impl=impl,
    )
    assert got.out.isnan().any(-1).tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@impls
def test_a_chain_of_entries_loses_nothing(impl: str, dtype: torch.dtype) -> None:
    """120 steps, each from the entry of the step before, under keys that later ones outweigh by far: fp32 error still.

    The same query throughout, so every result is exact attention of all keys. Subtracting what is re-read, as the paper
    does, loses all digits here.
    """
    steps = 120 if impl == "reference" or PLACE == "cuda" else 9
    band, length = 8, 20 + steps
    draw = torch.Generator().manual_seed(0)
    u = torch.nn.functional.normalize(torch.randn(16, generator=draw), dim=0)
    kv = random_kv([length], heads=1, dim=16, dtype=dtype)
    logit = 6.0 + 40.0 * torch.arange(length) / length  # the last keys weigh all: e^40 between first and last
    kv.k[0, 0, :length] = (logit[:, None] * u / SCALE).to(dtype)
    q = u.expand(1, 2, 16).to(dtype).contiguous()
    kept = Entries(here(torch.full((2, 2, 16), torch.nan).flatten(0, 1)), here(torch.full((4,), torch.nan)))
    for pos in range(20, length):
        rows = Rows(q, torch.tensor([0]), torch.tensor([pos]))
        mine = torch.tensor([[pos % 2 * 2, pos % 2 * 2 + 1]], dtype=torch.int32)
        first = pos == 20
        start = absolute(torch.full((1, 2), 0 if first else pos - band).int())
        take = torch.full_like(mine, -1) if first else (mine + 2) % 4
        got, _ = attend_amend(
            here(rows), here(kv), Spans((Span(here(start), relative(1)),), "query"), relative(1 - band), kept,
            here(take),
            here(mine), scale=SCALE, impl=impl,
        )  # fmt: skip
        if pos > 20:
            held_to(got, exact_attend(rows, kv, Spans.dense(), scale=SCALE), dtype)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"read_entry": torch.zeros(2, 4)}, r"read_entry: expected int32 \[2, 4\] on cpu, got float32"),
        ({"read_entry": torch.full((2, 4), 50).int()}, r"read_entry: expected in \[-1, 50\), got 50 to 50"),
        ({"write_entry": torch.full((2, 4), -2).int()}, r"write_entry: expected in \[-1, 50\), got -2 to -2"),
        ({"write_entry": torch.zeros(4, 2).int()}, r"write_entry: expected int32 \[2, 4\]"),
        ({"entries": Entries(torch.zeros(50, 8), torch.zeros(50))}, r"entries.out: expected torch.float32 \[50, 16\]"),
        ({"entries": Entries(torch.zeros(50, 16).half(), torch.zeros(50))}, "entries.out: expected torch.float32"),
        ({"entries": Entries(torch.zeros(50, 16), torch.zeros(50).half())}, "entries.lse: expected torch.float32"),
        ({"split": 3}, "split: expected bounds made by absolute"),
        ({"selection": None}, "selection: expected a Selection"),
        ({"scale": float("nan")}, "scale: expected a finite number"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    kv = random_kv([9], heads=2, dim=16)
    none = torch.full((2, 4), -1, dtype=torch.int32)
    given: dict[str, Any] = {
        "rows": random_rows(kv, 2), "kv": kv, "selection": Spans.dense(), "split": relative(-1), "entries": entries(),
        "read_entry": none, "write_entry": none, "scale": SCALE,
    } | wrong  # fmt: skip
    with pytest.raises(InvalidInput, match=message):
        attend_amend(**given)


@impls
def test_lists_are_split_too(impl: str) -> None:
    kv = random_kv([40], heads=2, dim=16)
    rows = Rows(torch.randn(1, 4, 16), torch.tensor([0]), torch.tensor([39]))
    listed = Lists(torch.tensor([[[3, 30, 9, 38], [0, 1, 2, 39]]]), torch.tensor([[4, 3]]))
    kept, none = Entries(*(here(x) for x in entries())), torch.full((1, 4), -1, dtype=torch.int32)
    got, lse = attend_amend(
        here(rows), here(kv), here(listed), absolute(10), kept, here(none), here(none), scale=SCALE, impl=impl
    )
    held_to(got, exact_attend(rows, kv, listed, scale=SCALE), torch.float32)
    first = exact_attend(rows, kv, Lists(torch.tensor([[[3, 9], [0, 1]]]), torch.tensor([[2, 2]])), scale=SCALE)
    torch.testing.assert_close(lse[:, :2].cpu().double(), first.lse[:, :2], rtol=1e-5, atol=1e-5)
