"""How a converted model weighs its memory levels on a text, by layer and by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import context_limit
from longreach.errors import InvalidInput
from longreach.evals.progress import Progress, unseen
from longreach.mka.levels import Levels

BUCKETS = 8  # of positions in a window
QUANTITIES = ("weight", "lambda")


def levels_of(model: Any) -> dict[int, Levels]:
    """layer -> its trained levels, ascending; empty for a model without MKA's layers."""
    found = {module.layer: module for module in model.modules() if isinstance(module, Levels)}
    return dict(sorted(found.items()))


def edges_of(length: int) -> list[int]:
    """Where the parts of a window start, and its length: at most BUCKETS parts of equal width."""
    parts = min(BUCKETS, length)
    return [length * part // parts for part in range(parts + 1)]


@torch.no_grad()
def measure(model: Any, windows: Sequence[list[int]], progress: Progress = unseen) -> dict[str, Any]:
    """Results of a record: means of the levels' weights and of lambda, over windows of one length.

    levels: the levels in use. tokens: counted in each layer. positions: start and stop of each part of a window.
    layers: for each converted layer its gates, and the means [levels] over all tokens and [parts][levels] by position.
    Each window is one pass without a cache and one sync. The model keeps no hooks.
    Raises InvalidInput for a model without MKA's layers, or windows that exceed its context.
    """
    levels, length = levels_of(model), len(windows[0])
    if not levels:
        raise InvalidInput("expected a model with MKA's layers, got one without; convert it first (longreach.convert)")
    context = context_limit(model)
    if context is not None and length > context:
        raise InvalidInput(f"windows of {length} tokens exceed the model's context of {context} tokens; lower --length")
    edges = edges_of(length)
    sizes = [stop - start for start, stop in pairwise(edges)]
    tiers = next(iter(levels.values())).config.tiers  # of all layers
    total = torch.zeros(len(levels), len(QUANTITIES), len(sizes), len(tiers), dtype=torch.float64)
    with progress("reading", length * len(windows)) as advance, _collected(levels, sizes) as found:
        for window in windows:
            model.get_decoder()(input_ids=torch.tensor([window], device=model.device), use_cache=False)
            total += torch.stack([found[layer] for layer in levels]).cpu().double()
            found.clear()
            advance(length)
    means = total / len(windows)  # of each part, whose tokens are the same in all windows
    shares = torch.tensor(sizes, dtype=torch.float64) / length
    return {
        "levels": list(tiers),
        "tokens": length * len(windows),
        "positions": [{"start": start, "stop": stop} for start, stop in pairwise(edges)],
        "layers": {str(layer): _entry(one, mean, shares) for (layer, one), mean in zip(levels.items(), means)},
    }


def _entry(levels: Levels, means: Tensor, shares: Tensor) -> dict[str, Any]:
    """A layer's part of a record. means: [quantities, parts, levels]."""
    whole = torch.einsum("p,qpl->ql", shares, means)
    return {
        "gate": levels.router.gate.bias.tolist(),
        **{name: mean.tolist() for name, mean in zip(QUANTITIES, whole)},
        "by_position": {name: mean.tolist() for name, mean in zip(QUANTITIES, means)},
    }


@contextmanager
def _collected(levels: dict[int, Levels], sizes: list[int]) -> Iterator[dict[int, Tensor]]:
    """layer -> means [quantities, parts, levels] of its last pass, fp32 (fp64 for fp64), on the device."""
    found = dict[int, Tensor]()

    def hook(layer: int) -> Any:
        def collect(router: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: Tensor) -> None:
            both = torch.stack([weights, router.lambdas(*args, **kwargs)])
            found[layer] = torch.stack([part.mean(1) for part in both.split(sizes, 1)], 1)

        return collect

    hooks = [one.router.register_forward_hook(hook(layer), with_kwargs=True) for layer, one in levels.items()]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()
