"""nearest against plain loops, over rings of any content: the reference, and the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops.match import Nearest, Ring, nearest
from longreach.ops.match import triton as kernels
from longreach.ops.match.triton_tuning import Tuning
from tests.ops.attend.kernels import HALF, PLACE, here, on_cpu

SEQUENCES, HEADS, DIM, SIZE = 3, 4, 16, 40
NUMBA = pytest.param("numba", marks=on_cpu)


def ring(seed: int, dtype: torch.dtype = torch.float32) -> Ring:
    """Filled in part: stamps of positions near 100, some of which are missing, NaN where nothing is."""
    draw = torch.Generator().manual_seed(seed)
    made = Ring.new(SEQUENCES, 2, (HEADS, SIZE, DIM), torch.empty(0, dtype=dtype))
    made.query.fill_(torch.nan)
    for s in range(SEQUENCES):
        for p in range(100 - SIZE, 100):
            if float(torch.rand((), generator=draw)) < 0.8:
                made.stamp[s, p % SIZE] = p
                made.query[s, :, p % SIZE] = torch.randint(-1, 2, (HEADS, DIM), generator=draw).to(dtype)
                made.depth[s, :, p % SIZE] = torch.randint(0, 5, (HEADS,), generator=draw).short()
    return made


def spelled_out(query: torch.Tensor, slot: int, pos: int, held: Ring, head: int, **bounds: Any) -> tuple[float, int]:
    best, where = float("inf"), -1
    for p in range(max(bounds["oldest"], pos - bounds["window"]), pos):
        place = p % SIZE
        if p < 0 or int(held.stamp[slot, place]) != p or not bounds["near"] <= pos - p <= bounds["far"]:
            continue
        if bounds["deepest"] is not None and int(held.depth[slot, head, place]) >= bounds["deepest"]:
            continue
        distance = float(((query.double() - held.query[slot, head, place].double()) ** 2).sum())
        unit = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[query.dtype]
        if distance <= 64 * unit**2 * float((query.double() ** 2).sum()):
            distance = 0.0
        if distance <= best:
            best, where = distance, p
    return best, where


@pytest.mark.covering
@pytest.mark.parametrize("impl", ["reference", "triton", "blocks", NUMBA])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    "bounds",
    [
        {"window": SIZE},
        {"window": 7},
        {"window": 33, "oldest": 80},
        {"window": SIZE, "near": 9, "far": 20},
        {"window": SIZE, "deepest": 2},
        {"window": 3, "near": 2, "far": 2, "oldest": 97, "deepest": 4},
    ],
    ids=str,
)
def test_any_ring(impl: str, dtype: torch.dtype, bounds: dict[str, Any]) -> None:
    """Several rows of one sequence too, and positions before and after all that the ring holds. Entries are small whole
    numbers: sums are exact, so distances and ties are the loops' own."""
    bounds = {"oldest": 0, "near": 1, "far": 1 << 30, "deepest": None, **bounds}
    held, draw = ring(4, dtype), torch.Generator().manual_seed(6)
    slot, pos = torch.tensor([2, 0, 2, 1, 1, 0]), torch.tensor([100, 93, 99, 0, 130, 141])
    query = torch.randint(-1, 2, (6, HEADS, DIM), generator=draw).to(dtype)
    given = here(query), here(slot), here(pos), here(held)
    if impl == "blocks":  # one block after another
        tune = Tuning(16, 1, 1 if PLACE == "cpu" else 4, 2, chained=PLACE == "cuda")
        got = kernels.nearest(*given, tune=tune, **bounds)
    else:
        got = nearest(*given, impl=impl, **bounds)
    assert got.distance.dtype == torch.float32 and got.position.dtype == torch.int32
    ties = 0
    for r in range(6):
        for h in range(HEADS):
            want = spelled_out(query[r, h], int(slot[r]), int(pos[r]), held, h, **bounds)
            assert (float(got.distance[r, h]), int(got.position[r, h])) == want
            ties += want[1] >= 0
    assert ties
    assert bool((got.position[3] == -1).all()) and bool(torch.isinf(got.distance[3]).all())


