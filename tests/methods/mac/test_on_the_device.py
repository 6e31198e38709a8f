"""A decode step asks nothing of the device, and its shapes and launches do not depend on what is in memory."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.mac import MAC
from longreach.ops import KVView, RotaryAngles, RowRange, Rows, Spans
from longreach.runtime import Ledger

BATCH, HEADS, KV_HEADS, DIM, LENGTH = 3, 8, 2, 64, 4096


class Launches:
    """Stands in the place of a kernel: notes its launches, computes nothing."""

    def __init__(self, name: str, noted: list[tuple[str, tuple[int, ...]]]):
        self.name, self.noted = name, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.noted.append((self.name, grid))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    pytest.importorskip("triton")
    noted: list[tuple[str, tuple[int, ...]]] = []
    for module, names in (
        ("match.triton_kernels", ("search", "decide")),
        ("attend.triton_kernels", ("attend_pieces",)),
        ("attend.triton_merging", ("merge_pieces",)),
        ("attend.triton_amend_kernels", ("amend_pieces",)),
    ):
        for name in names:
            monkeypatch.setattr(import_module(f"longreach.ops.{module}"), name, Launches(name, noted))
    return noted


def call() -> LayerCall:
    """On the device "meta", whose tensors hold nothing: whoever reads one fails."""

    def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    each = meta(BATCH, dtype=torch.int64)
    kv = KVView(*(meta(BATCH, KV_HEADS, LENGTH, DIM) for _ in range(2)), each, meta(BATCH, 1, dtype=torch.int64))
    rows = Rows(meta(BATCH, HEADS, DIM), each, each, tuple(RowRange(1, b) for b in range(BATCH)))
    turn = RotaryAngles(meta(BATCH, DIM // 2), meta(BATCH, DIM // 2))
    return LayerCall(0, rows, kv, each, 0.125, impl="triton", rotary=lambda: turn)


@pytest.mark.parametrize(
    ("method", "kernels"),
    [
        (MAC(), ["search", "attend_pieces", "amend_pieces"]),
        (MAC(sinks=4), ["search", "attend_pieces", "amend_pieces", "attend_pieces", "merge_pieces"]),
        (MAC(probe_every=8), ["search", "attend_pieces", "amend_pieces", "attend_pieces", "merge_pieces"]),
        (
            MAC(max_reuse_depth=None, rest_rows=None, max_gap=100, min_context=0),
            ["search", "attend_pieces", "amend_pieces"],
        ),
    ],
    ids=repr,
)
def test_a_step_reads_nothing_on_the_host(
    method: MAC, kernels: list[str], launched: list[tuple[str, tuple[int, ...]]]
) -> None:
    given, ledger = call(), Ledger()
    state = method.new_state(given, BATCH)
    outcome: Outcome = method.run(given, state)
    assert outcome.partial.out.shape == (BATCH, HEADS, DIM)
    assert any(noted.read.counted is not None for noted in given.meter.noted)
    assert [name for name, _ in launched] == kernels
    for layer in range(2):
        ledger.add("decode", replace(given, layer=layer), "mac", outcome, Spans.dense())
    assert [n.place for n in ledger.commit_on_device()] == [("decode", 0, None), ("decode", 1, None)]


def test_a_layer_takes_three_kernels_and_nothing_else(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    """Besides what is captured in them only memory is asked for, and views are made."""
    given, method = call(), MAC()
    state, ran = method.new_state(given, BATCH), set()

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seen():
        method.run(given, state)
    views = {"select", "slice", "unbind", "view", "detach", "alias", "expand", "unsqueeze", "as_strided"}
    free = views | {"empty", "new_empty", "new_full"}  # tests fill new memory with NaN
    assert ran <= free, ran - free
    assert len(launched) == 3
