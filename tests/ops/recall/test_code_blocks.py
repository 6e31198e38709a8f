"""Codes written beside the keys, found again by recall's view; incomplete blocks stay as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops import BlockCode, KVView, RotaryFrequencies, Rows
from longreach.ops.recall import code_blocks, code_completed, code_rows, code_view, planes_of
from longreach.testing.inputs import random_kv, random_rows
from tests.ops.attend.kernels import HALF, here
from tests.ops.recall.cases import blocks_held, code_of, keys_of_block
from tests.ops.test_rope import frequencies

impls = pytest.mark.parametrize("impl", ["reference", "triton"])
LENGTHS = [40, 0, 3, 65]
PAGES = [(None, 4), (None, 5), (8, 4), (4, 4), (3, 6), (16, 4), (2, 8)]  # (page, keys of a block)


def code_named(kind: Any, dim: int, layout: Any = "half", rotary: int | None = None) -> BlockCode:
    planes = here(planes_of(dim, 24, 1)) if kind == "hash" else None
    return BlockCode(kind, RotaryFrequencies(here(frequencies(rotary or dim)), layout), planes)


def empty_codes(kv: KVView, code: BlockCode, per: int, *, wide: bool = False) -> Tensor:
    """NaN everywhere; wide: part of a larger tensor, with more units than needed."""
    pages, heads, page, dim = kv.k.shape
    width = code.width(dim)
    memory = torch.full((pages, heads, -(-page // per) + 2 * wide, width * (1 + wide)), torch.nan, dtype=kv.k.dtype)
    return here(memory)[..., :width]


def check(kv: KVView, codes: Tensor, code: BlockCode, per: int, named: list[tuple[int, int]]) -> None:
    """The named blocks have their codes, to the rounding of their dtype; everything else is NaN still."""
    view = code_view(kv, codes.cpu(), per)
    assert code.frequencies is not None
    known = RotaryFrequencies(code.frequencies.inv_freq.cpu(), code.frequencies.layout)
    plain = BlockCode(code.kind, known, None if code.planes is None else code.planes.cpu())
    assert view.seq_lens.tolist() == [int(n) // per for n in kv.seq_lens]
    rest = codes.cpu().isnan().all(-1).sum()
    assert int(rest) == codes[..., 0].numel() - len(named) * kv.heads
    for seq, block in named:
        k = keys_of_block(kv, seq, block, per)
        want = plain.of_blocks(k.double(), torch.full((kv.heads,), block * per))
        got = torch.stack([code_of(view, seq, block, head) for head in range(kv.heads)])
        if code.kind == "hash":
            assert torch.equal(got, want)
            continue
        step = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(
            kv.k.dtype, 2e-6 if kv.k.dtype != torch.float64 else 0
        )
        torch.testing.assert_close(got, want, rtol=step, atol=step * float(k.abs().max()) + 1e-12)


@pytest.mark.covering
@impls
@pytest.mark.parametrize("kind", ["summary", "bounds", "hash"])
@pytest.mark.parametrize(("page", "per"), PAGES)
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("dim", [16, 40])
def test_named_blocks(impl: str, kind: Any, page: int | None, per: int, dtype: torch.dtype, dim: int) -> None:
    kv, code = random_kv(LENGTHS, heads=2, dim=dim, page=page, dtype=dtype, seed=per), code_named(kind, dim)
    codes = empty_codes(kv, code, per, wide=page is None)
    named = blocks_held(kv, per)[::2]
    more = [*named, (0, 40 // per + 1), (2, 0 if per > 3 else 9), (1, 0), (0, -1), named[0]]
    seq, block = torch.tensor(more).unbind(1)
    code_blocks(here(kv), codes, code, here(seq), here(block), per, impl=impl)
    check(kv, codes, code, per, named)
    none = here(torch.empty(0).long())
    code_blocks(here(kv), codes, code, none, none, per, impl=impl)


@impls
@pytest.mark.parametrize(("page", "per"), PAGES)
@pytest.mark.parametrize(("dtype", "dim", "rotary"), [(HALF, 16, 16), (torch.float32, 40, 24)])
def test_mean_values_beside_mean_keys(
    impl: str, page: int | None, per: int, dtype: torch.dtype, dim: int, rotary: int
) -> None:
    """The same keys as alone, and values as they are; by named blocks and by the rows that complete them."""
    kv, code = random_kv(LENGTHS, heads=2, dim=dim, page=page, dtype=dtype, seed=per), code_named("summary", dim)
    code = code_named("summary", dim, "half", rotary)
    codes, means = empty_codes(kv, code, per), empty_codes(kv, code, per)
    named = blocks_held(kv, per)
    seq, block = torch.tensor(named).unbind(1)
    code_blocks(here(kv), codes, code, here(seq), here(block), per, means=means, impl=impl)
    check(kv, codes, code, per, named)
    still = code_named("summary", dim)
    assert still.frequencies is not None
    unturned = replace(still, frequencies=still.frequencies._replace(inv_freq=here(torch.zeros(dim // 2).double())))
    check(replace(kv, k=kv.v), means, unturned, per, named)
    rows = Rows(torch.zeros(len(seq), 2, dim, dtype=dtype), seq, (block + 1) * per - 1)
    again = empty_codes(kv, code, per), empty_codes(kv, code, per)
    code_completed(here(rows), here(kv), again[0], code, per, means=again[1], impl=impl)
    for got, want in zip(again, (codes, means), strict=True):
        assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))


@impls
@pytest.mark.parametrize("kind", ["summary", "hash"])
@pytest.mark.parametrize(("layout", "rotary"), [("half", 8), ("interleaved", 16), ("interleaved", 8)])
def test_layouts_of_rotation(impl: str, kind: Any, layout: Any, rotary: int) -> None:
    kv, code = random_kv([33], heads=2, dim=16), code_named(kind, 16, layout, rotary)
    codes = empty_codes(kv, code, 8)
    seq, block = torch.tensor(blocks_held(kv, 8)).unbind(1)
    code_blocks(here(kv), codes, code, here(seq), here(block), 8, impl=impl)
    check(kv, codes, code, 8, blocks_held(kv, 8))


@impls
@pytest.mark.parametrize("kind", ["summary", "bounds", "hash"])
@pytest.mark.parametrize(("page", "per"), PAGES)
def test_rows_write_the_blocks_that_they_complete(impl: str, kind: Any, page: int | None, per: int) -> None:
    kv, code = random_kv([24, 0, 7, 20], heads=2, dim=16, page=page, seed=per), code_named(kind, 16)
    seq, pos = torch.tensor([0, 0, 0, 2, 3, 3]), torch.tensor([per - 1, per, 2 * per - 1, 6, 20, 19])
    codes = empty_codes(kv, code, per)
    rows = Rows(torch.zeros(6, 2, 16), seq, pos)
    named = {
        (int(b), int(n) // per) for b, n in zip(seq, pos, strict=True) if n % per == per - 1 and n < kv.seq_lens[b]
    }
    code_completed(here(rows), here(kv), codes, code, per, impl=impl)
    check(kv, codes, code, per, sorted(named))
    again = empty_codes(kv, code, per)
    code_completed(replace(here(rows), pos=here(pos * 0)), here(kv), again, code, per, slot=here(pos), impl=impl)
    assert torch.equal(again.nan_to_num(9.0), codes.nan_to_num(9.0))


@pytest.mark.covering
@impls
@pytest.mark.parametrize("kind", ["summary", "bounds", "hash"])
@pytest.mark.parametrize(("layout", "rotary"), [("half", 24), ("interleaved", 16)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_codes_of_rows(impl: str, kind: Any, layout: Any, rotary: int, dtype: torch.dtype, rows: int) -> None:
    code = code_named(kind, 24, layout, rotary)
    q = torch.randn(rows, 24, 6).to(dtype).transpose(1, 2)  # any strides
    pos = torch.randint(0, 100_000, (rows,), dtype=torch.int32)
    got = code_rows(here(Rows(q, pos * 0, pos)), code, impl=impl)
    assert got.dtype == dtype and got.shape == (rows, 6, code.width(24))
    assert torch.equal(got, code.of_rows(here(q), here(pos)))


def test_codes_of_rows_that_do_not_fit() -> None:
    rows = Rows(torch.randn(1, 2, 8), torch.zeros(1).long(), torch.zeros(1).long())
    for given, message in (((None, BlockCode("bounds")), "rows: expected Rows"), ((rows, "hash"), "code: expected a")):
        with pytest.raises(InvalidInput, match=message):
            code_rows(*given)  # type: ignore[arg-type]


@impls
def test_nan_stays_in_its_block(impl: str) -> None:
    kv, code = random_kv([32], heads=2, dim=16), code_named("summary", 16)
    kv.k[0, 1, 9] = torch.nan
    codes = empty_codes(kv, code, 8)
    seq, block = torch.tensor(blocks_held(kv, 8)).unbind(1)
    code_blocks(here(kv), codes, code, here(seq), here(block), 8, impl=impl)
    assert codes.isnan().any(-1)[0, :, :4].cpu().tolist() == [[False] * 4, [False, True, False, False]]


def wrong_calls() -> list[tuple[dict[str, Any], type[Exception], str]]:
    kv, code = random_kv([9, 3], heads=2, dim=8, page=4), BlockCode("bounds")
    ints = torch.zeros(2).long()
    codes = torch.zeros(kv.k.shape[0], 2, 2, 16)
    good: dict[str, Any] = {"kv": kv, "codes": codes, "code": code, "seq": ints, "block": ints, "per": 2}
    return [
        (good | {"kv": None}, InvalidInput, "kv: expected a KVView, got NoneType"),
        (good | {"code": "bounds"}, InvalidInput, "code: expected a BlockCode, got str"),
        (good | {"per": 0}, InvalidInput, "per: expected a count of slots >= 1, got 0"),
        (good | {"per": 3}, Unsupported, "blocks of 3 keys neither divide pages of 4 slots nor are multiples of them"),
        (
            good | {"codes": torch.zeros(2)},
            InvalidInput,
            r"codes: expected torch.float32 \[P=7, G=2, units >= 2, F=16\]",
        ),
        (good | {"codes": codes.half()}, InvalidInput, "codes: expected torch.float32 .* got float16"),
        (good | {"codes": torch.zeros(7, 2, 2, 32)[..., ::2]}, InvalidInput, "codes: expected a contiguous last dim"),
        (good | {"means": codes}, InvalidInput, "means: written beside codes by summary, not 'bounds'"),
        (good | {"seq": ints.float()}, InvalidInput, r"seq: expected int \[n\] on cpu, got float32"),
        (good | {"block": ints[:1]}, InvalidInput, r"block: expected \[2\] like seq, got int64\[1\]"),
        (good | {"seq": ints + 2}, InvalidInput, r"seq: expected in \[0, B=2\), got 2 to 2"),
    ]


@pytest.mark.parametrize(("given", "error", "message"), wrong_calls(), ids=range(len(wrong_calls())))
def test_what_does_not_fit_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        code_blocks(**given)


def test_rows_that_do_not_fit_are_refused() -> None:
    kv, code = random_kv([9, 3], heads=2, dim=8, evicted=True), BlockCode("bounds")
    with pytest.raises(InvalidInput, match="slot: expected the rows' slots, as slots are not positions"):
        code_completed(random_rows(kv, 2), kv, torch.zeros(2, 2, 6, 16), code, 2)
    with pytest.raises(UnknownName, match="unknown impl of code_blocks 'fast'; known: auto, reference"):
        code_completed(
            random_rows(kv, 2), kv, torch.zeros(2, 2, 6, 16), code, 2, slot=torch.zeros(2).long(), impl="fast"
        )
