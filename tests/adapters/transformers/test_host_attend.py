"""When the two ways to attend to host memory are not compared, and what is said then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longreach import CacheConfig, attach, generate
from longreach.adapters.transformers.loop import host_attend
from longreach.adapters.transformers.loop.host_attend import NEEDED
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.reference import prompt


def reason(*, impl: str = "auto", room: int = NEEDED, captured: bool = True) -> str | None:
    session: Any = SimpleNamespace(impl=impl)
    return host_attend._not_measured(session, room, captured)


def test_why_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason() is None
    assert reason(captured=False) == "not measured, as the step is not captured"
    assert reason(impl="triton") == "not measured, as impl='triton' was asked for"
    assert reason(room=3) == f"not measured, as that takes {NEEDED} tokens, and 3 were asked for"
    monkeypatch.setattr(host_attend, "has_numba", lambda: False)
    assert reason() == "not measured, as Numba is not installed"


def test_on_a_cpu_there_is_no_choice() -> None:
    with attach(tiny_model("llama"), decode="quest", cache=CacheConfig(host=True)) as session:
        generate(session, prompt(), max_new_tokens=12)
        memory = session.report().memory
    assert memory is not None and (memory.attend.by, memory.attend.why) == ("link", None)
