"""Keys in 8 bits, for scoring."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.impl import Implementations
from longreach.ops.types import FLOATS, KVView, Rows, ScoringKeys, describe, require


def quantise_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit keys with one scale for each token and head: (int8 [..., D], scale fp32 [...]).

    k: float [..., D]. scale = max |k| / 127. Each channel is off by at most scale / 2 (and fp32's rounding), so a logit
    by at most |softmax scale| sum |q| max |k| / 254. Keys of all zeros have scale 0. No device sync.
    """
    ok = isinstance(k, Tensor) and k.dtype in FLOATS and k.dim() >= 1
    require(ok, f"k: expected bf16, fp16, fp32 or fp64 [..., D], got {describe(k)}")
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


def copy_keys(rows: Rows, kv: KVView, keys: ScoringKeys, *, impl: str = "auto") -> None:
    """Quantise the keys of these rows, which lie in `kv` at slots [rows.pos], into `keys`, at the same places.

    As `quantise_keys` does, bit for bit; nothing else of `keys` is touched. rows: whose queries are not read; keys:
    shaped like kv.k. No device sync, one kernel on a GPU. Raises InvalidInput for what does not fit, UnknownName for an
    unknown impl.
    """
    require(isinstance(rows, Rows), f"rows: expected Rows, got {describe(rows)}")
    require(isinstance(kv, KVView), f"kv: expected a KVView, got {describe(kv)}")
    ok = isinstance(keys, ScoringKeys) and keys.k.shape == kv.k.shape and keys.k.device == kv.k.device
    found = describe(getattr(keys, "k", keys))
    require(ok, f"keys: expected an 8-bit copy laid out like {describe(kv.k)}, got {found}")
    _copy.get(impl, kv.k.device)(rows, kv, keys)


def copy_in_place(rows: Rows, kv: KVView, keys: ScoringKeys) -> None:
    page, offset = kv.locate(rows.seq.long(), rows.pos.long())
    keys.k[page, :, offset], keys.scale[page, :, offset] = quantise_keys(kv.k[page, :, offset])
