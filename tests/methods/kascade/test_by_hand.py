"""Decoding and a tile, by hand: keys and values are unit vectors, so queries are logits and results are weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, Phase
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.role import LayerRole
from longreach.methods.kascade.state import KascadeState
from longreach.ops import HeadShard, KVView, Rows

ANCHOR = KascadeState(LayerRole(anchor=0, dense=None, serves=True, head_map=None, tile=2))


def call(rows: dict[int, list[list[float]]], filled: int, kv_heads: int, phase: Phase, **more: Any) -> LayerCall:
    """rows: position -> for each query head the weights of the keys from slot 0 on, up to a factor."""
    q = torch.zeros(len(rows), len(next(iter(rows.values()))), 8)
    for r, heads in enumerate(rows.values()):
        for h, weights in enumerate(heads):
            q[r, h, : len(weights)] = torch.tensor(weights).log()
    memory = torch.eye(8)[None, None].repeat(1, kv_heads, 1, 1)
    kv = KVView(memory, memory.clone(), torch.tensor([filled]))
    where = Rows(q, torch.zeros(len(rows), dtype=torch.int64), torch.tensor(list(rows)))
    return LayerCall(0, where, kv, torch.tensor([0]), 1.0, phase=phase, **more)


def weights(outcome: Outcome, row: int = 0) -> Tensor:
    return outcome.partial.out[row]


def over(*parts: float) -> list[float]:
    return [x / sum(parts) for x in (*parts, *[0] * (8 - len(parts)))]


def test_decoding() -> None:
    """Five keys, three of them chosen: the newest, and the best two by the sum of two heads' probabilities.

    Head 0 gives 4/8 to key 0 and 1/8 to the others, head 1 gives 4/8 to key 2: so 0 and 2, and 4.
    """
    now = call({4: [[4, 1, 1, 1, 1], [1, 1, 4, 1, 1]]}, 5, 1, "decode")
    outcome = Kascade(k=3).run(now, ANCHOR)
    lists = now.shared[Kascade(k=3)].lists
    assert lists.index[0, 0, :3].tolist() == [0, 2, 4] and lists.count.tolist() == [[3]]
    torch.testing.assert_close(weights(outcome), torch.tensor([over(4, 0, 1, 0, 1), over(1, 0, 4, 0, 1)]))
    torch.testing.assert_close(outcome.partial.lse, torch.tensor([[6.0, 6.0]]).log())


def test_what_is_pooled_are_probabilities_not_logits() -> None:
    """Head 1's logits are larger by log 1000 all over, which changes nothing."""
    now = call({4: [[4, 1, 1, 1, 1], [1000, 2000, 1000, 1000, 1000]]}, 5, 1, "decode")
    Kascade(k=2).run(now, ANCHOR)
    assert now.shared[Kascade(k=2)].lists.index[0, 0].tolist() == [0, 4]  # 4/8 + 1/6 against 1/8 + 2/6


def test_a_sink_takes_from_its_head_before_heads_are_pooled() -> None:
    now = call({4: [[4, 1, 1, 1, 1], [1, 1, 3, 1, 1]]}, 5, 1, "decode", sink_logit=torch.tensor([56.0, 1e-9]).log())
    outcome = Kascade(k=2).run(now, ANCHOR)
    assert now.shared[Kascade(k=2)].lists.index[0, 0].tolist() == [2, 4]  # 4/64 + 1/7 against 1/64 + 3/7
    torch.testing.assert_close(weights(outcome)[0, :5], torch.tensor([0, 0, 1, 0, 1.0]) / 58)


