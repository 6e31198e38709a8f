"""Error bars: how far attention over sampled keys is from dense attention, by the sample itself.

The standard error of a row's output is the square root of `ops.sampling_variance`, for keys sampled by hashing of
`Hashed.variance`. Over its length it is the relative error: 0.1 means that the output is expected to be a tenth of its
length away from dense attention's, and about 95% of outputs lie within twice that. It is an estimate from the sampled
keys alone: no other key is read.

It costs a second pass over the sampled keys and values. With `redo` a row whose error is too large attends densely: one
more pass over all its keys, and over none where nothing is redone. Nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.methods.base import Notes, Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import Lists, Partial, Span, Spans, absolute
from longreach.ops.types import require

COLUMNS = ("relative_error", "finite", "redone", "rows")
AT = {name: number for number, name in enumerate(COLUMNS)}


@dataclass(frozen=True)
class SampledLists(Lists):
    """Lists of sampled keys. factor: fp32 like index, of each key, as `ops.sampling_variance` takes it."""

    factor: Tensor | None = None


class ErrorBars(NamedTuple):
    """relative: fp32 [R, H], standard error over the output's length, before anything is redone; infinite for an
    output of zeros. redone: bool [R, G], rows and KV heads that attended densely. reads: of the call's noted reads,
    those of the estimate.
    """

    relative: Tensor
    redone: Tensor
    reads: slice


class Hashed(NamedTuple):
    """Factors for keys sampled by hashing, which are not sampled independently of each other.

    The variance is (1 + few / n) (each S + together U), of lists of n sampled keys. S is `ops.sampling_variance`, as if
    keys were sampled independently. U = f s^2 |o_s - o|^2 is that of an error of all sampled keys together: s is their
    weight in softmax, o_s attention over them alone, o the output, and f the mean factor of the keys.
    """

    each: float
    together: float
    few: float

    def variance(self, independent: Tensor, whole: Partial, sampled: Partial, lists: Lists, factor: Tensor) -> Tensor:
        """fp32 [R, H], from `sampling_variance` and attention over the lists alone; 0 for a list that overflowed."""
        used, heads = _used(lists, factor), independent.shape[1]
        n = lists.count.clamp(min=1)
        f = _by_query_head(torch.where(used, factor, 0).sum(2) / n, lists, heads)
        weight = (sampled.lse - whole.lse).exp().masked_fill(sampled.lse == -torch.inf, 0)
        moved = (sampled.out - whole.out).square().sum(-1)
        found = self.each * independent + self.together * f * weight.square() * moved
        found = found * (1 + self.few / _by_query_head(n, lists, heads))
        return found.masked_fill(_by_query_head(lists.overflowed, lists, heads), 0)


def check_error_bars(error_bars: object, redo: object, *, sampled: bool = True) -> None:
    """Raise InvalidInput for option values that do not fit. sampled: whether the method samples keys."""
    require(isinstance(error_bars, bool), f"error_bars: expected True or False, got {error_bars!r}")
    number = isinstance(redo, (int, float)) and not isinstance(redo, bool) and math.isfinite(redo) and redo >= 0
    require(redo is None or number, f"redo: expected None or a number >= 0, got {redo!r}")
    for name, value in (("error_bars", error_bars), ("redo", redo)):
        unused = value is None or value is False
        require(sampled or unused, f"{name}: expected choose='sample', as other keys have no sampling error")


def measured(
    call: LayerCall,
    whole: Partial,
    lists: Lists,
    factor: Tensor,
    redo: float | None,
    *,
    candidates: Tensor,
    draws: Tensor | None = None,
    hashed: tuple[Hashed, Partial] | None = None,
) -> tuple[Partial, ErrorBars]:
    """Attention with its error bars; where they exceed `redo`, dense attention instead.

    whole: attention over sampled lists and certain keys. factor: of the lists' entries. candidates: int [R, 1], the
    keys from which a list takes its own. If it takes some of them, and none by chance, nothing is known about the
    others: the relative error then counts as 1. draws: int like lists.count, sizes of samples that are all that is
    attended to: one of a single draw shows no deviation, so its error counts as 1 too. None: other keys are attended to
    as well. hashed: for keys sampled by hashing, with attention over the lists alone. None: keys are sampled
    independently, or systematically.
    A KV head is redone for a row if the error of any of its query heads exceeds `redo`.
    """
    began = len(call.meter.noted)
    variance = call.op("sampling_variance", lists, factor, whole)
    reads, heads = slice(began, len(call.meter.noted)), call.kv.heads
    if hashed is not None:
        law, sampled = hashed
        variance = law.variance(variance, whole, sampled, lists, factor)
    error = variance.sqrt()
    relative = torch.where(error == 0, 0, error / torch.linalg.vector_norm(whole.out, dim=-1))
    relative = relative.masked_fill(_unknown(lists, factor, candidates, draws, relative.shape[1]), 1.0)
    if redo is None:
        redone = torch.zeros(relative.shape[0], heads, dtype=torch.bool, device=relative.device)
        return whole, ErrorBars(relative, redone, reads)
    redone = (relative > redo).unflatten(1, (heads, -1)).any(2)
    everything = Span(absolute(0), absolute(torch.where(redone, call.context[:, None], 0)))
    dense = call.attend(Spans((everything,)))
    taken = redone.repeat_interleave(relative.shape[1] // heads, 1)
    out = torch.where(taken[..., None], dense.out, whole.out)
    return Partial(out, torch.where(taken, dense.lse, whole.lse)), ErrorBars(relative, redone, reads)


def _unknown(lists: Lists, factor: Tensor, candidates: Tensor, draws: Tensor | None, heads: int) -> Tensor:
    """bool [R, heads]: query heads whose sample shows nothing about the keys that it left out."""
    unknown = ~(_used(lists, factor) & (factor > 0)).any(2)
    unknown = unknown if draws is None else unknown | (draws < 2)
    unknown = unknown & (lists.count < candidates) & ~lists.overflowed
    return _by_query_head(unknown, lists, heads)


def _used(lists: Lists, factor: Tensor) -> Tensor:
    """bool like factor: entries before a list's end."""
    return torch.arange(factor.shape[2], dtype=torch.int32, device=factor.device) < lists.count[..., None]


