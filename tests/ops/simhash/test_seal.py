"""Keys of a cache that enter the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, LongreachError
from longreach.ops import KVView
from longreach.ops.simhash import HashTables, build, codes, projections, seal, sealing, triton
from tests.ops.attend.kernels import HALF, PLACE, here
from tests.ops.simhash.test_tables import held_to
from tests.ops.simhash.test_triton import back, fresh

BITS, TABLES, DIM, FIRST = 4, 5, 24, 3
DRAWN = projections(DIM, BITS, TABLES, 7)
SLOTS = torch.tensor([3, 0])  # of four sequences in the tables


def view(lengths: list[int], page: int | None, dtype: torch.dtype, seed: int = 0) -> tuple[KVView, Tensor]:
    """A view with two KV heads, other memory poisoned; and its keys [B, N, 2, DIM]."""
    draw, most = torch.Generator().manual_seed(seed), max(lengths)
    keys = torch.randn(len(lengths), most, 2, DIM, generator=draw).to(dtype)
    if page is None:
        memory = torch.full((len(lengths), 2, most, DIM), torch.nan, dtype=dtype)
        for b, n in enumerate(lengths):
            memory[b, :, :n] = keys[b, :n].transpose(0, 1)
        return KVView(memory, torch.zeros_like(memory), torch.tensor(lengths)), keys
    table = torch.randperm(len(lengths) * -(-most // page), generator=draw).view(len(lengths), -1).int()
    memory = torch.full((table.numel(), 2, page, DIM), torch.nan, dtype=dtype)
    for b, n in enumerate(lengths):
        for t in range(n):
            memory[table[b, t // page], :, t % page] = keys[b, t]
    return KVView(memory, torch.zeros_like(memory), torch.tensor(lengths), table), keys


def centres(keys: Tensor, centred: int) -> Tensor:
    """fp32 [B, 2, DIM]: means of the finite ones among the first keys."""
    some = keys[:, FIRST : FIRST + centred].double()
    finite = some.isfinite().all(-1, keepdim=True)
    return (torch.where(finite, some, 0).sum(1) / finite.sum(1).clamp(min=1)).float()


@pytest.mark.parametrize("impl", ["reference", "numba", "triton"])
@pytest.mark.parametrize("page", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("block", [4, 64, None])
def test_in_any_steps(impl: str, page: int | None, dtype: torch.dtype, block: int | None) -> None:
    """Over the ends of segments and of blocks; back, and on with other keys. Other sequences keep every byte."""
    place = PLACE if impl == "triton" else "cpu"
    (kv, keys), drawn = view([70, 41], page, dtype), DRAWN.to(place)
    keys[0, 5, 0, 3] = torch.nan
    page_of, offset = kv.locate(torch.tensor([0]), torch.tensor([5]))
    kv.k[page_of, 0, offset, 3] = torch.nan
    tables, centre = fresh(4, 80, BITS, 16, FIRST, tables=TABLES), torch.full((4, 2, DIM), 5.0, device=PLACE)
    tables = HashTables(*(x.to(place) for x in (tables.ids, tables.offsets, tables.stop)), tables.size, FIRST)
    centre, kv, slots = centre.to(place), here(kv) if impl == "triton" else kv, SLOTS.to(place)
    untouched = [x.cpu().view(torch.int16)[1:3].clone() for x in (tables.ids, tables.offsets)]
    want = centres(keys, 20)
    known = torch.zeros(4, 80, 2, TABLES, dtype=torch.int16)
    for b, n in enumerate((70, 41)):
        hashed = codes(keys[b, :n], DRAWN, centre=want[b], impl="reference")
        known[SLOTS[b], :n] = hashed.view(torch.int16)
    held = [FIRST, FIRST]
    for stops in ([2, 40], [30, 10], [31, 40], [70, 41]):
        if stops == [31, 40]:  # the owner cuts the second one
            tables.stop[0] = held[1] = 12
        found = seal(kv, slots, tables, drawn, centre, torch.tensor(stops, device=place), centred=20, block=block,
                     impl=impl)  # fmt: skip
        assert found.tolist() == held
        held = [max(a, b) for a, b in zip(held, stops, strict=True)]
        assert tables.stop[slots].tolist() == held
        for b, slot in enumerate(SLOTS.tolist()):
            if held[b] > FIRST:
                torch.testing.assert_close(centre[slot].cpu(), want[b], rtol=0, atol=1e-7)
                one = HashTables(*(x[slot : slot + 1] for x in (tables.ids, tables.offsets, tables.stop)), 16, FIRST)
                held_to(back(one), known[slot : slot + 1].view(torch.uint16))
    same = [x.cpu().view(torch.int16)[1:3] for x in (tables.ids, tables.offsets)]
    assert all(torch.equal(a, b) for a, b in zip(untouched, same, strict=True))
    assert bool((centre[1:3] == 5).all())


def test_whole_segments_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment's codes at a time, and then three; some programs' keys and tables are beyond the last ones."""
    tuning = triton.Tuning
    for at_once in (1, 3):
        most = at_once * 2 * 2 * 2 * TABLES * 16  # bytes of codes of as many segments: sequences, KV heads
        small = tuning(codes=most, hashed=32, hashed_tables=2)
        monkeypatch.setattr(triton, "Tuning", lambda small=small: small)
        test_in_any_steps("triton", 7, torch.float32, None)