def test_ties_go_to_the_lower_key() -> None:
    now = call({6: [[1] * 7]}, 7, 1, "decode")
    Kascade(k=4).run(now, ANCHOR)
    assert now.shared[Kascade(k=4)].lists.index[0, 0].tolist() == [0, 1, 2, 6]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"k": 3}, [2, 3, 6]),
        ({"k": 3, "sinks": 1}, [0, 2, 6]),
        ({"k": 3, "recent": 2}, [2, 5, 6]),
        ({"k": 4, "sinks": 2, "recent": 2}, [0, 1, 5, 6]),
        ({"k": 5, "sinks": 2, "recent": 2}, [0, 1, 2, 5, 6]),
        ({"k": 100}, [0, 1, 2, 3, 4, 5, 6]),
        ({"k": 0.5, "min_keys": 1}, [2, 3, 6]),  # 3.5 of 7
        ({"k": 0.01, "min_keys": 2}, [2, 6]),
        ({"k": 0.01}, [0, 1, 2, 3, 4, 5, 6]),  # at least 128
        ({"k": 1, "dense_below": 7}, [6]),
        ({"k": 1, "dense_below": 8}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_is_forced_lies_within_k(options: dict[str, Any], chosen: list[int]) -> None:
    now = call({6: [[2, 1, 9, 8, 3, 1, 1]]}, 7, 1, "decode")
    method = Kascade(**options)
    outcome = method.run(now, ANCHOR)
    lists = now.shared[method].lists
    assert lists.index[0, 0, : int(lists.count)].tolist() == chosen
    assert weights(outcome)[0].nonzero()[:, 0].tolist() == chosen


def test_one_set_for_all_heads_and_ranks() -> None:
    """Head 0 wants key 1 by 3/6, head 1 key 2 by 4/7; another rank's heads want key 0."""
    now = call({3: [[1, 3, 1, 1], [1, 1, 4, 1]]}, 4, 2, "decode")
    apart, together = Kascade(k=2), Kascade(k=2, heads="all")
    apart.run(now, ANCHOR)
    outcome = together.run(now, ANCHOR)
    assert now.shared[apart].lists.index[0].tolist() == [[1, 3], [2, 3]]
    assert now.shared[together].lists.index[0].tolist() == [[2, 3]]
    torch.testing.assert_close(weights(outcome), torch.tensor([over(0, 0, 1, 1), over(0, 0, 4, 1)]))
    shard = HeadShard(0, 2, 4, lambda x: x + torch.tensor([2.0, 0, 0, 0, 0, 0, 0, 0]))
    together.run(replace(now, shard=shard), ANCHOR)
    assert now.shared[together].lists.index[0].tolist() == [[0, 3]]


def test_a_tile() -> None:
    """Tiles of two tokens. Rows 2 and 3 share one of keys 0 and 1: row 2 alone would take key 0 (2/4), but over both
    rows key 1 has 1/4 + 5/8 against 2/4 + 1/8. Their own keys, 2 and 3, they see causally and beside the choice.
    """
    rows = {0: [[1]], 1: [[1, 3]], 2: [[2, 1, 1]], 3: [[1, 5, 1, 1]], 4: [[1, 1, 9, 1, 4]]}
    now = call(rows, 5, 1, "prefill")
    outcome = Kascade(k=1).run(now, ANCHOR)
    lists = now.shared[Kascade(k=1)].lists.lists
    assert lists.offsets.tolist() == [0, 0, 1, 2] and lists.index.tolist() == [1, 2]
    assert lists.row_to_list.tolist() == [0, 0, 1, 1, 2]
    want = [over(1), over(1, 3), over(0, 1, 1), over(0, 5, 1, 1), over(0, 0, 9, 0, 4)]
    torch.testing.assert_close(weights(outcome, slice(None))[:, 0], torch.tensor(want))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"k": 1}, [1]),
        ({"k": 2, "sinks": 1}, [0, 1]),
        ({"k": 2, "recent": 2}, [1, 3]),  # row 4 sees 3 and 4: its last two
        ({"k": 3, "recent": 2, "sinks": 1}, [0, 1, 3]),
        ({"k": 3, "recent": 3}, [1, 2, 3]),
        ({"k": 0.5, "min_keys": 1}, [1, 2]),  # of the 4 before the tile: its own token does not count
        ({"k": 0.5, "min_keys": 3}, [0, 1, 2]),
        ({"k": 1, "dense_below": 5}, [1]),
        ({"k": 1, "dense_below": 6}, [0, 1, 2, 3]),
    ],
)
def test_what_is_forced_in_a_tile(options: dict[str, Any], chosen: list[int]) -> None:
    now = call({4: [[3, 9, 5, 1, 2]]}, 5, 1, "prefill")
    method = Kascade(**options)
    outcome = method.run(now, ANCHOR)
    if len(chosen) == 4:  # nothing is left out, so nothing is chosen
        assert method not in now.shared and outcome.dense_reason == "fewer than 6 tokens (dense_below)"
    else:
        assert now.shared[method].lists.entries.tolist() == chosen
    assert weights(outcome)[0].nonzero()[:, 0].tolist() == [*chosen, 4]


def test_a_token_of_a_prompt_is_no_decoding_step() -> None:
    """The last token of a prompt, alone in its pass: its own key does not count, as in the tile that it belongs to."""
    prompt, decoding = (call({4: [[3, 9, 5, 1, 2]]}, 5, 1, phase) for phase in ("prefill", "decode"))
    assert weights(Kascade(k=1).run(prompt, ANCHOR))[0].nonzero()[:, 0].tolist() == [1, 4]
    assert weights(Kascade(k=1).run(decoding, ANCHOR))[0].nonzero()[:, 0].tolist() == [4]
