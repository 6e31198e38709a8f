"""MHA, GQA, MQA and MLA as layers, and made from pretrained weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from longreach.errors import InvalidInput, LongreachError, UnknownName
from longreach.mka.baselines import LatentKV, MLAConfig, average_heads, fastest_channels, regroup, repeat_heads
from longreach.mka.module import Attention, AttentionShape, LatentAttention, LayerState, attention

SHAPE = AttentionShape(48, 8, 4, 16)


def inputs(length: int = 23) -> Tensor:
    return torch.randn(2, length, SHAPE.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mha", "gqa", "mqa", "mla"])
def test_decoding_padding_and_packing(kind: str) -> None:
    torch.manual_seed(0)
    layer, x, state = attention(kind, SHAPE).double(), inputs(), LayerState()
    whole = layer(x)
    parts = [layer(part, state=state) for part in x.split([9, 1, 1, 12], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    heads = {"mha": 8, "mqa": 1}.get(kind, 4)
    assert state.tensors["k"].shape == (2, heads, 23, 16)
    mask = torch.arange(23) >= torch.tensor([[0], [6]])
    padded = torch.cat([x[:1], torch.cat([torch.full_like(x[1:, :6], torch.nan), x[1:, :17]], 1)])
    torch.testing.assert_close(layer(padded, mask=mask)[1, 6:], layer(x[1:, :17])[0])
    starts = torch.cat([torch.arange(10), torch.arange(13)])[None]
    torch.testing.assert_close(layer(x[:1], position_ids=starts)[:, 10:], layer(x[:1, 10:]))


@torch.no_grad()
def test_repeated_heads_are_the_same_function_and_averages_undo_them() -> None:
    gqa, mha = attention("gqa", SHAPE).double(), attention("mha", SHAPE).double()
    for name in ("k_proj", "v_proj"):
        weight = getattr(gqa, name).weight
        getattr(mha, name).weight.copy_(repeat_heads(weight, 4, 8))
        assert torch.equal(average_heads(repeat_heads(weight, 4, 8), 8, 4), weight)
        assert torch.equal(regroup(weight, 4, 1), weight.unflatten(0, (4, 16)).mean(0))
    mha.q_proj.load_state_dict(gqa.q_proj.state_dict()), mha.o_proj.load_state_dict(gqa.o_proj.state_dict())
    torch.testing.assert_close(mha(inputs()), gqa(inputs()))
    for wanted in (3, 7):
        with pytest.raises(InvalidInput, match="model's 4 KV heads"):
            regroup(weight, 4, wanted)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_mla_at_full_rank_is_the_same_projection(bias: bool) -> None:
    k, v = (nn.Linear(48, 64, bias=bias).double() for _ in range(2))
    x, channels = inputs(), fastest_channels(16, 4, "half")
    assert channels.tolist() == [0, 1, 8, 9]
    full = LatentKV.of(k, v, 4, min(48, 4 * 28), channels)
    for got, want in zip(full(x), (k(x), v(x)), strict=True):
        torch.testing.assert_close(got, want)
    half = LatentKV.of(k, v, 4, 20, channels)
    got = half(x)[0].unflatten(-1, (4, 16))
    torch.testing.assert_close(got[..., channels], k(x).unflatten(-1, (4, 16))[..., channels])
    errors = [
        float((LatentKV.of(k, v, 4, rank, channels)(x)[1] - v(x)).norm() / v(x).norm()) for rank in (4, 12, 20, 40)
    ]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.2


@torch.no_grad()
def test_the_latent_is_the_best_of_its_rank() -> None:
    """By Eckart and Young: the squared error of the weights is the sum of squares of the dropped singular values."""
    k, v = (nn.Linear(48, 64, bias=False).double() for _ in range(2))
    channels = fastest_channels(16, 4, "half")
    rest = [n for n in range(16) if n not in channels.tolist()]
    whole = torch.cat([k.weight.unflatten(0, (4, 16))[:, rest].flatten(0, 1), v.weight])
    made = LatentKV.of(k, v, 4, 10, channels)
    dropped = torch.linalg.svdvals(whole)[10:].square().sum()
    torch.testing.assert_close((made.up.weight @ made.down.weight - whole).square().sum(), dropped)


def test_sizes_of_mla() -> None:
    assert MLAConfig().sizes(4, 16, 16) == (4 * 12, 4)  # 48 + 4 * 4 = 64 of 128 numbers
    layer = attention("mla", SHAPE)
    assert isinstance(layer, LatentAttention) and layer.kv_proj.cached == 64
    assert MLAConfig(rank=7, rotated=8).sizes(4, 16, 16) == (7, 8)
    assert fastest_channels(8, 4, "interleaved").tolist() == [0, 1, 2, 3]
    for options, message in (
        ({"rank": 0}, "rank: expected a count"),
        ({"rotated": 3}, "even number of channels"),
        ({"rotated": 32}, "at most the 16 rotated channels"),
        ({"rank": 1000}, "expected 1 to 112"),
    ):
        with pytest.raises(InvalidInput, match=message):
            MLAConfig(**options).sizes(4, 16, 16)


def test_kinds_and_options() -> None:
    assert type(attention("mqa", SHAPE)) is Attention
    with pytest.raises(LongreachError, match=r"mha2.*fastmka"):
        attention("mha2", SHAPE)
    with pytest.raises(UnknownName, match="unknown option of gqa 'rank'; known: none"):
        attention("gqa", SHAPE, rank=3)
    with pytest.raises(UnknownName, match="unknown option of mla 'foo'; known: rank, rotated"):
        attention("mla", SHAPE, rank=8, foo=1)
    with pytest.raises(InvalidInput, match="gate: without effect in mha"):
        attention("mha", SHAPE, gate=0.5)
    with pytest.raises(InvalidInput, match="divisor of the 8 query heads"):
        AttentionShape(48, 8, 3, 16)
