"""Parameters of a model with MKA's layers in groups, as torch's optimisers take them."""

from __future__ import annotations

from typing import Any

from torch import nn

from longreach.mka.router import Vector
from longreach.ops.types import require


def parameter_groups(model: nn.Module, lr: float, gate_lr: float | None = None,
                     weight_decay: float = 0.0) -> list[dict[str, Any]]:  # fmt: skip
    """Groups for an optimiser: gates and decays at their own rate, and no weight decay for them, biases and norms.

    gate_lr: None: 10 lr. Gates start at 0, and routers and decays learn only once they have moved. Parameters that need
    no gradient are left out. Empty groups too. Raises InvalidInput for a model without MKA's layers.
    """
    vectors = {id(m.bias) for m in model.modules() if isinstance(m, Vector)}
    require(bool(vectors), "parameter_groups: expected a model with MKA's layers; convert it first (longreach.convert)")
    gates, plain, decayed = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in vectors:
            gates.append(parameter)
        else:
            (plain if parameter.dim() < 2 or name.endswith("bias") else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "lr": lr, "weight_decay": weight_decay},
        {"params": plain, "lr": lr, "weight_decay": 0.0},
        {"params": gates, "lr": 10 * lr if gate_lr is None else gate_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
