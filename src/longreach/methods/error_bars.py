"""Error bars: how far attention over sampled keys is from dense attention, by the sample itself.

The standard error of a row's output is the square root of `ops.sampling_variance`; for keys sampled by hashing, of
`Hashed.variance`. Over its length it is the relative error: 0.1 means that the output is expected to be a tenth of its
length away from dense attention's, and about 95% of outputs lie within twice that. It is an estimate from the sampled
keys alone: no other key is read.

It costs a second pass over the sampled keys and values. With `redo` a row whose error is too large attends densely: one
more pass over all its keys, and over none where nothing is redone. Nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.methods.base import Notes, Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import Lists, Partial, Span, Spans, absolute
from longreach.ops.doors import Read
from longreach.ops.types import accumulator, require

COLUMNS = ("relative_error", "finite", "redone", "rows")
AT = {name: number for number, name in enumerate(COLUMNS)}
ENTRIES = 512  # of a list that `Hashed` takes at a time
TINY = 2.0**-126  # the smallest normal number of fp32


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

    The variance is (1 + few / n) (each S + together C). A sampled key has the factor f_i, the weight W_i in softmax and
    the value v_i. With o the output and b_i = sqrt(f_i) W_i (v_i - o):
    S = sum over keys of |b_i|^2 is `ops.sampling_variance`, as if keys were sampled independently.
    C = sum over pairs of keys of cos(k_i, k_j) b_i . b_j, the same with correlated keys. The correlation of two keys'
    collisions with the query is taken as the cosine of the keys, without the centre that hashing subtracts.
    n = (sum of W_i)^2 / sum of W_i^2 is the effective number of sampled keys. Where it is small, heavy keys may well be
    missed, and a sample without them shows too small an error.
    """

    each: float
    together: float
    few: float

    def variance(self, call: LayerCall, whole: Partial, lists: Lists, factor: Tensor, centre: Tensor) -> Tensor:
        """fp32 [R, H] (fp64 for fp64 inputs), from one pass over the lists; 0 for a list that overflowed.

        whole, lists, factor: as in `ops.sampling_variance`. centre: fp32 [R, G, D].
        """
        independent, correlated, rarity = _pairs(call, whole, lists, factor, centre)
        found = (1 + self.few * rarity) * (self.each * independent + self.together * correlated)
        return found.masked_fill(_by_query_head(lists.overflowed, lists, found.shape[1]), 0)

    @staticmethod
    def workspace_bytes(model: ModelShape, lists: int, room: int) -> int:
        """Bytes that `variance` allocates for a row with this number of lists, of `room` entries each."""
        entries, heads, dim = min(room, ENTRIES), model.query_heads, model.head_dim
        keys_and_values = entries * lists * (2 * 4 * dim + 3 * 8)  # with slots, pages and offsets
        deviations = entries * heads * 4 * (dim + 1)
        return keys_and_values + deviations + 4 * heads * dim * dim


def _pairs(
    call: LayerCall, whole: Partial, lists: Lists, factor: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """S, C and 1 / n of `Hashed`: [R, H] each; 0 without sampled keys.

    The sum over pairs needs no pairs: it is |sum over keys of the outer product of k_i / |k_i| and b_i|^2, the sum of
    the squares of a matrix [D, D]. The loop runs over the room of the lists, `ENTRIES` entries at a time. The host
    knows the room, so it does not wait for the GPU.
    """
    rows, kv, wide = call.rows, call.kv, accumulator(call.kv.k.dtype)
    count, heads, dim = rows.q.shape
    units, room = lists.index.shape[1:]
    width, device = heads // units, rows.q.device
    assert lists.row_to_list is None and lists.head_map is None and lists.log_weight is not None
    used = torch.where(lists.overflowed, 0, lists.count)
    call.count_read(Read.of(kv, replace(lists, count=used)))
    call.count_read(Read(other=used.long().sum(1) * factor.element_size()))
    head = torch.arange(units, device=device) * width // kv.group(rows)
    call.count_read(Read(other=count * centre[0].nbytes if count else 0))
    q = rows.q.to(wide).unflatten(1, (units, width)) * call.scale
    out = whole.out.to(wide).unflatten(1, (units, width))[:, :, None]
    lse = whole.lse.to(wide).unflatten(1, (units, width))[..., None]
    middle = centre.to(wide)[:, head, None]
    independent, total, squares = torch.zeros(3, count, units, width, dtype=wide, device=device)
    outer = torch.zeros(count * units, dim, width * dim, dtype=wide, device=device)
    for start in range(0, room, ENTRIES):
        here = slice(start, start + ENTRIES)
        mine = torch.arange(start, min(start + ENTRIES, room), device=device) < used[..., None]
        slot = torch.where(mine, lists.index[..., here].long(), 0)
        page, offset = kv.locate(rows.seq.long()[:, None, None].expand_as(slot), slot)
        k, v = (x[page, head[None, :, None], offset].to(wide) for x in (kv.k, kv.v))
        x = q @ k.transpose(2, 3)
        x = x if call.softcap is None else call.softcap * torch.tanh(x / call.softcap)
        x = x + lists.log_weight[..., None, here].to(wide)
        # entries past the end hold anything, and the keys and values at slot 0 may be NaN
        past = ~mine[..., None]
        weight = (x - lse).exp().masked_fill_(past.transpose(2, 3) | (lse == -torch.inf), 0)
        total += weight.sum(3)
        squares += weight.square().sum(3)
        weight *= factor[..., None, here].to(wide).masked_fill(past.transpose(2, 3), 0).sqrt()
        b = (v[:, :, :, None] - out).mul_(weight.transpose(2, 3)[..., None]).masked_fill_(past[..., None], 0)
        del v
        k -= middle
        k /= torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_(min=TINY)
        k.masked_fill_(past, 0)
        independent += torch.linalg.vector_norm(b, dim=(2, 4)).square()
        outer.baddbmm_(k.transpose(2, 3).flatten(0, 1), b.flatten(3).flatten(0, 1))
    correlated = torch.linalg.vector_norm(outer.unflatten(2, (width, dim)), dim=(1, 3)).square()
    rarity = torch.where(total > 0, squares.sqrt() / total, 0).square()  # tiny weights have no square in fp32
    return independent.flatten(1), correlated.view(count, heads), rarity.flatten(1)


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
    hashed: tuple[Hashed, Tensor] | None = None,
) -> tuple[Partial, ErrorBars]:
    """Attention with its error bars; where they exceed `redo`, dense attention instead.

    whole: attention over sampled lists and certain keys. factor: of the lists' entries. candidates: int [R, 1], the
    keys from which a list takes its own. If it takes some of them, and none by chance, nothing is known about the
    others: the relative error then counts as 1. draws: int like lists.count, sizes of samples that are all that is
    attended to: one of a single draw shows no deviation, so its error counts as 1 too. None: other keys are attended to
    as well. hashed: for keys sampled by hashing, with the centres that it subtracts, fp32 [R, G, D]. None: keys are
    sampled independently, or systematically.
    A KV head is redone for a row if the error of any of its query heads exceeds `redo`.
    """
    began = len(call.meter.noted)
    if hashed is None:
        variance = call.op("sampling_variance", lists, factor, whole)
    else:
        law, centre = hashed
        variance = law.variance(call, whole, lists, factor, centre)
    reads, heads = slice(began, len(call.meter.noted)), call.kv.heads
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
