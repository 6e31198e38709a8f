"""What compiled programs get of views, lists and rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from longreach.cache.host import allocate
from longreach.errors import Unsupported
from longreach.ops.host_calls import HostCalls
from longreach.testing.inputs import random_kv

inputs = pytest.importorskip("longreach.ops.numba_host_inputs", reason="needs Numba")
CPU = torch.device("cpu")


@pytest.mark.parametrize("page", [None, 8])
def test_fields_of_a_view_reach_all_of_its_memory(page: int | None) -> None:
    kv = random_kv([20, 3], heads=2, dim=8, page=page)
    fields = inputs.span_of(kv)
    assert (fields["k"], fields["v"]) == (kv.k.data_ptr(), kv.v.data_ptr())
    assert fields["page"] == kv.page and fields["sequences"] == 2
    assert [fields[f"k{i}"] for i in range(3)] == list(kv.k.stride()[:3])
    last = sum((n - 1) * stride for n, stride in zip(kv.v.shape, kv.v.stride(), strict=True))
    assert fields["v_size"] == last + 1
    assert ("paged" in fields) == (page is not None)
    if page is not None:
        assert kv.block_table is not None and fields["pages"] == kv.block_table.shape[1]


def test_what_is_refused() -> None:
    assert inputs.kind_of(torch.bfloat16) is np.uint16
    with pytest.raises(Unsupported, match=r"from bf16, fp16 or fp32, got torch\.float64"):
        inputs.kind_of(torch.float64)
    kv = random_kv([20], heads=1, dim=8)
    moved = replace(kv, slot_pos=torch.arange(kv.k.shape[2]).expand(kv.k.shape[:3]).contiguous())
    with pytest.raises(Unsupported, match="leave slot_pos out"):
        inputs.span_of(moved)
    with pytest.raises(Unsupported, match="attend on the CPU for a GPU: it has no backward pass"):
        inputs.refuse_gradients("attend", None, torch.ones(2, requires_grad=True))
    with torch.no_grad():
        inputs.refuse_gradients("attend", torch.ones(2, requires_grad=True))


def test_lists_are_sent_with_their_counts_and_weights() -> None:
    calls = HostCalls(CPU, allocate)
    index, count = torch.tensor([[[4, 2, 9]], [[1, 0, 0]]]), torch.tensor([[3], [1]])
    weight = torch.arange(6.0).view(2, 1, 3)
    found = inputs.send_lists(calls, index, weight, count)
    for name, want in (("index", index.int()), ("weight", weight), ("count", count.int())):
        buffer = calls.buffer(name, want.shape, want.dtype)
        assert found[name] == buffer.data_ptr() and torch.equal(buffer, want)
    assert "weight" not in inputs.send_lists(calls, index, None, count)
