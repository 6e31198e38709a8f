"""The rows of a batch on the device: those that decode, and those that read a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from longreach.adapters.vllm.splitting import Part, Split, part_of, rows_of
from longreach.ops import RowRange


@dataclass(frozen=True)
class BatchRows:
    """Rows of a batch, and the view of their sequences.

    rows: which rows of the batch they are. seq, pos: int [R] each. seq_lens [B], table [B, pages]: of the sequences.
    slots: int [B], the slot of each sequence's state. runs: the rows on the host, if known. padding: bool [R], rows
    that are not counted; None if all are. R may exceed the number of `rows`: the last ones are padding.
    """

    rows: Part
    seq: Tensor
    pos: Tensor
    seq_lens: Tensor
    table: Tensor
    slots: Tensor
    runs: tuple[RowRange, ...] | None = None
    padding: Tensor | None = None

    def of(self, query: Tensor) -> Tensor:
        """These rows of a batch's queries, [R, H, D]. Queries of padding rows are arbitrary."""
        size, part = len(self.seq), self.rows
        if isinstance(part, slice) and part.start + size <= len(query):
            return query[part.start : part.start + size]
        some = query[part]
        return some if len(some) == size else pad(some, (0, 0, 0, 0, 0, size - len(some)))

    def put(self, output: Tensor, found: Tensor) -> None:
        """Write results [R, H, D] to these rows of a batch's output, of any float dtype."""
        if isinstance(self.rows, slice):
            output[self.rows].copy_(found[: self.rows.stop - self.rows.start])
        else:
            output[self.rows] = found[: len(self.rows)].to(output.dtype)


class DecodeBuffers:
    """Tensors at fixed addresses for decoding rows, one a request. Captured CUDA graphs read them.

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

    def fill(self, batch: Any, split: Split, slots: Tensor | None, size: int) -> BatchRows:
        """The decoding rows of a CommonAttentionMetadata, padded to `size`.

        slots: int [n] of all requests of the batch, else the row's number.
        """
        device, count = batch.seq_lens.device, len(split.decode)
        requests = rows = part_of(split.decode, device)
        if not split.uniform:
            rows = part_of(rows_of(split.decode, batch), device)
        if self._table is None:
            self._table = batch.block_table_tensor.new_zeros(len(self.seq), batch.block_table_tensor.shape[1])
        table, padding, lengths, pos = self._table[:size], self.padding[:size], self.seq_lens[:size], self.pos[:size]
        here = batch.slot_mapping[rows] >= 0
        torch.logical_not(here, out=padding[:count])
        torch.mul(batch.block_table_tensor[requests], here[:, None], out=table[:count])
        torch.mul(batch.seq_lens[requests], here, out=lengths[:count])
        for each, value in ((padding, True), (table, 0), (lengths, 0)):
            each[count:].fill_(value)
        torch.sub(lengths.clamp_(min=1), 1, out=pos)
        if slots is not None:
            self.slots[:count].copy_(slots[requests])
            self.slots[:size].masked_fill_(padding, len(self.seq))
        return BatchRows(rows, self.seq[:size], pos, lengths, table, self.slots[:size], padding=padding)


def decode_sizes(config: Any) -> tuple[int, ...]:
    """Numbers of decoding rows to which those of a step are padded, ascending; none on a CPU.

    config: a VllmConfig. The sizes are those of captured steps, powers of two beyond them, and the most requests.
    """
    if config.device_config.device_type == "cpu":
        return ()
    most, compilation, captured = config.scheduler_config.max_num_seqs, config.compilation_config, []
    if compilation.cudagraph_mode.has_full_cudagraphs():
        captured = sorted({size for size in compilation.cudagraph_capture_sizes or () if size <= most})
    largest = captured[-1] if captured else 0
    powers = {1 << n for n in range(most.bit_length())}
    return (*captured, *sorted(size for size in powers | {most} if size > largest))


def prompt_rows(batch: Any, split: Split, slots: Tensor | None) -> BatchRows:
    """The rows of prompts in a batch. slots: int [n] of all requests, else their numbers."""
    device, counts = batch.seq_lens.device, split.lengths[split.prompt]
    some, rows = part_of(split.prompt, device), part_of(rows_of(split.prompt, batch), device)
    total, sequences = int(counts.sum()), len(counts)
    # copies: Triton compiles another kernel for a tensor that does not begin at a multiple of 16 bytes
    seq_lens, table = batch.seq_lens[some].clone(), batch.block_table_tensor[some].clone()
    ends = (batch.query_start_loc[1:] - batch.query_start_loc[:-1])[some].long()
    order = torch.arange(sequences, device=device)
    seq = torch.repeat_interleave(order, ends, output_size=total)
    # the last row of a sequence is at its length - 1
    last = torch.cumsum(ends, 0) - 1
    pos = torch.arange(total, device=device) - last[seq] + seq_lens[seq].long() - 1
    firsts = split.computed[split.prompt]
    runs = tuple(RowRange(int(n), b, int(first)) for b, (n, first) in enumerate(zip(counts, firsts, strict=True)))
    mine = order if slots is None else slots[some].clone()
    return BatchRows(rows, seq, pos, seq_lens, table, mine, runs)


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
