"""What is kept of prompts, against every row, head and candidate on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.adapters.transformers import shape_of
from longreach.evals.calibration.gather import gather, unpacked
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.mac_study import amended
from longreach.evals.mac_study.gather import ReuseGather, StudySettings, layers_of
from longreach.evals.mac_study.matching import WAYS, windows_up_to
from longreach.methods.mac.plan import MACPlan
from longreach.testing.tiny import random_tokens, tiny_model
from tests.evals.mac_study.brute import layers

WHAT = StudySettings(window=40, band=5, sinks=2, rows=6)
LENGTH = 131
TOKENS = tuple(torch.randperm(250, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist())  # no two are alike


def plan_for(model: Any) -> MACPlan:
    shape = shape_of(model)
    energy = torch.rand(shape.layers, shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(1))
    each = (0.3,) * shape.layers
    return MACPlan((40,) * shape.layers, (5,) * shape.layers, {"sqrt2d": each, "calibrated": each}, energy, 0)


def part_of(model: Any, tokens: tuple[int, ...] = TOKENS, chunk: int = 512, what: StudySettings = WHAT) -> Any:
    (part,) = gather(model, [Prompt("p", tokens)], ReuseGather(shape_of(model), plan_for(model), what), chunk=chunk)
    return part


def test_what_is_measured() -> None:
    assert windows_up_to(2048) == (32, 64, 128, 256, 512, 1024, 2048) and windows_up_to(40) == (32, 40)
    assert windows_up_to(32) == (32,) and windows_up_to(7) == (7,)
    assert WHAT.windows == (32, 40) and WHAT.bands == (1, 5, 8, 16, 32) and WHAT.needed == 46
    assert WHAT.windows_of("post") == (40,) and WHAT.errors_of("cosine") == (1, (5,))


@pytest.mark.parametrize("chunk", [512, 37])
def test_matches_and_errors_are_those_of_every_pair(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunk == 37:
        monkeypatch.setattr(amended, "MOST", 1)  # a row at a time
    model = tiny_model("llama", num_hidden_layers=2)
    part, energy = part_of(model, chunk=chunk), plan_for(model).energy.double()
    rows = [40 + 91 * n // 6 for n in range(6)]
    assert part["rows"] == rows and layers_of([part]) == [0, 1]
    for n, layer in enumerate(layers(model, TOKENS)):
        weight = (energy[n].sqrt() * layer.scale).repeat_interleave(2, 0)
        queries = {
            "sqrt2d": layer.before, "calibrated": layer.before * weight, "post": layer.q,
            "cosine": layer.before / layer.before.norm(dim=-1, keepdim=True),
        }  # fmt: skip
        for way in WAYS:
            distance, gap, error = (unpacked(part[name][way])[n] for name in ("distance", "gap", "error"))
            count, bands = WHAT.errors_of(way)
            for w, window in enumerate(WHAT.windows_of(way)):
                for r, row in enumerate(rows):
                    for head in range(4):
                        low = max(row - window, WHAT.sinks + 1)  # before it an entry would be empty
                        apart = (queries[way][low:row, head] - queries[way][row, head]).square().sum(-1)
                        earlier = low + int(apart.argmin())
                        assert int(gap[w, r, head]) == row - earlier
                        assert float(distance[w, r, head]) == pytest.approx(float(apart.min()), rel=1e-3, abs=1e-5)
                        place = w - len(gap) + count
                        if place < 0:
                            continue
                        want = [layer.error(row, head, earlier, band, WHAT.sinks) for band in bands]
                        assert error[place, r, head].tolist() == pytest.approx(want, abs=2e-4)


def test_weight_on_bands() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    part = part_of(model)
    for n, layer in enumerate(layers(model, TOKENS)):
        mass = unpacked(part["mass"])[n]
        for head in range(4):
            for place, band in enumerate(WHAT.bands):
                want = 0.0
                for row in part["rows"]:
                    share = layer.logits(row, head)[2 : row + 1].softmax(0)
                    want += float(share[-band:].sum()) / 6
                assert float(mass[head, place]) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("family", ["llama_yarn", "gemma2", "gpt_oss", "glm4"])
def test_families(family: str) -> None:
    """Soft caps, sinks, windows and odd rotations: with all in the band nothing is reused, and nothing is wrong."""
    model = tiny_model(family)
    what = StudySettings(window=40, band=500, sinks=0, rows=4)
    part = part_of(model, what=what)
    some = layers_of([part])
    assert some
    error = unpacked(part["error"]["sqrt2d"])[some]
    assert float(error[..., -1].max()) < 1e-5 and float(error[..., 0].max()) > 1e-3
    assert bool(torch.isfinite(unpacked(part["distance"]["calibrated"])[some]).all())
    other = [n for n in range(shape_of(model).layers) if n not in some]
    assert other or family not in ("gemma2", "gpt_oss")
    assert bool((unpacked(part["gap"]["post"])[other] == -1).all())


def test_a_row_with_the_same_query_costs_nothing_before_rotation() -> None:
    """Layer 0 sees tokens alone: where the token came before, the distance is 0, but after rotation it is not."""
    model = tiny_model("llama", num_hidden_layers=1)
    again = (*TOKENS[:100], *TOKENS[70:100])
    part = part_of(model, again, what=StudySettings(window=90, band=5, sinks=0, rows=40))
    rows = torch.tensor(part["rows"]) >= 100
    gap, near, apart = (unpacked(part[name][way])[0, -1][rows] for name, way in
                        (("gap", "sqrt2d"), ("distance", "sqrt2d"), ("distance", "post")))  # fmt: skip
    assert bool((gap == 30).all()) and float(near.max()) < 1e-6 < float(apart.min())


def test_memory_does_not_grow_with_the_prompt() -> None:
    """What is kept of a layer are its last rows."""
    model = tiny_model("llama", num_hidden_layers=1)
    what = ReuseGather(shape_of(model), plan_for(model), WHAT)
    seen: list[int] = []
    plain = what.finish

    def finish() -> Any:
        seen.append(sum(_bytes(x.kept.q) for x in what._recent if x.kept))
        return plain()

    what.finish = finish  # type: ignore[method-assign]
    prompts = [Prompt(str(n), tuple(random_tokens(1, n, seed=n)[0].tolist())) for n in (100, 700)]
    gather(model, prompts, what, chunk=64)
    assert seen == [40 * 4 * 16 * 4] * 2


def _bytes(x: Tensor) -> int:
    return x.untyped_storage().nbytes()
