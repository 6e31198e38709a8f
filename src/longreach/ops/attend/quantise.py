"""Keys in 8 bits, for scoring."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.impl import Implementations
from longreach.ops.types import FLOATS, INTS, KVView, ScoringKeys, describe, require


def quantise_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit keys with one scale for each token and head: (int8 [..., D], scale fp32 [...]).

    k: float [..., D]. scale = max |k| / 127. Each channel is off by at most scale / 2 (and fp32's rounding), so a logit
    by at most |softmax scale| sum |q| max |k| / 254. Keys of all zeros have scale 0. No device sync.
    """
    ok = isinstance(k, Tensor) and k.dtype in FLOATS and k.dim() >= 1
    require(ok, lambda: f"k: expected bf16, fp16, fp32 or fp64 [..., D], got {describe(k)}")
    x = k.float()
    scale = x.abs().amax(-1) / 127
    codes = torch.round(x / scale.masked_fill(scale == 0, 1.0)[..., None]).clamp(-127, 127)
    return codes.to(torch.int8), scale


_copy = Implementations(
    "copy_keys",
    {
        "reference": "longreach.ops.attend.quantise:copy_in_place",
        "triton": "longreach.ops.attend.triton_quantise:copy_keys",
    },
)


def copy_keys(seq: Tensor, slot: Tensor, kv: KVView, keys: ScoringKeys, *, impl: str = "auto") -> None:
    """Quantise the keys of `kv` at these slots into `keys`, at the same places.

    As `quantise_keys` does, bit for bit; nothing else of `keys` is touched. seq, slot: int [n], sequence and slot of
    each key; keys: shaped like kv.k. No device sync, one kernel on a GPU. Raises InvalidInput for arguments that do not
    fit, UnknownName for an unknown impl.
    """
    require(isinstance(kv, KVView), lambda: f"kv: expected a KVView, got {describe(kv)}")
    for name, x in (("seq", seq), ("slot", slot)):
        ok = isinstance(x, Tensor) and x.dtype in INTS and x.dim() == 1 and x.device == kv.k.device
        require(ok, lambda: f"{name}: expected int [n] on {kv.k.device}, got {describe(x)}")
    require(seq.shape == slot.shape, lambda: f"slot: expected {list(seq.shape)} like seq, got {describe(slot)}")
    ok = isinstance(keys, ScoringKeys) and keys.k.shape == kv.k.shape and keys.k.device == kv.k.device
    found = describe(getattr(keys, "k", keys))
    require(ok, lambda: f"keys: expected an 8-bit copy laid out like {describe(kv.k)}, got {found}")
    _copy.get(impl, kv.k.device)(seq, slot, kv, keys)


def copy_in_place(seq: Tensor, slot: Tensor, kv: KVView, keys: ScoringKeys) -> None:
    page, offset = kv.locate(seq.long(), slot.long())
    keys.k[page, :, offset], keys.scale[page, :, offset] = quantise_keys(kv.k[page, :, offset])
