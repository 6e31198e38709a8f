"""Controls of fusion: seeded chance, the true change of keys and values, and causality that is wrong on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.evals.fusion.controls import CONTROLS, ByRowOrder, ByScore, Oracle, RandomChoice, RowOrder, resolved
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.fusion import A3, CacheBlend
from longreach.methods.registry import FUSIONS
from longreach.methods.slots import PromptParts
from longreach.ops import KVView, Rows


def parts(count: int = 40, first: int = 6, question: int = 35) -> PromptParts:
    at = torch.arange(count)
    stored = (at >= first) & (at < question)
    return PromptParts(stored, stored & (at < 16), torch.zeros_like(at), torch.zeros_like(at), question)


def test_a_random_choice_is_seeded_and_spends_its_ratio_on_what_is_not_exact() -> None:
    prompt = parts()
    one, again, other = (RandomChoice(0.2, seed).choose(prompt, None) for seed in (3, 3, 4))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert len(one) == 8 and bool(prompt.candidates[one].all())
    assert torch.equal(RandomChoice(1.0).choose(prompt, None), prompt.candidates.nonzero()[:, 0])
    assert not torch.equal(RandomChoice(0.2).choose(parts(question=34), None), RandomChoice(0.2).choose(prompt, None))


def test_the_oracle_spends_its_ratio_on_what_moves_most() -> None:
    prompt, scores = parts(), torch.arange(40.0)
    fusion, prefill = resolved(Oracle(0.1), lambda: scores)
    assert isinstance(fusion, ByScore) and prefill == Dense()
    assert fusion.choose(prompt, None).tolist() == [31, 32, 33, 34]

    def never() -> Any:
        raise AssertionError("asked for a plain prefill")

    assert resolved(A3(), never) == (A3(), Dense())
    assert resolved(RowOrder("a3", 0.3), never) == (A3(0.3), ByRowOrder())


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_rows_in_order_see_keys_from_the_bottom_right(rows: int) -> None:
    count, heads, kv_heads, dim = 9, 4, 2, 8
    g = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, heads, dim, generator=g)
    k, v = (torch.randn(1, kv_heads, 12, dim, generator=g) for _ in range(2))
    k[:, :, count:], v[:, :, count:] = torch.nan, torch.nan
    pos = torch.randperm(count, generator=g)[:rows].sort().values
    zeros = torch.zeros(rows, dtype=torch.int64)
    call = LayerCall(0, Rows(q, zeros, pos), KVView(k, v, torch.tensor([count])), torch.tensor([0]), 0.3)
    got = ByRowOrder().run(call, None).partial.out
    for row in range(rows):
        for head in range(heads):
            see = count - rows + row + 1
            keys, values = (x[0, head // 2, :see].double() for x in (k, v))
            want = (0.3 * keys @ q[row, head].double()).softmax(0) @ values
            torch.testing.assert_close(got[row, head].double(), want, rtol=1e-5, atol=1e-5)
    if rows == count:
        torch.testing.assert_close(got, Dense().run(call, None).partial.out)


def test_options_and_names() -> None:
    assert not CONTROLS.keys() & FUSIONS.keys() and all(c.name == name for name, c in CONTROLS.items())
    for name, control in CONTROLS.items():
        assert control.make(ratio=0.4).to_json()["ratio"] == 0.4 and control.make(ratio=0.4).name == name
        with pytest.raises(InvalidInput, match="ratio: expected a number"):
            control.make(ratio=2)
    assert RowOrder().method() == CacheBlend()
    with pytest.raises(UnknownName, match="known: cacheblend, a3, a3_deep"):
        RowOrder("pie")
    with pytest.raises(UnknownName, match="full_reuse"):
        RowOrder("a4")
    with pytest.raises(InvalidInput, match="seed: expected a count"):
        RandomChoice(seed=-1)
