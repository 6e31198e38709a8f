"""The rows of a batch on the device: those that decode, and those that read a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.adapters.vllm.splitting import Part, Split, part_of, rows_of
from longreach.ops import RowRange


@dataclass(frozen=True)
class BatchRows:
    """Rows of a batch, and the view of their sequences.

    rows: which rows of the batch they are. seq, pos: int [R] each. seq_lens [B], table [B, pages]: of the sequences.
    slots: int [B], the slot of each sequence's state. runs: the rows on the host, if known. padding: bool [R], rows
    that are not counted; None if all are.
    """

    rows: Part
    seq: Tensor
    pos: Tensor
    seq_lens: Tensor
    table: Tensor
    slots: Tensor
    runs: tuple[RowRange, ...] | None = None
    padding: Tensor | None = None


class DecodeBuffers:
    """Tensors at fixed addresses for batches of one row a request. Captured CUDA graphs read them.

    A row without a place in the cache pads the batch: it sees one slot, of vLLM's null page, which no request owns, its
    state has the slot behind those of requests, and it is not counted. (A row that sees nothing has no best key.)
    """

    def __init__(self, requests: int, device: torch.device):
        self.seq = torch.arange(requests, device=device)
        self.pos = torch.zeros(requests, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32, device=device)
        self.slots = torch.arange(requests, device=device)
        self.padding = torch.zeros(requests, dtype=torch.bool, device=device)
        self._table: Tensor | None = None

    def fill(self, batch: Any, slots: Tensor | None) -> BatchRows:
        """The rows of a CommonAttentionMetadata whose requests have one row each. slots: int [n], else the row's."""
        n = batch.num_reqs
        table, padding, lengths, pos = batch.block_table_tensor[:n], self.padding[:n], self.seq_lens[:n], self.pos[:n]
        if self._table is None:
            self._table = table.new_zeros(len(self.seq), table.shape[1])
        here = batch.slot_mapping[:n] >= 0
        torch.logical_not(here, out=padding)
        torch.mul(table, here[:, None], out=self._table[:n])
        torch.mul(batch.seq_lens[:n], here, out=lengths).clamp_(min=1)
        torch.sub(lengths, 1, out=pos)
        if slots is not None:
            self.slots[:n].copy_(slots[:n]).masked_fill_(padding, len(self.seq))
        return BatchRows(slice(0, n), self.seq[:n], pos, lengths, self._table[:n], self.slots[:n], padding=padding)


def decode_rows(batch: Any, split: Split, slots: Tensor | None) -> BatchRows:
    """The decoding rows of a batch that also reads prompts. slots: int [n] of all requests, else their numbers."""
    device = batch.seq_lens.device
    some, rows = part_of(split.decode, device), part_of(rows_of(split.decode, batch), device)
    lengths = batch.seq_lens[some]
    seq = torch.arange(len(split.decode), device=device)
    pos = lengths.long() - 1
    return BatchRows(rows, seq, pos, lengths, batch.block_table_tensor[some], seq if slots is None else slots[some])


def prompt_rows(batch: Any, split: Split, slots: Tensor | None) -> BatchRows:
    """The rows of prompts in a batch. slots: int [n] of all requests, else their numbers."""
    device, counts = batch.seq_lens.device, split.lengths[split.prompt]
    some, rows = part_of(split.prompt, device), part_of(rows_of(split.prompt, batch), device)
    total, sequences = int(counts.sum()), len(counts)
    seq_lens = batch.seq_lens[some]
    ends = (batch.query_start_loc[1:] - batch.query_start_loc[:-1])[some].long()
    order = torch.arange(sequences, device=device)
    seq = torch.repeat_interleave(order, ends, output_size=total)
    # the last row of a sequence is at its length - 1
    last = torch.cumsum(ends, 0) - 1
    pos = torch.arange(total, device=device) - last[seq] + seq_lens[seq].long() - 1
    firsts = split.computed[split.prompt]
    runs = tuple(RowRange(int(n), b, int(first)) for b, (n, first) in enumerate(zip(counts, firsts, strict=True)))
    return BatchRows(
        rows, seq, pos, seq_lens, batch.block_table_tensor[some], order if slots is None else slots[some], runs
    )


def of_requests(batch: Any, split: Split, forget: dict[str, None]) -> Any:
    """A CommonAttentionMetadata of the prompts alone. forget: fields to be set to None."""
    if len(split.prompt) == batch.num_reqs:
        return batch
    device, counts = batch.seq_lens.device, split.lengths[split.prompt]
    some, host = part_of(split.prompt, device), torch.from_numpy(split.prompt)
    rows = part_of(rows_of(split.prompt, batch), device)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    moved = starts if device.type == "cpu" else starts.pin_memory().to(device, non_blocking=True)
    return batch.replace(
        query_start_loc=moved,
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens[some],
        num_reqs=len(counts),
        num_actual_tokens=int(counts.sum()),
        max_query_len=int(counts.max()),
        block_table_tensor=batch.block_table_tensor[some],
        slot_mapping=batch.slot_mapping[rows],
        positions=None if batch.positions is None else batch.positions[rows],
        is_prefilling=None,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[host],
        **forget,
    )
