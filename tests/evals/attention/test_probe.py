"""What counts as retrieval: the heaviest key lies in the needle and is the token that comes next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.evals.attention.probe import AttentionProbe
from longreach.evals.attention.prompts import Prompt
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import KVView, Partial, Rows, Spans
from longreach.ops.doors import Read

TOKENS, ANSWER = (9, 5, 6, 1, 2, 3, 9, 9, 4, 4), (5, 6, 7)  # the needle lies at 1 to 3; 7 is not in it
DIM = 16


def prompt(**changes: Any) -> Prompt:
    return Prompt(**{"task": "b", "number": 0, "tokens": TOKENS, "answer": ANSWER, "needle": (1, 4), "text": (6,),
                     "facts": {}, **changes})  # fmt: skip


def passed(watch: AttentionProbe, looked_at: list[dict[int, int]], chunk: int, end: int) -> None:
    """All positions below `end` go by in chunks; looked_at: for each head position -> its heaviest key, else 0."""
    keys = torch.eye(DIM)[None, None]
    for first in range(0, end, chunk):
        pos = torch.arange(first, min(end, first + chunk))
        q = torch.stack([torch.stack([torch.eye(DIM)[at.get(p, 0)] for at in looked_at]) for p in pos.tolist()])
        rows = Rows(q * 8, torch.zeros_like(pos), pos)
        call = LayerCall(0, rows, KVView(keys, keys, torch.tensor([int(pos[-1]) + 1])), torch.tensor([0]), 1.0,
                         pre_rope=lambda q=q: (q, q))  # fmt: skip
        call.count_read(Read.of(call.kv, Spans.dense()))
        watch("prefill", call, Outcome(Partial.empty(1, 1, 8)))


def watching() -> AttentionProbe:
    return AttentionProbe(ModelShape(1, 4, 1, DIM), 16, ("a", "b"), torch.device("cpu"))


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_only_the_right_token_in_the_needle_counts(chunk: int) -> None:
    watch = watching()
    watch.begin(prompt())
    # the rows at 9, 10 and 11 write 5, 6 and 7; the prompt's last token is at 9
    heads = [{9: 1, 10: 2}, {9: 2, 10: 2}, {9: 1, 10: 6, 11: 3}, {9: 4, 10: 5}]
    passed(watch, heads, chunk, 16)  # decoding may run past the end
    scores, needle = watch.retrieval.mean("copies", 1)[0], watch.retrieval.mean("needle", 1)[0]
    assert scores is not None and needle is not None
    assert scores.tolist() == [1.0, 0.5, 0.5, 0.0]  # of two: nobody can copy 7 from the needle
    assert needle.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0], abs=0.02)
    assert watch.retrieval.mean("copies", 0) == [None]
    assert watch.agreement.rows.tolist() == [1, 3]


def test_prompts_do_not_mix() -> None:
    watch = watching()
    for right in (True, False):
        watch.begin(prompt())
        passed(watch, [{9: 1 if right else 7, 10: 2}] * 4, 5, 12)
    scores = watch.retrieval.mean("copies", 1)[0]
    assert scores is not None and scores.tolist() == [0.75] * 4
    (previous,), (count) = watch.masses.mean("previous", 0), watch.agreement.rows.tolist()
    assert previous is not None and previous.tolist() == pytest.approx([1.0] * 4)  # the rows 5 and 6 look at key 0
    assert count == [2, 6]


def test_the_same_token_outside_the_needle_is_no_retrieval() -> None:
    watch = watching()
    tokens = (*TOKENS[:6], 5, *TOKENS[7:])
    watch.begin(prompt(tokens=tokens))
    passed(watch, [{9: 6, 10: 2}] * 4, 3, 12)
    scores = watch.retrieval.mean("copies", 1)[0]
    assert scores is not None and scores.tolist() == [0.5] * 4
