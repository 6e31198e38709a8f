"""The entry point of attend_mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longreach.ops.attend import attend, resolve
from longreach.ops.impl import Implementations
from longreach.ops.mix.api import KeySet, mix
from longreach.ops.selection import Lists, Spans
from longreach.ops.types import Partial

_TOGETHER = Implementations("attend_mixed", {"triton": "longreach.ops.mix.triton_attended:attend_mixed"})


def attend_mixed(sets: Sequence[KeySet], weights: Tensor, *, scale: float, impl: str = "auto") -> Partial:
    """One softmax over several key sets, every key of set s weighted by weights[..., s]: mix of attend over each set.

    sets: S of them, of rows with the same queries [R, H, D]. weights: as `mix` takes them. impl: as `attend` takes it.

    Returns, and raises, what `mix` of `attend` does, and is differentiable in the same inputs. Where Triton computes
    all sets and a gradient is required, one pass over the mixture's output serves the backward of all sets, the sets'
    outputs are kept with the dtype of q, and no gradients of them are written; gradients of weights are those of
    the rounded outputs.
    """
    mixing = impl if impl in ("reference", "triton") else "auto"
    if _together(sets, weights, impl):
        found: Partial = _TOGETHER.get("triton", weights.device)(sets, weights, scale)
        return found
    return mix([attend(*each, scale=scale, impl=impl) for each in sets], weights, impl=mixing)


def _together(sets: Sequence[KeySet], weights: Tensor, impl: str) -> bool:
    if not sets or not torch.is_grad_enabled():
        return False
    inputs = [weights, *(x for rows, kv, _ in sets for x in (rows.q, kv.k, kv.v))]
    plain = all(
        isinstance(chosen, (Spans, Lists)) and getattr(chosen, "log_weight", None) is None for _, _, chosen in sets
    )
    return plain and any(x.requires_grad for x in inputs) and all(resolve(impl, *each) == "triton" for each in sets)
