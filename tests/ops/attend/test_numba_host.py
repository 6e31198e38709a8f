"""attend as CUDA calls it on the CPU: the compiled program, run with the job that a captured graph would run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.cache.host import allocate
from longreach.errors import HostCallFailed, Unsupported
from longreach.ops import KVView, Lists, Rows, Span, Spans, absolute, attend, relative
from longreach.ops.attend import resolve
from longreach.ops.host_calls import HostCalls
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend, seen_keys
from longreach.testing.selections import Kind, random_lists, random_selection
from longreach.testing.tolerance import assert_close, unit_roundoff
from tests.ops.attend.kernels import on_cpu

CPU = torch.device("cpu")
pytestmark = on_cpu


def called(kv: KVView) -> KVView:
    return replace(kv, calls=HostCalls(CPU, allocate))


def check(rows: Rows, kv: KVView, selection: Any, **logits: Any) -> torch.Tensor:
    logits = {"scale": rows.q.shape[2] ** -0.5, **logits}
    assert resolve("auto", rows, kv, selection) == "cpu"
    got = attend(rows, kv, selection, **logits)
    assert_close(got, exact_attend(rows, kv, selection, **logits), unit=2 * unit_roundoff(torch.float32))
    return got.out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("kind", ["spans", "lists"])
def test_any_selection_of_ragged_rows(kind: Kind, per: Any, dtype: torch.dtype, workers: int) -> None:
    for seed in range(6):
        kv = called(random_kv([150, 0, 67, 1], heads=2, dim=24, dtype=dtype, page=16 if seed % 2 else None))
        rows = random_rows(kv, 6, group=1 + seed % 4, seed=seed)
        sink = torch.randn(rows.q.shape[1]) if seed == 1 else None
        selection = random_selection(kind, rows, kv, per=per, seed=seed)
        check(rows, kv, selection, softcap=2.0 if seed == 2 else None, sink_logit=sink)


def test_many_keys_are_read_in_pieces(workers: int) -> None:
    kv = called(random_kv([6000, 40], heads=2, dim=32, dtype=torch.bfloat16))
    rows = Rows(random_rows(kv, 2, group=4).q, torch.tensor([0, 1]), torch.tensor([5999, 39]))
    for selection in (
        Spans.dense(), random_lists(rows, kv, weighted=True), random_lists(rows, kv, block=16, overflow=0.5),
        Spans((Span(absolute(0), absolute(4)), Span(relative(-63), relative(1)))),
    ):  # fmt: skip
        first = check(rows, kv, selection)
        assert torch.equal(first, check(rows, kv, selection)), "pieces do not depend on threads"


def test_only_selected_keys_are_read() -> None:
    kv = called(random_kv([90, 70], heads=2, dim=16))
    rows = random_rows(kv, 4, group=2)
    lists = random_lists(rows, kv, weighted=True)
    want = check(rows, kv, lists)
    read = [set(), set()]  # type: ignore[var-annotated]
    for r, row in enumerate(seen_keys(rows, kv, lists)):
        for h, seen in enumerate(row):
            read[int(rows.seq[r])] |= {(h // 2, slot) for slot in seen}
    for seq, length in enumerate((90, 70)):
        for head in range(2):
            poison(kv, seq, head, [slot for slot in range(length) if (head, slot) not in read[seq]])
    got = attend(rows, kv, lists, scale=16**-0.5)
    assert torch.equal(got.out, want)


def test_lists_that_name_no_keys_fail_by_name_and_only_once() -> None:
    kv = called(random_kv([20], heads=1, dim=8))
    rows = Rows(torch.randn(1, 2, 8), torch.tensor([0]), torch.tensor([19]))
    wrong = Lists(torch.tensor([[[3, 20]]], dtype=torch.int32), torch.tensor([[2]]))
    for _ in range(2):
        with pytest.raises(HostCallFailed, match="attention on the CPU failed: a list of keys names slots that are "):
            attend(rows, kv, wrong, scale=1.0)
    check(rows, kv, Spans.dense())


def test_what_the_cpu_does_not_take() -> None:
    kv = called(random_kv([20], heads=1, dim=8, dtype=torch.float64))
    rows = random_rows(kv, 1)
    with pytest.raises(Unsupported, match=r"computes in fp32 from bf16, fp16 or fp32, got torch\.float64"):
        attend(rows, kv, Spans.dense(), scale=1.0)
    kv = called(random_kv([20], heads=1, dim=8))
    spans = Spans((Span(absolute(0), relative(1)),) * 33)
    with pytest.raises(Unsupported, match="up to 32 spans, got 33"):
        attend(random_rows(kv, 1), kv, spans, scale=1.0)


@pytest.mark.parametrize("place", ["q", "k", "v", "log_weight", "sink_logit"])
def test_gradients_are_refused(place: str) -> None:
    kv = random_kv([20], heads=1, dim=8)
    x = {
        "q": torch.randn(1, 2, 8),
        "k": kv.k,
        "v": kv.v,
        "log_weight": torch.zeros(1, 1, 2),
        "sink_logit": torch.ones(2),
    }
    x[place].requires_grad_()
    kv, rows = called(replace(kv, k=x["k"], v=x["v"])), Rows(x["q"], torch.tensor([0]), torch.tensor([19]))
    lists = Lists(torch.tensor([[[3, 7]]], dtype=torch.int32), torch.tensor([[2]]), x["log_weight"])
    with pytest.raises(Unsupported, match="attend on the CPU for a GPU: it has no backward pass and an input requires"):
        attend(rows, kv, lists, scale=1.0, sink_logit=x["sink_logit"])
    with torch.no_grad():
        assert not attend(rows, kv, lists, scale=1.0, sink_logit=x["sink_logit"]).out.requires_grad


@pytest.mark.parametrize("entries", [[7, 2, 11], [3, 3, 3]])
def test_entries_need_not_ascend_and_repeated_ones_are_not_sought(entries: list[int], workers: int) -> None:
    """As by Triton, for which looking for them would cost a pass over the list."""
    kv = called(random_kv([20], heads=1, dim=8))
    rows = Rows(torch.randn(1, 2, 8), torch.tensor([0]), torch.tensor([19]))
    got = attend(rows, kv, Lists(torch.tensor([[entries]], dtype=torch.int32), torch.tensor([[3]])), scale=1.0)
    kept = replace(kv, k=kv.k[:, :, entries], v=kv.v[:, :, entries], seq_lens=torch.tensor([3]), calls=None)
    want = attend(rows, kept, Spans.dense(), scale=1.0, impl="reference")
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse))


def test_many_rows_and_tiles_are_computed_by_the_device() -> None:
    kv = called(random_kv([20], heads=1, dim=8))
    assert resolve("auto", random_rows(kv, 9), kv, Spans.dense()) != "cpu"
    rows = random_rows(kv, 2)
    assert resolve("auto", rows, kv, random_selection("packed", rows, kv)) != "cpu"
    assert resolve("reference", rows, kv, Spans.dense()) == "reference"


def test_equal_jobs_are_kept_once() -> None:
    kv = called(random_kv([20], heads=1, dim=8))
    rows, calls = random_rows(kv, 1), kv.calls
    assert calls is not None
    for _ in range(3):
        check(rows, kv, Spans.dense())
    assert len(calls._jobs) == 1 and attend(Rows(rows.q[:0], rows.seq[:0], rows.pos[:0]), kv, Spans.dense(),
                                            scale=1.0).out.shape == (0, 2, 8)  # fmt: skip
