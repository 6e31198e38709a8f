"""The mask function of longreach's attention: it builds no mask, but finds out which one the model means.

Causality, padding and windows are ours (positions, ragged rows, spans), so no [T, N] mask is needed. What the
model means by its mask is asked of its mask function at chosen points, and handed to the layers as a Pattern:
only the mask shows a layer's window for sure, since not every model passes it to attention as a keyword.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from longreach.errors import Unsupported


class _NoTensor(Unsupported, AttributeError):
    """The model handles its attention mask as a tensor."""


@dataclass(frozen=True)
class Pattern:
    """What a mask means: causal, within the last `window` tokens if there is a window."""

    window: int | None = None

    def __str__(self) -> str:
        return "causal" if self.window is None else f"a sliding window of {self.window}"


class Mask:
    """Replaces a mask. Its pattern is found when a layer asks: some models make masks that no layer uses."""

    def __init__(self, find: Callable[[], Pattern]) -> None:
        self._find = find

    @cached_property
    def pattern(self) -> Pattern:
        """Raises Unsupported."""
        return self._find()

    def __getattr__(self, name: str) -> Any:
        raise _NoTensor(
            f"the model reads .{name} of its attention mask, and longreach builds no mask; it cannot attach"
        )

    def __getitem__(self, index: Any) -> Any:
        raise _NoTensor("the model cuts its attention mask, and longreach builds no mask; it cannot attach")


def mask(*args: Any, **kwargs: Any) -> Mask:
    """For transformers: replaces a mask function's result. Takes what `pattern` takes."""
    return Mask(partial(pattern, *args, **kwargs))


def pattern(
    batch_size: int,
    q_length: int | Tensor,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    config: Any = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Pattern:
    """The pattern that the model's mask proved to be: causal, or causal within a window. Raises Unsupported.

    local_size: set by transformers for a window (or a chunk), even if the pass is shorter.
    """
    length, first = int(q_length), int(q_offset)
    windows = [local_size, getattr(config, "sliding_window", None)]
    patterns = [Pattern(w) for w in dict.fromkeys(windows) if isinstance(w, int)]
    patterns.insert(0 if local_size is None else len(patterns), Pattern())
    if mask_function is None:
        raise Unsupported("the model requests an attention mask without a mask function")
    q, k = _points(first, length, kv_offset + kv_length, [p.window for p in patterns if p.window is not None])
    points = (torch.arange(batch_size)[:, None], torch.zeros((), dtype=torch.long), q, k)
    try:
        try:
            said = mask_function(*points)
        except RuntimeError:  # it compares positions with the padding, which lies on the model's device
            said = mask_function(*(x.to(kwargs.get("device", "cpu")) for x in points))
        allowed = torch.as_tensor(said).bool().cpu().expand(batch_size, len(q))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise Unsupported(f"the model's mask function failed on test positions: {error}") from error
    for candidate in patterns:
        meant = k <= q if candidate.window is None else (k <= q) & (k > q - candidate.window)
        if bool((allowed == meant).all()):
            return candidate
    raise Unsupported(
        "this model (or input) masks attention in a way that is neither causal nor a sliding window "
        "(packed sequences, chunked or bidirectional attention); longreach does not implement that pattern"
    )


def _points(first: int, length: int, stop: int, windows: list[int]) -> tuple[Tensor, Tensor]:
    """Pairs (q, k) that distinguish patterns, on the CPU: each query with keys at every edge, a grid over the rest.

    Chunks, packed sequences and bidirectional blocks differ from causal next to the diagonal, or at its start.
    """
    offsets = [1, 0, -1, *(d for w in windows for d in (1 - w, -w))]
    if length == 1:
        keys = sorted({k for k in (0, first // 2, *(first + d for d in offsets)) if 0 <= k < stop})
        return torch.full((len(keys),), first), torch.tensor(keys)
    q = torch.arange(first, first + length)
    near = torch.stack([q + d for d in offsets] + [torch.zeros_like(q)])
    rows = torch.linspace(first, first + length - 1, min(length, 33)).round().long()
    columns = torch.linspace(0, stop - 1, min(stop, 65)).round().long()
    pairs_q = torch.cat([q.expand(near.shape).flatten(), rows.repeat_interleave(len(columns))])
    pairs_k = torch.cat([near.flatten(), columns.repeat(len(rows))])
    inside = (pairs_k >= 0) & (pairs_k < stop)
    return pairs_q[inside], pairs_k[inside]
