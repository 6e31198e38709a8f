"""Bytes that methods declare, of a decode call and of their state, against those that are allocated."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longreach import (
    MAC,
    BlockMKA,
    Kascade,
    LessIsMore,
    Loki,
    MagicPIG,
    OmniKV,
    OracleSampling,
    OracleTopK,
    Quest,
    StreamingLLM,
)
from longreach.cache import CacheConfig, SequenceState
from longreach.methods.base import AttentionMethod, PromptObserver
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.snapkv import SnapKV
from longreach.ops import Lists
from tests.methods.drive import LAYERS, MODEL, Observed, Turn, in_phase, new_cache, run, states_of, text

CONTEXT = 200
METHODS = [
    StreamingLLM(),
    Quest(k=0.3, page=4, dense_layers=()),
    Loki(k=0.3),
    Kascade(k=0.3, min_keys=8),
    Kascade(k=0.3, min_keys=8, heads="all"),
    OmniKV(k=0.3, layers=(0,)),
    LessIsMore(k=0.3, layers=(0,)),
    OracleTopK(k=0.3),
    OracleTopK(k=0.3, choose="sample"),
    OracleTopK(k=0.3, heads="all", choose="sample"),
    OracleSampling(k=0.3, draw="systematic"),
    Loki(k=0.3, choose="sample"),
    Kascade(k=0.3, min_keys=8, choose="sample"),
    MagicPIG(bits=6, tables=9, local=8, seal=8, centre=16, dense_layers=()),
    MagicPIG(bits=6, tables=9, local=8, seal=8, centre=16, dense_layers=(), redo=0.1),
    BlockMKA(block=1, window=40, blocks=60, recall="summary"),
    BlockMKA(block=1, window=8, blocks=150, recall="bounds"),
    BlockMKA(block=1, window=8, blocks=60, recall="hash", bits=128),
    BlockMKA(block=4, window=160, blocks=2, recall="summary"),
]
SAMPLING = [
    OracleTopK(k=0.3, choose="sample"),
    OracleSampling(k=0.3),
    Loki(k=0.3, choose="sample"),
    Kascade(k=0.3, min_keys=8, choose="sample"),
    MagicPIG(bits=6, tables=9, local=8, seal=8, centre=16, dense_layers=()),
]


class Live(TorchDispatchMode):
    """Bytes of tensors that were made while it is entered and still live; at most, since `since`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._views: dict[int, int] = {}  # storage -> tensors that hold it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        older = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)} - self._views.keys()
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and _storage(x) not in older:
                if _storage(x) not in self._views:
                    self._views[_storage(x)] = 0
                    self.now += x.untyped_storage().nbytes()
                    self.most = max(self.most, self.now)
                self._views[_storage(x)] += 1
                weakref.finalize(x, self._gone, _storage(x), x.untyped_storage().nbytes())
        return out

    def _gone(self, storage: int, size: int) -> None:
        self._views[storage] -= 1
        if not self._views[storage]:
            del self._views[storage]
            self.now -= size


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def held(method: AttentionMethod, rows: int) -> int:
    """Bytes that a layer of a decoding pass holds at most, the largest of all layers'."""
    whole, slots = text(CONTEXT + 1), list(range(rows))
    cache = new_cache(CacheConfig(capacity=CONTEXT + 1), slots=rows)
    run(cache, in_phase(method, "prefill"), [Turn(whole, slot, CONTEXT) for slot in slots])
    live, found, began = Live(), list[int](), 0

    def before(call: LayerCall) -> None:
        nonlocal began
        found.append(live.most - began)
        live.most = began = live.now

    with torch.no_grad(), live:
        run(cache, method, [Turn(whole, slot) for slot in slots], before=before, impl="triton")
    assert len(found) == LAYERS
    return max(*found[1:], live.most - began)


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_workspace_bytes(
    method: AttentionMethod, rows: int, plain: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lists, "check_entries", lambda *given: None)  # made on a CPU only
    declared = method.workspace_bytes(MODEL, rows, CONTEXT + 1, torch.float32)
    measured = held(method, rows) - plain.setdefault(rows, held(Dense(), rows))
    assert measured <= declared + 64 * rows
    if getattr(method, "redo", None) is None:  # on a CPU MagicPIG's lists are no longer than the sample
        assert declared <= 1.5 * measured + 64 * rows


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", SAMPLING, ids=repr)
def test_workspace_bytes_of_redone_rows(method: Any, rows: int) -> None:
    """The result of dense attention, and of both put together: fp32 outputs and an lse of each query head."""
    redone, plain = (
        each.workspace_bytes(MODEL, rows, CONTEXT + 1, torch.float32)
        for each in (replace(method, redo=0.1), replace(method, error_bars=True))
    )
    assert redone - plain == 2 * rows * MODEL.query_heads * (MODEL.head_dim + 1) * 4


@pytest.fixture(scope="module")
def plain() -> dict[int, int]:
    """rows -> what dense attention holds."""
    return {}


STATES: list[PromptObserver] = [
    Dense(),
    Quest(k=0.3, page=4, dense_layers=(1,)),
    Quest(page=7, dense_layers=()),
    Loki(rank=5),
    Kascade(k=0.3, min_keys=8),
    Kascade(k=0.3, min_keys=8, scoring="int8"),
    MAC(window=30, band=4),
    MAC(window=30, band=4, max_gap=9),
    MAC(window=None, band=None, tau=None, scale="calibrated"),
    SnapKV(capacity=64, window=12),
    BlockMKA(block=5, window=10, recall="summary", dense_layers=(1,)),
    BlockMKA(block=20, window=20, recall="bounds", share=(0, 2)),
    BlockMKA(block=10, window=20, recall="hash", bits=24, seed=2),
]
PAGE, PAGES = 10, 80


@pytest.mark.covering
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", STATES, ids=repr)
def test_state_bytes(method: PromptObserver, dtype: torch.dtype, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against tensors that live when all layers' states are there."""
    slots, made, live = 3, type(method).new_state, Live()

    def new_state(self: PromptObserver, call: LayerCall, slots: int) -> SequenceState | None:
        with live:
            return made(self, call, slots)

    cache = new_cache(CacheConfig("paged", page=PAGE, pages=PAGES) if paged else CacheConfig(capacity=CONTEXT), slots)
    monkeypatch.setattr(type(method), "new_state", new_state)
    run(cache, Observed(method), [Turn(text(40).to(dtype), 1, 40)], phase="prefill")  # type: ignore[arg-type]
    of_pages = paged and method.keeps == "tokens"
    allocated = live.now
    declared = method.state_bytes(MODEL, *((PAGES, PAGE) if of_pages else (slots, CONTEXT)), dtype)
    assert declared == allocated == states_of(cache).nbytes
    assert bool(declared) == method.observes_prompt
