"""Prompts pass through a model one by one; an interrupt loses none that was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from longreach.adapters.transformers import shape_of
from longreach.evals.calibration.gather import Gather, gather, packed, unpacked
from longreach.evals.calibration.kascade import KascadeGather, calibrated
from longreach.evals.calibration.prompts import Prompt
from longreach.records import Journal
from longreach.testing.tiny import tiny_model

PROMPTS = [Prompt(f"p{n}", tuple(range(n, n + 40))) for n in range(4)]


class Notes(Gather):
    """What it was called with."""

    needs_residuals: ClassVar[bool] = True

    def __init__(self) -> None:
        self.said: list[Any] = []

    def begin(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.said = [prompt.name]

    def layer(self, call: Any, outcome: Any) -> None:
        self.said.append((call.layer, call.rows.pos.tolist()))

    def residual(self, layer: int, x: Tensor, out: Tensor) -> None:
        self.said.append((layer, list(x.shape), list(out.shape)))

    def finish(self) -> Any:
        return self.said


class Rotations(Notes):
    needs_pre_rope: ClassVar[bool] = True
    needs_residuals: ClassVar[bool] = False

    def layer(self, call: Any, outcome: Any) -> None:
        q, k = call.pre_rope()
        self.said.append((list(q.shape), list(k.shape)))


def test_each_prompt_passes_layer_by_layer_in_chunks() -> None:
    told: list[int] = []

    class Bar:
        def __init__(self, what: str, total: int):
            told.append(-total)

        def __enter__(self) -> Any:
            return told.append

        def __exit__(self, *error: object) -> None:
            pass

    found = gather(tiny_model("llama"), PROMPTS[:2], Notes(), chunk=25, progress=Bar)  # type: ignore[arg-type]
    first, second = list(range(25)), list(range(25, 40))
    one = [(0, first), (0, [25, 64], [25, 64]), (1, first), (1, [25, 64], [25, 64]),
           (0, second), (0, [15, 64], [15, 64]), (1, second), (1, [15, 64], [15, 64])]  # fmt: skip
    assert found == [["p0", *one], ["p1", *one]]
    assert told == [-80, 25, 15, 25, 15]


def test_what_is_needed_before_rotation_is_there() -> None:
    (found,) = gather(tiny_model("llama"), PROMPTS[:1], Rotations(), chunk=40)
    assert found == ["p0", ([40, 4, 16], [40, 2, 16]), ([40, 4, 16], [40, 2, 16])]


@pytest.mark.parametrize("dies_in", [0, 2, 3])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, dies_in: int) -> None:
    model, asked = tiny_model("llama"), {"what": "a test"}
    whole = gather(model, PROMPTS, KascadeGather(shape_of(model), k=4, tile=8))

    class Dies(KascadeGather):
        def layer(self, call: Any, outcome: Any) -> None:
            if len(seen) == dies_in:
                raise KeyboardInterrupt
            super().layer(call, outcome)

        def finish(self) -> Any:
            seen.append(1)
            return super().finish()

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt) as stopped, Journal(tmp_path / "p.json", asked) as journal:
        gather(model, PROMPTS, Dies(shape_of(model), k=4, tile=8), keep=journal.add)
    assert bool(getattr(stopped.value, "__notes__", ())) == (dies_in > 0)
    with Journal(tmp_path / "p.json", asked) as journal:
        assert list(journal.done) == [p.name for p in PROMPTS[:dies_in]]
        seen = [1] * -10  # none dies now
        begun: list[str] = []

        class Counts(KascadeGather):
            def begin(self, prompt: Prompt) -> None:
                begun.append(prompt.name)
                super().begin(prompt)

        again = gather(model, PROMPTS, Counts(shape_of(model), k=4, tile=8), done=journal.done, keep=journal.add)
    assert begun == [p.name for p in PROMPTS[dies_in:]]
    one, other = calibrated(whole), calibrated(again)
    assert torch.equal(one.heads, other.heads) and torch.equal(one.importance, other.importance)
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(whole))


def test_tensors_come_back_to_the_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    floats = (torch.randn(3, 5, generator=draw).double() / 3, torch.rand(4, generator=draw), torch.ones(2, 0))
    for x in (*floats, torch.arange(6).reshape(2, 3), torch.arange(3).int()):
        again = unpacked(json.loads(json.dumps(packed(x))))
        assert torch.equal(again, x) and again.dtype == x.dtype


def test_the_model_is_as_before() -> None:
    model = tiny_model("llama")
    before = model(torch.arange(9)[None]).logits
    gather(model, PROMPTS[:1], KascadeGather(shape_of(model), k=4, tile=8))
    assert torch.equal(model(torch.arange(9)[None]).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
