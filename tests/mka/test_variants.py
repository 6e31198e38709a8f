"""The attention of every variant: decoding equals training, causality, gradients, gate 0, packed sequences."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, LongreachError
from longreach.mka.config import MKAConfig
from longreach.mka.fast import FastMemory, fuse
from longreach.mka.module import KINDS, Attention, AttentionShape, LayerState, MemoryAttention, attention
from tests.mka import layer as layers
from tests.mka.layer import SHAPE, WIDTH, Decoding

SMALL: dict[str, Any] = {"block": 4, "window": 8, "blocks": 3}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "fastmka": ("fastmka", {}),
    "fastmka, mean": ("fastmka", {"summary": "mean"}),
    "fastmka, 3 tiers": ("fastmka", {**SMALL, "tiers": (1, 2, 3)}),
    "fastmka, hash": ("fastmka", {**SMALL, "tiers": (1, 3), "recall": "hash", "bits": 16}),
    "mka": ("mka", {**SMALL, "recall": "summary"}),
    "mka, gated": ("mka", {**SMALL, "mode": "gated"}),
    "mka, bounds": ("mka", {**SMALL, "recall": "bounds", "routing": "top1"}),
    "mka, 2 tiers": ("mka", {"tiers": (1, 2), "decay": 0.9}),
    "block": ("block_mka", {**SMALL, "recall": "summary"}),
    "block, hash": ("block_mka", {**SMALL, "recall": "hash", "bits": 32}),
    "block, bounds": ("block_mka", {**SMALL, "recall": "bounds", "routing": "top2"}),
    "block, index": ("block_mka", {**SMALL, "recall": "index", "features": 8}),
    "block, local": ("block_mka", {"block": 4, "window": 8, "tiers": (1, 2)}),
    "block, fixed": ("block_mka", {**SMALL, "routing": "fixed"}),
    "block, window": ("block_mka", {"block": 4, "window": 8, "tiers": (1,)}),
}
every = pytest.mark.parametrize("name", CONFIGS)
with_soft_routing = pytest.mark.parametrize(
    "name", [n for n, (_, o) in CONFIGS.items() if "top" not in o.get("routing", "")]
)
full = pytest.mark.parametrize("name", [n for n, (variant, _) in CONFIGS.items() if variant != "block_mka"])


def layer_of(name: str, gate: float = 0.7, **more: Any) -> MemoryAttention:
    variant, options = CONFIGS[name]
    return layers.layer_of(MKAConfig.make(variant, **{**options, **more}), gate)


def inputs(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def dense_of(layer: MemoryAttention) -> Attention:
    """The layer of the same projections without memory levels."""
    plain = attention("gqa", SHAPE).double()
    plain.load_state_dict({n: x for n, x in layer.state_dict().items() if not n.startswith("mka.")})
    return plain


@every
@torch.no_grad()
def test_ragged_decoding_equals_training(name: str) -> None:
    layer, length = layer_of(name), 45
    x = inputs(2, length)
    whole, state = layer(x), Decoding(layer, 2, length)
    for counts in [(9, 14), (13, 4), *[(1, 1)] * 20, (3, 7)]:
        parts = [slice(n, n + c) for n, c in zip(state.lengths, counts, strict=True)]
        got = state.read(torch.cat([x[b, part] for b, part in enumerate(parts)]), counts)
        close(got, torch.cat([whole[b, part] for b, part in enumerate(parts)]))
    assert state.lengths == [45, 45]


@every
@torch.no_grad()
def test_a_layer_with_state_equals_training(name: str) -> None:
    layer, x, state = layer_of(name), inputs(2, 37), LayerState()
    got = [layer(part, state=state) for part in x.split([11, 2, *[1] * 20, 4], 1)]
    close(torch.cat(got, 1), layer(x))
    with pytest.raises(InvalidInput, match="leave out mask"):
        layer(x, state=state, mask=torch.ones(2, 37))


@every
@torch.no_grad()
def test_the_future_changes_nothing(name: str) -> None:
    layer, x = layer_of(name), inputs(1, 40)
    changed = torch.cat([x[:, :27], inputs(1, 13, seed=1)], 1)
    a, b = layer(x), layer(changed)
    close(a[:, :27], b[:, :27])
    assert not torch.allclose(a[:, 27:], b[:, 27:])


@every
@torch.no_grad()
def test_packed_and_padded_sequences_equal_separate_ones(name: str) -> None:
    layer, lengths = layer_of(name), (13, 30, 2, 19)
    parts = [inputs(1, n, seed=n) for n in lengths]
    alone = [layer(part) for part in parts]
    starts = torch.cat([torch.arange(n) for n in lengths])[None]
    close(layer(torch.cat(parts, 1), position_ids=starts), torch.cat(alone, 1))
    mask = torch.stack([torch.arange(30) >= 30 - n for n in lengths])
    padded = torch.full((4, 30, WIDTH), torch.nan, dtype=torch.float64)
    for row, part in zip(padded, parts, strict=True):
        row[30 - part.shape[1] :] = part
    got = layer(padded, mask=mask)
    close(got[mask], torch.cat(alone, 1)[0])
    assert bool((got[~mask] == 0).all())


@every
@torch.no_grad()
def test_an_offset_of_all_positions_changes_nothing_but_bounds(name: str) -> None:
    """`bounds` compares channels of rotated keys, so that it chooses by where positions begin."""
    layer, x = layer_of(name), inputs(1, 45)
    whole, length = layer(x), x.shape[1]
    moved = layer(x, position_ids=torch.arange(50, 50 + length)[None])
    if layer.config.recall == "bounds":
        assert not torch.allclose(moved, whole)
        return
    torch.testing.assert_close(moved, whole, rtol=0, atol=1e-6)  # angles are fp32
    mask = torch.arange(length + 5)[None] >= 5
    padded = torch.cat([x[:, :5], x], 1)
    got = layer(padded, mask=mask, position_ids=torch.arange(length + 5)[None])[:, 5:]
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-6)


@full
@torch.no_grad()
def test_gate_0_is_the_layer_that_was_converted(name: str) -> None:
    """To rounding: levels 1 to 3 attend through longreach's operator, the dense layer through torch's."""
    layer, x = layer_of(name, gate=0.0), inputs(2, 41)
    close(layer(x), dense_of(layer)(x))


@torch.no_grad()
def test_block_mka_at_gate_0_is_dense_where_everything_is_recalled() -> None:
    layer, x = layer_of("block", gate=0.0, blocks=100), inputs(2, 41)
    close(layer(x), dense_of(layer)(x))
    few = layer_of("block", gate=0.0)
    assert not torch.allclose(few(x), dense_of(few)(x))
    close(few(x)[:, :20], dense_of(few)(x)[:, :20])  # 3 blocks of 4, a window of 8 to 11


@with_soft_routing
def test_gradients(name: str) -> None:
    """Against finite differences, in fp64, of inputs and all parameters, away from gate 0."""
    layer = layer_of(name)
    names = [n for n, p in layer.named_parameters() if "index" not in n]  # trained by distillation alone
    parameters = [layer.get_parameter(n).detach().requires_grad_() for n in names]

    def out(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    given = inputs(1, 21).requires_grad_(), *parameters
    assert torch.autograd.gradcheck(out, given, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True)
    sizes = torch.autograd.grad(out(*given).square().sum(), given, allow_unused=True)
    moved = {n for n, g in zip(names, sizes[1:], strict=True) if g is not None and float(g.abs().max()) > 0}
    if len(layer.config.tiers) > 1:
        assert moved == set(names)


@every
def test_gates_get_a_gradient_at_0(name: str) -> None:
    layer = layer_of(name, gate=0.0)
    layer(inputs(1, 33)).square().sum().backward()
    gate = layer.mka.router.gate.bias.grad
    assert gate is not None and bool(gate.isfinite().all())
    if len(layer.config.tiers) > 1:
        assert float(gate.abs().max()) > 1e-3


@every
@torch.no_grad()
def test_nan_of_one_sequence_stays_there(name: str) -> None:
    layer, x = layer_of(name), inputs(2, 33)
    whole = layer(x)
    x[1, 5] = torch.nan
    spoilt = layer(x)
    close(spoilt[0], whole[0])
    assert bool(spoilt[1, 5].isnan().all())


def test_a_layer_alone_shares_no_blocks() -> None:
    with pytest.raises(LongreachError, match="a layer alone shares no blocks"):
        attention("block_mka", SHAPE, share=(0,))
    with pytest.raises(InvalidInput, match="layers: without effect in a layer alone"):
        attention("block_mka", SHAPE, layers=(3,))


def test_bounds_of_wide_heads_are_refused_at_construction() -> None:
    with pytest.raises(InvalidInput, match="up to 128 channels, got 256"):
        attention("block_mka", AttentionShape(64, 2, 1, 256))
    attention("block_mka", AttentionShape(64, 2, 1, 256), recall="summary")


@pytest.mark.parametrize("sizes", [(24, 6, 0, 8), (0, 6, 2, 8), (24, 6.0, 2, 8), (24, True, 1, 8), (24, 6, 2, -8)])
def test_sizes_are_counts(sizes: Any) -> None:
    with pytest.raises(InvalidInput, match=r"(width|heads|kv_heads|dim): expected a count >= 1, got"):
        AttentionShape(*sizes)


@torch.no_grad()
def test_fastmka_hashes_in_fp64() -> None:
    """Projections near 0 of large channels have the signs of fp64, in whatever order fp32 would add them."""
    places = torch.tensor(list(permutations(range(SHAPE.dim), 3)))
    q = torch.zeros(len(places), SHAPE.dim).scatter(1, places, torch.tensor([1e8, -1.0, -1e8]).expand(len(places), 3))
    layer = layer_of("fastmka, hash", blocks=1).float()
    layer.mka.planes.fill_(1.0)
    memory = FastMemory.empty(layer.config, 1, 5, SHAPE.kv_heads, SHAPE.dim, torch.float32, "cpu")
    assert memory.sums is not None
    memory.sums[0, :, :, : SHAPE.dim] = 1.0
    memory.sums[0, 0] = -1.0  # the block whose code is that of the queries
    zeros, rows = torch.zeros(len(q), SHAPE.kv_heads, SHAPE.dim), len(q)
    _, v, _, weights = fuse(layer.mka, q[:, None].expand(-1, SHAPE.heads, -1), zeros, zeros, zeros[:, 0, 0].long(),
                            torch.full((rows,), 19), [rows], memory, scale=1.0)  # fmt: skip
    torch.testing.assert_close(v, (weights[:, 1, None, None] * -0.25).expand_as(v))


@pytest.mark.parametrize("name", ["mka, gated", "block", "block, local"])
def test_rows_whose_weights_are_all_below_0(name: str) -> None:
    """They attend to level 1 alone, when they are decoded too, and the gates of the other levels have a gradient."""
    layer, x = layer_of(name), inputs(1, 45)
    start, router = torch.tensor(layer.config.start), layer.mka.router
    with torch.no_grad():
        router.gate.bias.copy_(torch.where(start > 0, 3.0, -0.1))
        router.down.bias[1].add_(20.0)  # lambda of level 2 is near 1: weights are -2 and -0.1
        got, state = layer(x), LayerState()
        close(torch.cat([layer(part, state=state) for part in x.split([30, *[1] * 15], 1)], 1), got)
        q = layer.q_proj(x[0]).unflatten(-1, (SHAPE.heads, SHAPE.dim))
        below = (router(q) <= 0).all(-1) & (torch.arange(45) >= 20)  # rows with blocks
    assert bool(below.any())
    window = layer_of("block, window" if layer.config.variant == "block_mka" else "mka, gated", gate=0.0)
    window.load_state_dict({n: p for n, p in layer.state_dict().items() if "mka" not in n}, strict=False)
    close(got[0, below], window(x)[0, below])
    layer(x)[0, below].square().sum().backward()
    gate = router.gate.bias.grad
    assert gate is not None and float(gate[1:].abs().min()) > 0


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_state_of_other_sizes_is_refused(kind: str) -> None:
    layer, state = attention(kind, SHAPE).double(), LayerState()
    layer(inputs(2, 5), state=state)
    with pytest.raises(InvalidInput, match=r"state: expected 3 sequences, \d KV heads and 16 channels .* got 2, "):
        layer(inputs(3, 5), state=state)
    other = attention("fastmka", AttentionShape(WIDTH, 6, 3, 8)).double()
    with pytest.raises(InvalidInput, match=r"3 KV heads and 8 channels a head, got 2, \d and 16; give each"):
        other(inputs(2, 5), state=state)
    assert state.length == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 3, WIDTH + 1), (3, WIDTH), (1, 0, WIDTH)])
def test_input_of_another_shape_is_refused_by_its_name(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=rf"x: expected \[B, T >= 1, width={WIDTH}\], got"):
        attention(kind, SHAPE)(torch.zeros(shape))
