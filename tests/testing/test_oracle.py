"""The oracle against PyTorch's own attention where that says the same, and by hand where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from longreach.ops import Lists, Span, Spans, absolute
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend, exact_pooled_scores, seen_keys


def test_dense_is_scaled_dot_product_attention() -> None:
    kv = random_kv([11], heads=2, dim=8, dtype=torch.float64)
    rows = replace(random_rows(kv, 11, group=3), pos=torch.arange(11))
    k, v = (x[:, :, :11].repeat_interleave(3, 1) for x in (kv.k, kv.v))
    q = rows.q.transpose(0, 1)[None]
    want = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)[0].transpose(0, 1)
    got = exact_attend(rows, kv, Spans.dense(), scale=0.3)
    torch.testing.assert_close(got.out, want)
    masked = (0.3 * q @ k.transpose(2, 3)).masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(got.lse, masked.logsumexp(-1)[0].T)
    scores = masked.softmax(-1)[0].unflatten(0, (2, 3)).sum(1).transpose(0, 1)
    torch.testing.assert_close(exact_pooled_scores(rows, kv, scale=0.3)[..., :11], scores)


def test_a_page_is_where_the_table_says() -> None:
    paged = random_kv([11, 4], dim=8, page=3, dtype=torch.float64, evicted=True)
    assert paged.block_table is not None and paged.slot_pos is not None
    whole = random_kv([11, 4], dim=8, dtype=torch.float64, evicted=True, seed=9)
    assert whole.slot_pos is not None
    for b, length in enumerate((11, 4)):
        for n in range(length):
            page = int(paged.block_table[b, n // 3])
            for mine, theirs in ((whole.k, paged.k), (whole.v, paged.v), (whole.slot_pos, paged.slot_pos)):
                mine[b, :, n] = theirs[page, :, n % 3]
    rows = random_rows(paged, 6)
    a, b = (exact_attend(rows, kv, Spans.window(6), scale=1.0) for kv in (paged, whole))
    assert torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse) and bool(a.out.any())


def test_keys_by_hand() -> None:
    kv = random_kv([8], heads=2, dim=8)
    rows = replace(random_rows(kv, 1), pos=torch.tensor([5]))
    spans = Spans((Span(absolute(torch.tensor([[1, 4]])), absolute(9)),))
    assert [sorted(keys) for keys in seen_keys(rows, kv, spans)[0]] == [[1, 2, 3, 4, 5]] * 2 + [[4, 5]] * 2
    lists = Lists(torch.tensor([[[2, 0]]]), torch.tensor([[2]]), torch.tensor([[[0.5, -1.0]]]), block=3)
    assert seen_keys(rows, kv, lists)[0] == [{0: -1.0, 1: -1.0, 2: -1.0}] * 4


@pytest.mark.parametrize("sink", [None, torch.tensor([0.3])])
def test_one_key_by_hand(sink: torch.Tensor | None) -> None:
    kv = random_kv([1], heads=1, dim=8, dtype=torch.float64)
    rows = replace(random_rows(kv, 1, group=1), pos=torch.tensor([0]))
    got = exact_attend(rows, kv, Spans.dense(), scale=2.0, softcap=0.5, sink_logit=sink)
    logit = 0.5 * torch.tanh(2.0 * (rows.q[0, 0] @ kv.k[0, 0, 0]) / 0.5)
    total = logit.exp() + (0.0 if sink is None else sink.double().exp()[0])
    torch.testing.assert_close(got.lse[0, 0], total.log())
    torch.testing.assert_close(got.out[0, 0], logit.exp() / total * kv.v[0, 0, 0])