@pytest.mark.parametrize("impl", ["reference", "triton", NUMBA])
def test_nan_matches_nothing_and_no_row_gives_nothing(impl: str) -> None:
    held = ring(1)
    query = torch.randn(2, HEADS, DIM)
    query[0, 1, 3] = torch.nan
    both = torch.zeros(2, dtype=torch.int64), torch.full((2,), 100)
    got = nearest(here(query), *map(here, both), here(held), window=SIZE, impl=impl)
    assert got.position[0].cpu().ge(0).tolist() == [True, False, True, True] and bool((got.position[1] >= 0).all())
    found = nearest(*(here(x[:0]) for x in (query, *both)), here(held), window=SIZE, impl=impl)
    assert found.distance.shape == found.position.shape == (0, HEADS)


def test_distances_are_exact_in_fp64() -> None:
    held = Ring.new(1, 1, (1, 4, 8), torch.empty(0, dtype=torch.float64))
    held.query[:], held.stamp[:] = 0.0, torch.arange(4)
    query = torch.full((1, 1, 8), 1e-9, dtype=torch.float64)
    found = nearest(query, torch.tensor([0]), torch.tensor([4]), held, window=4)
    assert found.distance.dtype == torch.float64
    assert float(found.distance) == pytest.approx(8e-18) and int(found.position) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window: expected 1 to 40, the rows that the ring holds, got 0"),
        ({"window": 41}, "window: expected 1 to 40"),
        ({"window": 2.0}, "window: .* got 2.0"),
        ({"query": torch.randn(2, HEADS, DIM).half()}, r"query: expected \[R, 4, 16\] like the ring's float32"),
        ({"query": torch.randn(2, HEADS, 8)}, "query: expected"),
        ({"slot": torch.zeros(2)}, r"slot: expected int \[R=2\] on cpu, got float32"),
        ({"slot": torch.tensor([0, 3])}, r"slot: expected in \[0, 3\), got 0 to 3"),
        ({"pos": torch.zeros(3, dtype=torch.int64)}, r"pos: expected int \[R=2\]"),
        ({"ring": None}, "ring: expected a Ring, got NoneType"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "query": torch.randn(2, HEADS, DIM),
        "slot": torch.zeros(2, dtype=torch.int64),
        "pos": torch.full((2,), 100),
        "ring": ring(0),
        "window": 5,
    } | wrong
    with pytest.raises(InvalidInput, match=message):
        nearest(**given)


def test_who_computes_is_named() -> None:
    given = torch.randn(1, HEADS, DIM), torch.tensor([0]), torch.tensor([100]), ring(0)
    with pytest.raises(UnknownName, match="unknown impl of nearest 'fast'; known: auto, reference, triton"):
        nearest(*given, window=5, impl="fast")
    wide = Ring.new(1, 1, (HEADS, 4, DIM), torch.empty(0, dtype=torch.float64))
    with pytest.raises(Unsupported, match="compute in fp32"):
        nearest(given[0].double(), *given[1:3], wide, window=2, impl="triton")


@pytest.mark.skipif(PLACE == "cpu", reason="needs a CUDA device")
def test_the_same_every_time() -> None:
    """Nothing depends on which program comes first."""
    held = here(ring(3, torch.bfloat16))
    query = torch.randn(64, HEADS, DIM, device=PLACE).bfloat16()
    slot, pos = torch.zeros(64, dtype=torch.int64, device=PLACE), torch.full((64,), 100, device=PLACE)
    first: Nearest | None = None
    for _ in range(50):
        found = nearest(query, slot, pos, held, window=SIZE, impl="triton")
        first = first or found
        assert torch.equal(found.distance, first.distance) and torch.equal(found.position, first.position)