@pytest.mark.parametrize("impl", ["reference", "numba", "triton"])
def test_without_a_centre(impl: str) -> None:
    (kv, keys), tables = view([30, 30], None, torch.float32), fresh(4, 30, BITS, 16, FIRST, tables=TABLES)
    centre = torch.zeros(4, 2, DIM, device=PLACE)
    kv = here(kv)
    seal(kv, here(SLOTS), tables, here(DRAWN), centre, here(torch.tensor([30, 0])), centred=0, impl=impl)
    hashed = codes(keys[:1], DRAWN, impl="reference")
    one = HashTables(*(x[3:4] for x in (tables.ids, tables.offsets, tables.stop)), 16, FIRST)
    held_to(back(one), hashed)
    assert not centre.any()


def test_an_interrupt_leaves_tables_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    (kv, _), count = view([70, 41], None, torch.float32), [0]

    def fails(*given: Any) -> None:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        build(*given, impl="reference")

    tables, whole = (fresh(4, 80, BITS, 16, FIRST, tables=TABLES) for _ in range(2))
    centre, stop = torch.zeros(4, 2, DIM), torch.tensor([70, 41])

    def hashes(x: Tensor, drawn: Tensor, centre: Tensor) -> Tensor:
        return codes(x, drawn, centre=centre, impl="reference")

    with pytest.raises(KeyboardInterrupt):
        sealing.seal(hashes, fails, kv, SLOTS, tables, DRAWN, centre, stop, 20)
    assert tables.stop.tolist() == [FIRST, FIRST, FIRST, 48]
    for each in (tables, whole):
        seal(kv, SLOTS, each, DRAWN, centre, stop, centred=20, impl="reference")
    assert all(
        torch.equal(a.int()[SLOTS][..., :38], b.int()[SLOTS][..., :38])
        for a, b in ((tables.ids, whole.ids), (tables.stop[:, None], whole.stop[:, None]))
    )


def test_bad_input() -> None:
    (kv, _), tables = view([70, 41], None, torch.float32), fresh(4, 60, BITS, 16, FIRST, tables=TABLES)
    good: dict[str, Any] = {
        "kv": kv, "slots": SLOTS, "tables": tables, "projections": DRAWN, "centre": torch.zeros(4, 2, DIM),
        "stop": torch.tensor([40, 40]), "centred": 10,
    }  # fmt: skip
    for bad, message in (
        ({"stop": torch.tensor([40, 42])}, r"stop: expected at most the \[60, 41\] keys there, got \[40, 42\]"),
        ({"stop": torch.tensor([61, 40])}, r"stop: expected at most the \[60, 41\] keys there, got \[61, 40\]"),
        ({"centred": 39, "stop": torch.tensor([40, 5])}, r"got \[42, 42\], centres included"),
        ({"slots": torch.tensor([1, 1])}, r"slots: expected distinct ones, got \[1, 1\]"),
        ({"slots": torch.tensor([1, 4])}, r"slots: expected in \[0, B=4\), got 1 to 4"),
        ({"slots": torch.tensor([1])}, r"slots: expected int32 or int64 \[B=2\]"),
        ({"stop": torch.tensor([1.0, 2.0])}, r"stop: expected int32 or int64 \[B=2\]"),
        ({"centre": torch.zeros(2, 2, DIM)}, r"centre: expected contiguous fp32 \[4, 2, 24\]"),
        ({"projections": DRAWN[:, :3]}, r"projections: expected bf16 \[5, 4, 24\]"),
        ({"centred": True}, "centred: expected an int >= 0, got True"),
        ({"block": 0}, "block: expected an int >= 1, got 0"),
        ({"kv": None}, "kv: expected a KVView, got"),
        ({"tables": None}, "tables: expected HashTables, got"),
    ):
        with pytest.raises(InvalidInput, match=message):
            seal(**{**good, **bad})
    with pytest.raises(LongreachError, match="impl"):
        seal(**good, impl="cuda")
    assert (tables.stop == FIRST).all()
