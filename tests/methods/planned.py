"""Plans for the models of these tests, in the place of those that are shipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from longreach.adapters.transformers import shape_of
from longreach.methods.call import ModelShape
from longreach.methods.kascade.plan import KascadePlan
from longreach.methods.loki.calibrate import moments, principal
from longreach.methods.loki.plan import LokiPlan
from longreach.methods.mac.plan import MACPlan
from longreach.methods.magicpig.plan import MagicPIGPlan, Options
from longreach.plans import Made, Plan, PlannedModel, finding
from longreach.testing.tiny import tiny_model
from tests.methods.drive import LAYERS, MODEL, text

MADE = Made("a test's", "00" * 32, 1, {}, 0, "0", None, torch.__version__, "0", "cpu")


def changed(fields: Mapping[str, Any], name: str, change: Callable[[Any], Any] | None) -> dict[str, Any]:
    """A plan's values or arrays with one of them changed; without it if `change` is None."""
    rest = {key: value for key, value in fields.items() if key != name}
    return rest if change is None else {**rest, name: change(fields[name])}


def loki_plan(shape: ModelShape, heavy: dict[int, float] | None = None) -> Plan:
    """Of the keys of `text`, whose shared direction comes first where some keys are heavy."""
    keys = text(61, heavy=heavy).k  # [L, N, G, D]
    found = [principal(moments(k)) for k in keys]
    arrays = LokiPlan(torch.stack([b for b, _ in found]), torch.stack([v for _, v in found])).arrays()
    return Plan("loki", PlannedModel.of("of the tests", shape), {}, MADE, arrays)


def kascade_plan(shape: ModelShape) -> Plan:
    """Layers 0 and 2 choose, layer 1 reuses what layer 0 does; tiles of 4 tokens, of two query heads each."""
    heads = tuple(range(shape.kv_heads))
    found = KascadePlan(anchors=(0, 2), head_map=(heads,) * LAYERS, layers=tuple(range(LAYERS)), k=4, tile=8)
    return Plan("kascade", PlannedModel.of("of the tests", shape), found.values(), MADE)


def mac_plan(shape: ModelShape) -> Plan:
    """Small rings and narrow bands; thresholds that let most rows pass under either scale."""
    energy = text(61).k.double().square().mean(1)  # [L, G, D]
    energy = (energy + energy.roll(shape.head_dim // 2, -1)) / 2
    tau = {"sqrt2d": (0.1,) * LAYERS, "calibrated": (0.0, 0.02, 0.01)}
    found = MACPlan((16, 9, 12), (4, 3, 5), tau, 0.02 * energy, 0)  # type: ignore[arg-type]
    return Plan("mac", PlannedModel.of("of the tests", shape), found.values(), MADE, found.arrays())


def magicpig_plan(shape: ModelShape, chosen: tuple[tuple[int, int], ...] = ((4, 9), (0, 0), (5, 12))) -> Plan:
    """Layer 1 attends densely; more tables have less error and read more."""
    pairs, (layers, heads) = ((4, 9), (5, 12), (6, 5)), (shape.layers, shape.kv_heads)
    numbers = {"error": (0.2, 0.1, 0.5), "sampled": (0.3, 0.4, 0.1), "sampled_heads": (0.5, 0.7, 0.2),
               "looked_up": (1.2, 1.1, 0.3)}  # fmt: skip
    arrays = {name: torch.tensor(x).expand(layers, heads, 3).clone() for name, x in numbers.items()}
    arrays["error"] *= torch.arange(1, layers + 1)[:, None, None]
    found = MagicPIGPlan(
        chosen, pairs, tuple(range(layers)),
        Options(seed=0, least=2, share="group", sinks=4, local=8, seal=8, centre=8),
        budget=0.7, memory=None, length=200, element=4, heads=(shape.query_heads, heads, shape.head_dim), **arrays,
    )  # fmt: skip
    return Plan("magicpig", PlannedModel.of("of the tests", shape), found.values(), MADE, found.arrays())


def tiny() -> PreTrainedModel:
    """The model that the contract runs."""
    return tiny_model("llama", num_hidden_layers=LAYERS)


def write_plans(root: Path) -> Path:
    """A folder with the plans, laid out as the package is; returns `root`."""
    folder = root / "plans" / "shipped"
    for name, shape in (("drive", MODEL), ("tiny", shape_of(tiny()))):
        loki_plan(shape, {2: 9.0, 30: 9.0, 58: 9.0}).save(folder / f"loki-{name}.json")
        kascade_plan(shape).save(folder / f"kascade-{name}.json")
        mac_plan(shape).save(folder / f"mac-{name}.json")
        magicpig_plan(shape).save(folder / f"magicpig-{name}.json")
    return root


@contextmanager
def planned(root: Path) -> Iterator[None]:
    """Within this block these are the plans that come with longreach."""
    with patch.object(finding, "files", lambda package: root):
        yield
