"""Steps that also read prompts run the variants of kernels that captured steps and prompts alone have compiled.

A GPU compiles a kernel once for each variant: the dtypes of its tensors and whether they begin at multiples of 16
bytes, which integers are 1 or divisible by 16, and its constants. Here Triton interprets, and the variants are noted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from longreach.adapters.vllm.rows import BatchRows, DecodeBuffers, prompt_rows
from longreach.adapters.vllm.splitting import split
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from longreach.methods.kascade import Kascade
from longreach.methods.less_is_more import LessIsMore
from longreach.methods.loki import Loki
from longreach.methods.omnikv import OmniKV
from longreach.methods.quest import Quest
from longreach.methods.streaming_llm import StreamingLLM
from longreach.ops import KVView, Rows
from longreach.ops.impl import Implementations
from longreach.runtime import Ledger, Pass, Segment, StateStore, attend_layer, note_attended
from tests.adapters.vllm.test_splitting import batch
from tests.interpreter import VERSIONS
from tests.methods.conftest import _planned, plans_of_tests  # noqa: F401 - fixtures
from tests.methods.drive import DIM, HEADS, KV_HEADS, LAYERS, MODEL, SCALE

PAGE, PAGES, SIZE = 8, 64, 4
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets on a CPU"),
    # vLLM for CPUs brings a later one, whose interpreter refuses these kernels
    pytest.mark.skipif(not triton.__version__.startswith(VERSIONS), reason=f"needs Triton {', '.join(VERSIONS)}"),
]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops that are not told which implementation they have take Triton's."""
    choose = Implementations.choose

    def triton_first(self: Implementations, impl: str, device: torch.device, *given: Any) -> str:
        return choose(self, "triton" if impl == "auto" and "triton" in self.paths else impl, device, *given)

    monkeypatch.setattr(Implementations, "choose", triton_first)


@contextmanager
def variants(found: set[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note each launched kernel with what Triton specialises it by."""
    run = InterpretedFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        free, parameters = self.kwargs.get("do_not_specialize") or (), inspect.signature(self.fn).parameters
        named = {**dict(zip(self.arg_names, args, strict=False)), **given}
        facts = list[Any]([self.fn.__name__])
        for name, x in sorted(named.items()):
            constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
            facts.append((name, x if constant else special(x, name not in free)))
        found.add(tuple(facts))
        return run(self, *args, grid=grid, warmup=warmup, **given)

    with monkeypatch.context() as patched:
        patched.setattr(InterpretedFunction, "run", note)
        yield


def special(x: Any, specialised: bool) -> Any:
    """What a kernel is compiled for of one argument that is no constant."""
    if isinstance(x, tuple):
        return tuple(special(each, specialised) for each in x)
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int) and not isinstance(x, bool):
        return (x == 1, x % 16 == 0) if specialised else "int"
    return x


class Memory:
    """Pages of all layers as vLLM has them, K and V beside each other, and one method's state."""

    def __init__(self, method: AttentionMethod):
        self.method = method
        self.pages = [torch.randn(PAGES, KV_HEADS, PAGE, 2 * DIM) for _ in range(LAYERS)]
        self.store = StateStore(SIZE + 1, shared_pages=True, all_observed=True)
        self.buffers = DecodeBuffers(SIZE, torch.device("cpu"))

    def run(self, requests: list[tuple[int, int, bool]], size: int, *, uniform: bool) -> None:
        """One step over requests as in `batch`, with decoding rows padded to a size."""
        given = batch(*requests)
        some, query = split(given, whole=uniform), torch.randn(sum(n for _, n, _ in requests), HEADS, DIM)
        observers = (self.method,) if self.method.observes_prompt else ()
        ledger = Ledger()
        decode = Pass((Segment("decode", self.method),), MODEL, self.store, ledger)
        prompt = Pass((Segment("prefill", Dense(), observers),), MODEL, self.store, ledger)
        for layer in range(LAYERS):
            if len(some.prompt):
                rows = prompt_rows(given, some, None)
                note_attended(prompt, self._call(prompt, layer, rows, query[rows.rows]), "FLASH_ATTN")
            if len(some.decode):
                rows = self.buffers.fill(given, some, None, size)
                attend_layer(decode, self._call(decode, layer, rows, rows.of(query)))
        ledger.commit()

    def _call(self, p: Pass, layer: int, rows: BatchRows, query: Tensor) -> Any:
        k, v = self.pages[layer][..., :DIM], self.pages[layer][..., DIM:]
        kv = KVView(k, v, rows.seq_lens, rows.table)
        return p.call(layer, Rows(query, rows.seq, rows.pos, rows.runs), kv, rows.slots, SCALE)


METHODS = [
    Dense(),
    StreamingLLM(sinks=2, window=9),
    Quest(k=12, page=4, dense_layers=()),
    Kascade(k=7, min_keys=4),
    Kascade(k=7, min_keys=4, scoring="int8"),
    OmniKV(k=8, layers=(0, 2)),
    LessIsMore(k=8),
    Loki(k=8, rank=4),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name}-{getattr(method, 'scoring', '')}")
def test_steps_that_read_prompts_run_known_kernels(method: AttentionMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, captured, alone = Memory(method), set[Any](), set[Any]()
    with variants(captured, monkeypatch):
        memory.run([(10 + n, 1, False) for n in range(SIZE)], SIZE, uniform=True)
    with variants(alone, monkeypatch):
        memory.run([(0, 16, True)], 0, uniform=False)
        memory.run([(0, 5, True)], 0, uniform=False)
    assert captured
    for decoding in (1, 2, 3):
        mixed = set[Any]()
        with variants(mixed, monkeypatch):
            memory.run([(9 + n, 1, False) for n in range(decoding)] + [(3, 11, True)], SIZE, uniform=False)
        assert mixed and not mixed - captured - alone
