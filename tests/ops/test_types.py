"""The nouns: what they accept, what they refuse, what they say of themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, LongreachError, Unsupported
from longreach.ops import HeadShard, KVView, Logits, Partial, Rows
from longreach.ops.types import describe
from longreach.testing.inputs import random_kv, random_rows

META = torch.device("meta")
Q = torch.zeros(3, 4, 16)
INT = torch.zeros(3, dtype=torch.int64)
K = torch.zeros(2, 2, 5, 16)
FILLED = torch.tensor([5, 3])
TABLE = torch.tensor([[1, 0], [0, 1]])
POSITIONS = torch.zeros(2, 2, 5, dtype=torch.int64)

ROWS = [
    ({"q": Q[0]}, "q: expected \\[R, H, D\\], got float32\\[4, 16\\]"),
    ({"q": "text"}, "q: .* got str"),
    ({"q": Q.int()}, "q: expected bf16, fp16, fp32 or fp64, got int32"),
    ({"q": Q.to(torch.float8_e4m3fn)}, "q: .* got float8"),
    ({"q": Q[..., :12]}, "head dim must be a multiple of 8 up to 1024, got 12"),
    ({"q": torch.zeros(3, 1, 1032)}, "got 1032"),
    ({"q": torch.zeros(3, 1, 0)}, "got 0"),
    ({"seq": INT.float()}, "seq: expected int32 or int64 \\[R=3\\], got float32"),
    ({"seq": INT[:2]}, "seq: .*R=3.* got int64\\[2\\]"),
    ({"pos": INT[:, None]}, "pos: .* got int64\\[3, 1\\]"),
    ({"pos": [0, 1, 2]}, "pos: .* got list"),
    ({"pos": INT.to(torch.int16)}, "pos: .* got int16"),
    ({"seq": INT.to(META)}, "seq: expected on cpu like q, got .*meta"),
    ({"q": Q.to(META)}, "expected on meta like q, got .*cpu"),
]


@pytest.mark.parametrize(("wrong", "message"), ROWS)
def test_rows_refuse(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Rows(**{"q": Q, "seq": INT, "pos": INT, **wrong})


def test_rows_take() -> None:
    rows = random_rows(random_kv([9, 9]), 5)
    some = rows.take(torch.tensor([4, 0, 0]))
    assert torch.equal(some.q, rows.q[[4, 0, 0]])
    assert some.seq.tolist() == rows.seq[[4, 0, 0]].tolist()
    assert some.pos.tolist() == rows.pos[[4, 0, 0]].tolist()


VIEWS = [
    ({"k": K[0]}, "k: expected \\[P, G, page, D\\], got float32\\[2, 5, 16\\]"),
    ({"k": None}, "k: .* got NoneType"),
    ({"k": K.int()}, "k: expected bf16, fp16, fp32 or fp64, got int32"),
    ({"k": K[:, :, :0], "v": K[:, :, :0]}, "at least one KV head, slot and channel"),
    ({"k": K[:, :0], "v": K[:, :0]}, "at least one KV head, slot and channel"),
    ({"v": K[:, :1]}, "v: expected float32\\[2, 2, 5, 16\\].* like k, got float32\\[2, 1, 5, 16\\]"),
    ({"v": K.double()}, "v: expected float32.* got float64"),
    ({"v": K.to(META)}, "v: expected .*cpu like k, got .*meta"),
    ({"v": None}, "v: .* got NoneType"),
    ({"k": K.transpose(2, 3).contiguous().transpose(2, 3)}, "last dimension must be contiguous"),
    ({"seq_lens": FILLED.float()}, "seq_lens: expected int32 or int64 \\[B\\], got float32"),
    ({"seq_lens": FILLED[:, None]}, "seq_lens: .* got int64\\[2, 1\\]"),
    ({"seq_lens": FILLED[:1]}, "seq_lens: without a block table expected \\[P=2\\], got int64\\[1\\]"),
    ({"seq_lens": FILLED.to(META)}, "seq_lens: expected on cpu like k, got .*meta"),
    ({"block_table": TABLE[:1]}, "block_table: expected int \\[B=2, pages\\], got int64\\[1, 2\\]"),
    ({"block_table": TABLE.float()}, "block_table: .* got float32"),
    ({"block_table": [[0], [1]]}, "block_table: .* got list"),
    ({"block_table": TABLE.to(META)}, "block_table: expected on cpu like k"),
    ({"slot_pos": POSITIONS[:1]}, "slot_pos: expected int \\[2, 2, 5\\], got int64\\[1, 2, 5\\]"),
    ({"slot_pos": POSITIONS.float()}, "slot_pos: .* got float32"),
    ({"slot_pos": 3}, "slot_pos: .* got int"),
    ({"slot_pos": POSITIONS.to(META)}, "slot_pos: expected on cpu like k"),
]


@pytest.mark.parametrize(("wrong", "message"), VIEWS)
def test_views_refuse(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        KVView(**{"k": K, "v": K, "seq_lens": FILLED, **wrong})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_quantised_kv_is_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported, match="k_scale, v_scale: quantised KV is not implemented"):
        KVView(K, K, FILLED, **{name: torch.ones(1)})


def test_views_of_any_strides_are_taken() -> None:
    both = torch.zeros(2, 2, 5, 32)
    KVView(both[..., :16], both[..., 16:], FILLED)
    KVView(K.transpose(1, 2), K.transpose(1, 2), FILLED)
    KVView(K.expand(2, 2, 5, 16)[:, :1].expand(2, 2, 5, 16), K, FILLED)


def test_what_a_view_says_of_itself() -> None:
    whole, paged = KVView(K, K, FILLED), KVView(K, K, FILLED, torch.tensor([[1, 0, 1], [0, 1, 0]]))
    assert (whole.sequences, whole.heads, whole.page, whole.capacity) == (2, 2, 5, 5)
    assert (paged.sequences, paged.heads, paged.page, paged.capacity) == (2, 2, 5, 15)


@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_locate(ints: torch.dtype) -> None:
    seq, slot = torch.tensor([[1], [0]], dtype=ints), torch.tensor([[0, 4, 5], [9, 1, 7]])
    paged = KVView(K, K, FILLED.to(ints), TABLE.to(ints))
    page, offset = paged.locate(seq, slot)
    assert page.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert offset.tolist() == [[0, 4, 0], [4, 1, 2]]
    page, offset = KVView(K, K, FILLED.to(ints)).locate(seq, slot % 5)
    assert page.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert offset.tolist() == (slot % 5).tolist()


def rows_like(q: torch.Tensor) -> Rows:
    return Rows(q, INT.to(q.device), INT.to(q.device))


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(3, 4, 8), "head dim: q has 8, k has 16"),
        (Q.half(), "dtype: q is float16.*k is float32"),
        (Q.to(META), "device: q is on meta, k on cpu"),
        (torch.zeros(3, 3, 16), "3 query heads must be 1 to 128 times the 2 KV heads"),
        (torch.zeros(3, 1, 16), "1 query heads must be"),
        (torch.zeros(3, 0, 16), "0 query heads must be"),
        (torch.zeros(3, 258, 16), "258 query heads must be 1 to 128 times"),
    ],
)
def test_rows_and_view_must_fit(q: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        KVView(K, K, FILLED).group(rows_like(q))


@pytest.mark.parametrize("group", [1, 3, 16, 128])
def test_group(group: int) -> None:
    assert KVView(K, K, FILLED).group(rows_like(torch.zeros(3, 2 * group, 16))) == group


PARTIALS = [
    (Q[0], Q[0, :, 0], "out: expected \\[R, H, D\\], got float32\\[4, 16\\]"),
    (Q.bfloat16(), Q[..., 0].bfloat16(), "out: expected fp32 \\(or fp64\\), got bfloat16"),
    (Q, Q, "lse: expected \\[3, 4\\] .* got float32\\[3, 4, 16\\]"),
    (Q, Q[..., 0].double(), "lse: .* got float64"),
    (Q, Q[..., 0].to(META), "lse: .* got .*meta"),
    (Q, 0.0, "lse: .* got float"),
]


@pytest.mark.parametrize(("out", "lse", "message"), PARTIALS)
def test_partials_refuse(out: Any, lse: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Partial(out, lse)


def test_the_empty_partial() -> None:
    none = Partial.empty(2, 3, 8, dtype=torch.float64)
    assert none.out.shape == (2, 3, 8) and none.out.dtype == torch.float64
    assert not none.out.any()
    assert none.is_empty.tolist() == [[True] * 3] * 2
    assert Partial.empty(2, 3, 8).lse.dtype == torch.float32


KEPT = torch.zeros(1, 2, 10, 4)
TOP = torch.zeros(1, 2, 3, 4)
LOGITS: list[tuple[tuple[Any, ...], str]] = [
    ((KEPT[0],), "x: expected \\[R, G, N, group\\], got float32\\[2, 10, 4\\]"),
    ((KEPT.half(),), "x: expected fp32 or fp64, got float16"),
    ((KEPT, TOP, 4), "x: expected fp16 when top is given, got float32"),
    ((KEPT.half(), TOP, 2), "top: expected fp32 \\[1, 2, 5, 4\\] on cpu, got float32\\[1, 2, 3, 4\\]"),
    ((KEPT.half(), TOP.double(), 4), "top: .* got float64"),
    ((KEPT.half(), TOP.to(META), 4), "top: .* got .*meta"),
    ((KEPT.half(), 0.0, 4), "top: .* got float"),
    ((KEPT.half(), TOP, 0), "block: expected a count of slots >= 1, got 0"),
    ((KEPT.half(), TOP, 4.0), "block: .* got 4.0"),
]


@pytest.mark.parametrize(("parts", "message"), LOGITS)
def test_kept_logits_refuse(parts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Logits(*parts)


def test_kept_logits_by_hand() -> None:
    """Base 2, relative to the largest of 4 slots."""
    x = torch.tensor([0.0, -1.5, -torch.inf, 0.0, -0.5, 0.0]).half().view(1, 1, 6, 1).expand(2, 1, 6, 2)
    top = torch.tensor([[8.0, 1.0], [2.0, 3.0]]).view(1, 1, 2, 2).expand(2, 1, 2, 2)
    kept = Logits(x, top, 4).take(torch.tensor([1]))
    want = torch.tensor([[8.0, 1.0], [6.5, -0.5], [-torch.inf] * 2, [8.0, 1.0], [1.5, 2.5]]) * math.log(2)
    torch.testing.assert_close(kept.natural(5), want[None, None])
    assert torch.equal(Logits(want[None, None]).natural(3), want[None, None, :3])


@pytest.mark.parametrize(("first", "count", "total"), [(-1, 2, 4), (3, 2, 4), (0, 0, 4), (0, 5, 4)])
def test_shards_lie_within_all_heads(first: int, count: int, total: int) -> None:
    with pytest.raises(InvalidInput, match=f"\\[{first}, {first + count}\\) .* \\[0, {total}\\)"):
        HeadShard(first, count, total)


def test_shards_cut_and_sum() -> None:
    x = torch.arange(24).view(2, 6, 2)
    shards = [HeadShard(0, 2, 6), HeadShard(2, 4, 6)]
    assert torch.equal(torch.cat([s.slice(x, 1) for s in shards], 1), x)
    assert torch.equal(HeadShard.whole(6).slice(x, 1), x)
    assert shards[1].slice(torch.arange(6)).tolist() == [2, 3, 4, 5]
    assert torch.equal(shards[0].sum(x), x)
    assert torch.equal(HeadShard(0, 2, 4, sum=lambda part: 2 * part).sum(x), 2 * x)
    with pytest.raises(InvalidInput, match="expected 6 global heads along dim 0, got int64\\[2, 6, 2\\]"):
        shards[0].slice(x)


def test_every_refusal_is_a_longreach_error_and_a_value_error() -> None:
    assert issubclass(InvalidInput, LongreachError) and issubclass(InvalidInput, ValueError)


def test_describe() -> None:
    assert describe(Q.bfloat16()) == "bfloat16[3, 4, 16] on cpu"
    assert describe(3) == "int"
