"""Codes and summaries of blocks of keys, kept with the keys in a session: state of MKA and Block-MKA."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.cache import PerTokenState
from longreach.mka.block import Blocks
from longreach.mka.index import IndexCode
from longreach.ops import BlockCode, KVView, Rows
from longreach.ops.recall import code_blocks, code_completed, code_places, code_view
from longreach.ops.rope import RotaryFrequencies

AT_ONCE = 1 << 26  # numbers of keys or values that are gathered at a time


class BlockState(PerTokenState):
    """Codes and summaries [P, G, units, width] of complete blocks of `block` keys.

    code: how blocks are compared; None where the layer does not choose. summaries: whether mean keys, rotated to the
    block's middle, and mean values are kept. Codes by summary are the mean keys.
    """

    def __init__(
        self, kv: KVView, block: int, code: BlockCode | IndexCode | None, summaries: bool,
        frequencies: RotaryFrequencies,
    ):  # fmt: skip
        dim, dtype = kv.k.shape[3], kv.k.dtype
        self.block, self.code, self.summaries = block, code, summaries
        self._codes = dict[str, BlockCode | IndexCode]()
        if summaries:
            self._codes["keys"] = BlockCode("summary", frequencies)
        self._by_keys = summaries and isinstance(code, BlockCode) and code.kind == "summary"
        if code is not None and not self._by_keys:
            self._codes["codes"] = code
        widths = {name: (one.width(dim), dtype) for name, one in self._codes.items()}
        if summaries:
            widths["values"] = dim, dtype
        super().__init__(kv, block, **widths)

    def update(self, kv: KVView, rows: Rows, ends: tuple[Tensor, Tensor] | None) -> None:
        """Compute the blocks that the rows of a pass complete. kv: with their keys. ends: (sequence, block) of these,
        if the host knows them."""
        self.ensure_capacity(kv)
        if ends is not None:
            self._write(kv, *ends)
            return
        seq, block = rows.seq.long(), rows.pos.long() // self.block
        for name, code in self._codes.items():
            if isinstance(code, BlockCode):
                code_completed(rows, kv, self[name], code, self.block, means=self._means(name))
            else:
                self._compute(kv, name, seq, block)

    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        self._write(kv, seq.long(), slot.long() // self.block)

    def views(self, kv: KVView, places: tuple[Tensor, Tensor | None]) -> Blocks:
        """Codes and summaries of the complete blocks. places: `code_places` of the view."""
        codes = summaries = None
        if self.code is not None:
            codes = code_view(kv, self["keys" if self._by_keys else "codes"], self.block, places)
        if self.summaries:
            keys, values = (code_view(kv, self[name], self.block, places) for name in ("keys", "values"))
            summaries = KVView(keys.k, values.k, keys.seq_lens, keys.block_table)
        return Blocks(codes, summaries)

    @property
    def bytes_of_code(self) -> int:
        """Bytes of one block's codes in all heads."""
        x = self["keys" if self._by_keys else "codes"]
        return x.shape[1] * x.shape[3] * x.element_size()

    def _write(self, kv: KVView, seq: Tensor, block: Tensor) -> None:
        for name, code in self._codes.items():
            if isinstance(code, BlockCode):
                code_blocks(kv, self[name], code, seq, block, self.block, means=self._means(name))
            else:
                self._compute(kv, name, seq, block)

    def _means(self, name: str) -> Tensor | None:
        """Where mean values go, beside the mean keys."""
        return self["values"] if name == "keys" else None

    @torch.no_grad()
    def _compute(self, kv: KVView, name: str, seq: Tensor, block: Tensor) -> None:
        """Write codes by a trained index, for those of the named blocks that are complete. No wait for the device.

        In a captured step it also reads the keys of blocks that are not complete; the report does not count these.
        """
        piece = max(1, AT_ONCE // (self.block * kv.heads * kv.k.shape[3]))
        for sequences, blocks in zip(seq.split(piece), block.split(piece), strict=True):
            complete = kv.seq_lens.long()[sequences] >= (blocks + 1) * self.block
            slot = blocks[:, None] * self.block + torch.arange(self.block, device=seq.device)
            slot = slot.clamp(max=kv.capacity - 1)  # the last block may reach past the memory
            page = sequences[:, None].expand_as(slot)
            if kv.block_table is not None:
                page = kv.block_table[page, slot // kv.page].long()
            x = kv.k[page, :, slot % kv.page].transpose(1, 2)  # [n, G, block, D]
            first = (blocks * self.block)[:, None, None].expand(*x.shape[:2], 1)
            new = self._codes[name].of_blocks(x[:, :, None], first)[:, :, 0]
            to, unit = self.locate(kv, sequences, blocks)
            held = self[name]
            held[to, :, unit] = torch.where(complete[:, None, None], new.to(held.dtype), held[to, :, unit])


def places_of(kv: KVView, block: int) -> tuple[Tensor, Tensor | None]:
    """Where the views of blocks find them: the same for all layers with the same slots."""
    return code_places(kv, block)
