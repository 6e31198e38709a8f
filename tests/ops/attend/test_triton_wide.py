"""attend's kernel for wide heads and large groups against the oracle: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import KVView, RowRange, Rows, ScoringKeys, Span, Spans, absolute, attend, relative, score_keys
from longreach.ops.attend import triton as kernels
from longreach.ops.attend import triton_wide as wide
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.selections import Kind, prompt_tiles, random_lists, random_selection, random_spans
from tests.ops.attend.kept import check_kept, check_values
from tests.ops.attend.kernels import HALF, check, here

KINDS: tuple[Kind, ...] = ("spans", "lists", "packed")


def latent(kv: KVView) -> KVView:
    """The view of a latent cache: values are the keys."""
    return replace(kv, v=kv.k, values_in_keys=True)


@pytest.mark.parametrize(("dim", "group", "page", "dtype"), [
    (576, 32, 8, HALF), (512, 1, None, HALF), (320, 3, 8, torch.float32), (16, 128, None, HALF), (40, 24, 8, HALF),
])  # fmt: skip
def test_shapes(dim: int, group: int, page: int | None, dtype: torch.dtype) -> None:
    kv = random_kv([45, 0, 21], heads=2, dim=dim, page=page, dtype=dtype)
    rows = random_rows(kv, 2, group=group, seed=1)
    check(rows, kv, Spans.dense(), sink_logit=torch.randn(2 * group))
    check(rows, kv, random_lists(rows, kv, weighted=True), softcap=3.0)
