"""place: rows of any strides rotated and written to memory of any layout, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops.place import place
from longreach.ops.rope import RotaryAngles
from longreach.testing.inputs import random_kv
from longreach.testing.tolerance import unit_roundoff
from tests.ops.attend.kernels import HALF, here
from tests.ops.compiler import printed

impls = pytest.mark.parametrize("impl", ["reference", "triton"])
PAGE, OFFSET = torch.tensor([3, 0, 3, 1, 2]), torch.tensor([0, 6, 5, 2, 2])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """fp64, channel by channel from the definition."""
    out, pairs = x.double().clone(), cos.shape[1]
    for i in range(pairs):
        a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        c, s = cos[:, None, i].double(), sin[:, None, i].double()
        out[..., a], out[..., b] = (
            x[..., a].double() * c - x[..., b].double() * s,
            x[..., b].double() * c + x[..., a].double() * s,
        )
    return out


@pytest.mark.covering
@impls
@pytest.mark.parametrize("memory", ["plain", "packed", "tokens"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "dim", "pairs", "dtype"),
    [(3, 24, 12, torch.float32), (2, 16, 4, HALF), (1, 80, 40, HALF), (5, 8, 0, torch.float32)],
)
def test_rows_are_turned_and_lie_where_they_belong(
    impl: str, memory: Any, layout: Any, heads: int, dim: int, pairs: int, dtype: torch.dtype
) -> None:
    held = here(random_kv([40, 0, 31], heads=heads, dim=dim, page=7, memory=memory, dtype=dtype))
    before = [x.cpu().clone() for x in (held.k, held.v)]
    k = torch.randn(5, dim, heads).to(dtype).transpose(1, 2)  # strided
    v = torch.randn(heads, 5, dim).to(dtype).transpose(0, 1)
    angle, size = torch.randn(pairs, 5).T, 1.3  # strided, and a YaRN factor
    cos, sin = angle.cos() * size, angle.sin() * size
    place(
        held.k, held.v, here(k), here(v), here(PAGE), here(OFFSET), RotaryAngles(here(cos), here(sin), layout),
        impl=impl,
    )  # fmt: skip
    at = (PAGE, slice(None), OFFSET)
    want = turned(k, cos, sin, layout)
    most = 2 * size * k.double().abs().amax(-1, keepdim=True)
    bound = most * (4 * unit_roundoff(torch.float32) + unit_roundoff(dtype))
    got = held.k.cpu()[at].double()
    assert ((got - want).abs() <= bound).all()
    assert torch.equal(got[..., 2 * pairs :], k.double()[..., 2 * pairs :])
    before[0][at], before[1][at] = held.k.cpu()[at], v
    for memory_of, was in zip((held.k, held.v), before, strict=True):
        torch.testing.assert_close(memory_of.cpu(), was, rtol=0, atol=0, equal_nan=True)


@impls
def test_no_row(impl: str) -> None:
    kv = here(random_kv([4], heads=2, dim=8))
    none, at = here(torch.empty(0, 2, 8)), here(torch.empty(0).long())
    place(kv.k, kv.v, none, none, at, at, RotaryAngles(here(torch.empty(0, 4)), here(torch.empty(0, 4))), impl=impl)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": torch.zeros(3, 2, 4)}, r"k: expected torch.float32 \[3, 2, 8\] on cpu, got float32\[3, 2, 4\]"),
        ({"v": torch.zeros(3, 2, 8).half()}, "v: expected torch.float32"),
        ({"page": torch.zeros(3)}, r"page: expected int \[R\] on cpu, got float32"),
        ({"values": torch.zeros(1, 2, 7, 4)}, "values: expected float32"),
        ({"angles": RotaryAngles(torch.zeros(3, 5), torch.zeros(3, 5))}, r"cos: expected float \[R=3, rotary/2\]"),
        ({"angles": RotaryAngles(torch.zeros(3, 4), torch.zeros(3, 3))}, "sin: expected float"),
        ({"angles": RotaryAngles(torch.zeros(2, 4), torch.zeros(2, 4))}, "cos: expected float"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    given = {
        "keys": torch.zeros(1, 2, 7, 8), "values": torch.zeros(1, 2, 7, 8), "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8), "page": torch.zeros(3).long(), "offset": torch.arange(3),
        "angles": RotaryAngles(torch.zeros(3, 4), torch.zeros(3, 4)),
    } | wrong  # fmt: skip
    with pytest.raises(InvalidInput, match=message):
        place(**given)


def test_who_computes_is_named() -> None:
    memory, rows, at = torch.zeros(1, 2, 7, 8), torch.zeros(3, 2, 8), torch.arange(3)
    angles = RotaryAngles(torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(UnknownName, match="unknown impl of place 'fast'; known: auto, reference, triton"):
        place(memory, memory, rows, rows, torch.zeros_like(at), at, angles, impl="fast")
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        wide = (x.double() for x in (memory, memory, rows, rows))
        place(*(here(x) for x in wide), here(torch.zeros_like(at)), here(at), here_angles(angles), impl="triton")


def here_angles(angles: RotaryAngles) -> RotaryAngles:
    return RotaryAngles(here(angles.cos), here(angles.sin), angles.layout)


COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops.place import triton, triton_kernels
from longreach.ops.rope import RotaryAngles
from longreach.testing.compile import compiling

with patch.object(triton, "INTERPRETED", False), compiling(triton_kernels, "place_rows") as made:
    for dtype in (torch.bfloat16, torch.float32):
        memory, rows = torch.zeros(2, 8, 64, 128, dtype=dtype), torch.zeros(4, 8, 128, dtype=dtype)
        angles = RotaryAngles(torch.zeros(4, 64), torch.zeros(4, 64))
        with patch.object(triton.torch.Tensor, "device", property(lambda self: torch.device("cuda", 0))):
            triton.place(memory, memory, rows, rows, torch.zeros(4).long(), torch.zeros(4).long(), angles)
print(json.dumps([[m.metadata.name, "cubin" in m.asm] for m in made]))
"""


def test_compiles_for_an_h200() -> None:
    assert printed(COMPILE) == [["place_rows", True]] * 2
