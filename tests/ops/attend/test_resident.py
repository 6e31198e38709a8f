"""As many programs of attend are launched as an H200's multiprocessors hold at once: told from their machine code."""

from __future__ import annotations

import pytest

from tests.ops.compiler import printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import Lists, Rows, Spans, Span, relative
from longreach.ops.attend import triton, triton_two_pass, triton_kernels, triton_merging
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.compile import compiling, resident
from longreach.testing.inputs import random_kv

batch, page, found, dealt = int(sys.argv[1]), int(sys.argv[2]) or None, [], []
bare = dict(scale=1.0, softcap=None, sink_logit=None)
kv = random_kv([256] * batch, heads=8, dim=128, page=page, dtype=torch.bfloat16)
rows = Rows(torch.randn(batch, 32, 128).bfloat16(), torch.arange(batch), torch.full((batch,), 255))
lists = Lists(torch.zeros(batch, 8, 32).int(), torch.full((batch, 8), 32).int())
with (
    patch.object(triton, "refuse", lambda *a: None),
    patch.object(triton_two_pass, "refuse", lambda *a: None),
    patch.object(Tuning, "programs", lambda self, device: dealt.append(self) or 132 * self.per_sm),
    compiling(triton_kernels, "attend_pieces") as made, compiling(triton_merging, "merge_pieces"),
):
    for selection in (Spans.dense(), Spans((Span(relative(-99), relative(1)),)), lists):
        triton.launch(rows, kv, selection, **bare, split=None)
    _, kept = triton_two_pass.score_keys(rows, kv, **bare)
    triton_two_pass.attend_with_logits(rows, kv, **bare)
    triton_two_pass.attend_from_logits(rows, kv, lists, kept, sink_logit=None)
print(json.dumps([[t.per_sm, resident(m, t.warps)] for t, m in zip(dealt, made, strict=True)]))
"""


@pytest.mark.parametrize(("batch", "page"), swept([(32, 16), (1, 0), (8, 0), (32, 0)], 1))
def test_all_programs_are_resident_and_no_more_fit(batch: int, page: int) -> None:
    found = printed(COMPILE, batch, page)
    assert len(found) == 6
    for dealt, fit in found:
        assert dealt <= fit, found  # more would run in two waves
        assert dealt == fit or batch == 1, found  # fewer would be spread unevenly over what the kernel before leaves
