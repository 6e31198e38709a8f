"""The front door of sampling_variance."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops.checks import check_logits, check_memory
from longreach.ops.doors import Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.selection import Lists
from longreach.ops.types import KVView, Partial, Rows, describe, require

IMPLEMENTATIONS = Implementations(
    "sampling_variance",
    {name: f"longreach.ops.variance.{name}:sampling_variance" for name in ("reference", "triton", "numba")},
)


@torch.no_grad()
def sampling_variance(
    rows: Rows,
    kv: KVView,
    lists: Lists,
    factor: Tensor,
    whole: Partial,
    *,
    scale: float,
    softcap: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """The estimated variance of attention's output over the random choice of keys: fp32 [R, H] (fp64 for fp64 inputs).

        variance[r, h] = sum over listed keys i of factor_i W_i^2 |v_i - out[r, h]|^2
        W_i            = exp(softcap(scale q . k_i) + log_weight_i - lse[r, h])

    It is the variance of a ratio of two sums, to first order (Taylor linearisation: Saerndal, Swensson and Wretman,
    Model Assisted Survey Sampling, 1992, section 5.5), summed over the channels of the output. Its square root is the
    standard error of the output's length. An output has one variance for each list it merges; certain keys add none.

    lists: the sampled keys, with the log-weights that make sums over them unbiased; entries of single keys (block=1).
    factor: fp32 like lists.index, of each key: 1 - u where keys are chosen independently with probability u, or by
        systematic sampling; 1 / n for a key that was hit by n independent draws. `simhash.weigh`, `sample` and `draw`
        give it. Entries past the count may be anything.
    whole: the output of all that was attended to: out [R, H, D], lse [R, H], certain keys and a sink logit included.
    scale, softcap: as in attend.

    A list that overflowed was attended to as everything, so its variance is 0, as is that of an empty list. A listed
    key that is not visible to its row is left out. NaN of a row stay in the row.
    Keys and values of the lists are read, once for each list. Nothing waits for a GPU.
    Raises InvalidInput for shapes, dtypes, devices and numbers that do not fit, SelectionError for entries as in
    attend, UnknownName for an unknown impl, Unsupported for what an implementation cannot take.
    """
    check_memory(rows, kv)
    check_logits(scale, softcap, rows)
    require(isinstance(lists, Lists), lambda: f"lists: expected Lists, got {describe(lists)}")
    require(lists.block == 1, lambda: f"lists: expected entries of single keys, got blocks of {lists.block}")
    if kv.slot_pos is not None:
        raise InvalidInput("kv: expected slots in the order of positions, got slot_pos; compact what was kept")
    lists.check(rows, kv)
    ok = isinstance(factor, Tensor) and factor.dtype == torch.float32 and factor.shape == lists.index.shape
    ok = ok and factor.device == kv.k.device
    wants = list(lists.index.shape)
    require(ok, lambda: f"factor: expected float32 {wants} on {kv.k.device} like index, got {describe(factor)}")
    require(isinstance(whole, Partial), lambda: f"whole: expected a Partial, got {describe(whole)}")
    ok = whole.out.shape == rows.q.shape and whole.out.device == kv.k.device
    shape = list(rows.q.shape)
    require(ok, lambda: f"whole: expected out [R, H, D] = {shape} on {kv.k.device}, got {describe(whole.out)}")
    compute = IMPLEMENTATIONS.get(impl, kv.k.device, rows, kv)
    found: Tensor = compute(rows, kv, lists, factor, whole, scale=float(scale), softcap=softcap)
    return found


def list_numbers(rows: Rows, kv: KVView, lists: Lists) -> tuple[int, Tensor]:
    """Query heads that share a list, and int64 [R, H / width], the number of each one's list: list * heads + head."""
    heads = lists.index.shape[1]
    alone = lists.per == "query" and (heads > 1 or lists.head_map is not None)
    units = rows.q.shape[1] if alone else kv.heads
    count, at = rows.pos.shape[0], rows.pos.device
    of = torch.arange(count, device=at) if lists.row_to_list is None else lists.row_to_list.long()
    head = torch.arange(units, device=at) if heads > 1 else torch.zeros(units, dtype=torch.int64, device=at)
    if lists.head_map is not None:
        head = lists.head_map.long()
    return rows.q.shape[1] // units, of[:, None] * heads + head


def _reads(
    rows: Rows, kv: KVView, found: Tensor, lists: Lists, factor: Tensor, whole: Partial, **given: object
) -> tuple[Read, ...]:
    """Keys and values of lists that did not overflow, with the lists, and the factors of their entries."""
    used = torch.where(lists.overflowed, 0, lists.count)
    _, number = list_numbers(rows, kv, lists)
    entries = used.flatten()[number].long().sum(1)
    return Read.of(kv, replace(lists, count=used)), Read(other=entries * factor.element_size())


SAMPLING_VARIANCE = Op(sampling_variance, IMPLEMENTATIONS, ("rows", "kv", "scale", "softcap"), _reads)
