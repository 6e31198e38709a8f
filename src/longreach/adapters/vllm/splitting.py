"""Which requests of a batch decode and which read a prompt, from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Part = slice | Tensor  # of requests, or of the rows of a batch: a range, or int64 [n] on the device


@dataclass(frozen=True)
class Split:
    """decode, prompt: numbers of the requests of a batch, int64, ascending. lengths: rows of each request, and
    computed: tokens in the cache before them (for requests that read a prompt; an upper bound for others), int64 [n].
    dummy: whether vLLM only warms up or captures: no request reads a prompt or follows a token. uniform: whether the
    batch may replay a CUDA graph; request n then has row n of the batch.
    """

    decode: np.ndarray
    prompt: np.ndarray
    lengths: np.ndarray
    computed: np.ndarray
    dummy: bool
    uniform: bool = False


def split(batch: Any, whole: bool) -> Split:
    """The split of a CommonAttentionMetadata.

    A request decodes if it has one row and its prompt has been read. whole: take all requests of a batch with one row
    each as decoding, those that pad it included: such a batch may replay a CUDA graph, which makes no difference
    between them.
    """
    n = batch.num_reqs
    lengths = np.diff(batch.query_start_loc_cpu[: n + 1].numpy().astype(np.int64))
    computed = batch.seq_lens_cpu_upper_bound[:n].numpy().astype(np.int64) - lengths
    given, prefilling = batch.is_prefilling[:n].numpy(), np.zeros(n, dtype=bool)
    prefilling[: len(given)] = given
    dummy = not prefilling.any() and not (computed[lengths > 0] > 0).any()
    if whole and batch.max_query_len == 1:
        return Split(np.arange(n), np.arange(0), lengths, computed, dummy, uniform=True)
    decode = (lengths == 1) & ~prefilling  # a preempted request reads its own answer again, in rows of a prompt
    return Split(np.flatnonzero(decode), np.flatnonzero((lengths > 0) & ~decode), lengths, computed, dummy)


def part_of(numbers: np.ndarray, device: torch.device) -> Part:
    """Ascending numbers as a range if they are one, else as an index on the device, without a sync."""
    if not len(numbers):
        return slice(0, 0)
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == len(numbers):
        return slice(first, last + 1)
    index = torch.from_numpy(numbers)
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


def rows_of(requests: np.ndarray, batch: Any) -> np.ndarray:
    """Numbers of the rows of requests, int64, ascending."""
    starts = batch.query_start_loc_cpu.numpy().astype(np.int64)
    counts = starts[requests + 1] - starts[requests]
    before = np.cumsum(counts) - counts
    return np.repeat(starts[requests] - before, counts) + np.arange(counts.sum())
