"""Checks of several arguments together, shared by ops; each type checks itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported
from longreach.ops.types import INTS, PLAIN_GROUP, PLAIN_WIDEST, KVView, Logits, Rows, ScoringKeys, describe, require

T = TypeVar("T")


class Once(Protocol):
    """Computes a value once for calls whose rows and views share sequences, positions, lengths and block table."""

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T: ...


def each_time(key: Hashable, make: Callable[[], T]) -> T:
    """A value that is computed at each call."""
    return make()


def limits(x: Tensor) -> tuple[int, int]:
    """The least and the largest of integers on the CPU. By NumPy, which takes a tenth of PyTorch's time for a few."""
    array = x.numpy()
    return int(array.min()), int(array.max())


def check_memory(rows: Rows, kv: KVView, once: Once = each_time) -> None:
    """Raise InvalidInput where rows and view do not fit together, or (on the CPU) name memory that is not there.

    once: computes what depends on places and lengths alone once for several layers.
    """
    require(isinstance(rows, Rows), lambda: f"rows: expected Rows, got {describe(rows)}")
    require(isinstance(kv, KVView), lambda: f"kv: expected a KVView, got {describe(kv)}")
    kv.group(rows)
    if kv.k.device.type == "cpu":  # elsewhere values lie on the device: reading them would cost a sync
        once(("memory", kv.k.shape[0], kv.page), lambda: _check_places(rows, kv))


def _check_places(rows: Rows, kv: KVView) -> None:
    """Raise InvalidInput where sequences, lengths or the block table name memory that is not there."""
    if rows.seq.numel():
        low, high = limits(rows.seq)
        require(
            low >= 0 and high < kv.sequences, lambda: f"seq: expected in [0, B={kv.sequences}), got {low} to {high}"
        )
    if kv.sequences:
        low, high = limits(kv.seq_lens)
        fits = low >= 0 and high <= kv.capacity
        require(
            fits,
            lambda: f"seq_lens: expected in [0, {kv.capacity}], the slots a sequence can address, got {low} to {high}",
        )
    if kv.block_table is not None:
        pages = kv.k.shape[0]
        need = -(-kv.seq_lens // kv.page)
        used = torch.arange(kv.block_table.shape[1]) < need[:, None]
        bad = used & ((kv.block_table < 0) | (kv.block_table >= pages))
        if bool(bad.any()):
            seq, entry = bad.nonzero()[0].tolist()
            page = int(kv.block_table[seq, entry])
            message = f"block_table: expected pages in [0, P={pages}), got {page} for page {entry} of sequence {seq}"
            raise InvalidInput(message)


def refuse_gradients(op: str, *tensors: Tensor) -> None:
    """Raise Unsupported where one of the tensors requires a gradient, which the op's Triton kernels do not compute."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise Unsupported(
            f"{op}'s Triton kernels have no backward pass and an input requires a gradient; "
            "use impl='reference', or torch.no_grad()"
        )


def refuse_wide(op: str, rows: Rows, kv: KVView) -> None:
    """Raise Unsupported for heads and groups that an op's Triton kernels have no room for."""
    dim, group = rows.q.shape[2], kv.group(rows)
    if dim > PLAIN_WIDEST or group > PLAIN_GROUP:
        raise Unsupported(
            f"{op}'s Triton kernels take up to {PLAIN_WIDEST} channels a head and {PLAIN_GROUP} query heads a KV head, "
            f"got {dim} and {group}; use impl='reference', or another method"
        )


def slots_of(rows: Rows, kv: KVView, slot: Tensor | None) -> Tensor:
    """int [R]: `slot` if given, else the positions of the rows. Raises InvalidInput where these are not slots."""
    if slot is None:
        require(kv.slot_pos is None, "slot: expected the rows' slots, as slots are not positions here (slot_pos)")
        return rows.pos
    ok = isinstance(slot, Tensor) and slot.dtype in INTS and slot.shape == rows.pos.shape
    ok = ok and slot.device == kv.k.device
    require(ok, lambda: f"slot: expected int [R={rows.pos.shape[0]}] on {kv.k.device}, got {describe(slot)}")
    return slot


def check_logits(scale: float, softcap: float | None, rows: Rows, sink_logit: Tensor | None = None) -> None:
    """Raise InvalidInput where what shapes the logits is not usable with `rows`."""
    require(
        isinstance(scale, (int, float)) and math.isfinite(scale),
        lambda: f"scale: expected a finite number, got {scale!r}",
    )
    ok = softcap is None or (isinstance(softcap, (int, float)) and 0 < softcap < math.inf)
    require(ok, lambda: f"softcap: expected None or a finite number > 0, got {softcap!r}")
    if sink_logit is not None:
        heads = rows.q.shape[1]
        ok = isinstance(sink_logit, Tensor) and sink_logit.shape == (heads,) and sink_logit.is_floating_point()
        ok = ok and sink_logit.device == rows.q.device
        require(ok, lambda: f"sink_logit: expected float [H={heads}] on {rows.q.device}, got {describe(sink_logit)}")


def check_kept(kept: Logits, rows: Rows, kv: KVView) -> None:
    """Raise InvalidInput where kept logits are not those of `rows` over `kv`."""
    require(isinstance(kept, Logits), lambda: f"logits: expected Logits, got {describe(kept)}")
    shape = (rows.q.shape[0], kv.heads, kv.capacity, kv.group(rows))
    fits = kept.x.shape == shape and kept.x.device == rows.q.device
    require(
        fits,
        lambda: (
            f"logits: expected those of these rows over this view, [R, G, N, group] = {list(shape)} on "
            f"{rows.q.device}, got {describe(kept.x)}"
        ),
    )


def check_scoring(keys: ScoringKeys, kv: KVView) -> None:
    """Raise InvalidInput where scoring keys are not laid out like the pages of `kv`."""
    require(isinstance(keys, ScoringKeys), lambda: f"keys: expected ScoringKeys, got {describe(keys)}")
    fits = keys.k.shape == kv.k.shape and keys.k.device == kv.k.device
    shape = list(kv.k.shape)
    require(
        fits, lambda: f"keys: expected the view's [P, G, page, D] = {shape} on {kv.k.device}, got {describe(keys.k)}"
    )


def check_written(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor) -> None:
    """Raise InvalidInput where k and v [R, G, D] cannot be written to places (page, offset) [R] of keys and values."""
    require(
        keys.dim() == 4 and values.shape == keys.shape,
        lambda: f"values: expected {describe(keys)}, got {describe(values)}",
    )
    rows = page.shape[0] if page.dim() == 1 else -1
    shape = (rows, keys.shape[1], keys.shape[3])
    for name, x in (("k", k), ("v", v)):
        fits = x.shape == shape and x.dtype == keys.dtype and x.device == keys.device
        require(fits, lambda: f"{name}: expected {keys.dtype} {list(shape)} on {keys.device}, got {describe(x)}")
    for name, x in (("page", page), ("offset", offset)):
        fits = x.shape == (rows,) and x.dtype in INTS and x.device == keys.device
        require(fits, lambda: f"{name}: expected int [R] on {keys.device}, got {describe(x)}")
    require(keys.stride(3) == values.stride(3) == 1, "keys, values: expected a contiguous last dimension")