def _by_query_head(x: Tensor, lists: Lists, heads: int) -> Tensor:
    """[R, lists] -> [R, heads]."""
    assert lists.row_to_list is None  # rows of decode have lists of their own
    x = x if lists.head_map is None else x[:, lists.head_map.long()]
    return x.repeat_interleave(heads // x.shape[1], 1)


def outcome(
    call: LayerCall, whole: Partial, lists: Lists, error_bars: bool, redo: float | None, draws: Tensor | None = None
) -> Outcome:
    """The outcome of attention over lists, with error bars if the options ask for them. draws: None: lists.count."""
    if not error_bars and redo is None:
        return Outcome(whole)
    assert isinstance(lists, SampledLists) and lists.factor is not None  # check_error_bars refuses other lists
    draws = lists.count if draws is None else draws
    whole, bars = measured(call, whole, lists, lists.factor, redo, candidates=call.context[:, None], draws=draws)
    return Outcome(whole, notes=Notes((columns(bars),), _same, _summary), relative_error=bars.relative)


def columns(bars: ErrorBars) -> Tensor:
    """fp64 [R, G, COLUMNS]. An error that is not finite is left out of the mean."""
    relative = bars.relative.double().unflatten(1, (bars.redone.shape[1], -1))
    finite = relative.isfinite()
    number = finite.double().mean(2)
    return torch.stack(
        [torch.where(finite, relative, 0).mean(2), number, bars.redone.double(), torch.ones_like(number)], -1
    )


def summary(sums: Tensor) -> dict[str, Any]:
    """The report's values from sums of `columns`, fp64 [G, COLUMNS].

    relative_error: mean over rows and query heads of the standard error of the output over its length, by KV head,
    before anything is redone. redone: share of rows that attended densely for it, by KV head.
    """
    error = sums[:, AT["relative_error"]] / sums[:, AT["finite"]].clamp(min=1e-9)
    redone = sums[:, AT["redone"]] / sums[:, AT["rows"]].clamp(min=1)
    return {"relative_error": error.tolist(), "redone": redone.tolist()}


def note(values: dict[str, Any]) -> str:
    """The summary in words."""
    error, redone = (sum(values[name]) / len(values[name]) for name in ("relative_error", "redone"))
    return f"relative error {error:.1%}" + (f", {redone:.1%} redone" if redone else "")


def redo_bytes(model: ModelShape, rows: int, redo: float | None) -> int:
    """Memory that dense attention for rows with large errors takes: its result, and the two put together."""
    return 0 if redo is None else 2 * 4 * rows * model.query_heads * (model.head_dim + 1)


def _same(x: Tensor) -> Tensor:
    return x


def _summary(sums: Tensor, rows: int) -> dict[str, Any]:
    values = summary(sums)
    return {"note": note(values), **values}
