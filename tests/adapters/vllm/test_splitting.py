"""Which requests of a batch decode, and their rows on the device. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from longreach.adapters.vllm.rows import BatchRows, DecodeBuffers, decode_sizes, of_requests, prompt_rows
from longreach.adapters.vllm.splitting import Split, part_of, rows_of, split
from longreach.ops import RowRange


class Batch(SimpleNamespace):
    """The fields of vLLM's CommonAttentionMetadata that are read."""

    def replace(self, **fields: Any) -> Batch:
        return Batch(**{**self.__dict__, **fields})


def batch(*requests: tuple[int, int, bool], padding: int = 0) -> Batch:
    """requests: (tokens computed before, rows, whether a prompt is read). padding: requests without a row behind them,
    each with a row of the batch that has no place in the cache."""
    rows = [n for _, n, _ in requests]
    starts = torch.tensor(np.concatenate([[0], np.cumsum(rows + [0] * padding)]), dtype=torch.int32)
    lengths = torch.tensor([done + n for done, n, _ in requests] + [0] * padding, dtype=torch.int32)
    count = len(requests) + padding
    table = torch.arange(1, 3 * count + 1, dtype=torch.int32).view(count, 3)
    slots = torch.cat([torch.arange(100, 100 + sum(rows)), torch.full((padding,), -1)])
    return Batch(
        num_reqs=count, query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths, max_query_len=max(rows), num_actual_tokens=sum(rows) + padding,
        block_table_tensor=table, slot_mapping=slots, positions=None,
        is_prefilling=torch.tensor([reads for *_, reads in requests]),
    )  # fmt: skip


def decode_rows(given: Batch, found: Split, slots: torch.Tensor | None, size: int | None = None) -> BatchRows:
    """The decoding rows of a split, padded to a size."""
    return DecodeBuffers(8, torch.device("cpu")).fill(given, found, slots, size or len(found.decode))


def test_decoding_requests_come_first() -> None:
    given = batch((40, 1, False), (7, 1, False), (0, 3, True), (5, 2, True))
    found = split(given, whole=False)
    assert (found.decode.tolist(), found.prompt.tolist(), found.dummy) == ([0, 1], [2, 3], False)
    decode, prompt = decode_rows(given, found, None), prompt_rows(given, found, None)
    assert decode.rows == slice(0, 2) and prompt.rows == slice(2, 7)
    assert decode.pos.tolist() == [40, 7] and decode.seq.tolist() == [0, 1]
    assert prompt.seq.tolist() == [0, 0, 0, 1, 1] and prompt.pos.tolist() == [0, 1, 2, 5, 6]
    assert prompt.runs == (RowRange(3, 0, 0), RowRange(2, 1, 5))
    assert prompt.table.tolist() == given.block_table_tensor[2:].tolist()
    own = of_requests(given, found, {"cached": None})
    assert own.query_start_loc.tolist() == [0, 3, 5] and own.seq_lens.tolist() == [3, 7]
    assert (own.num_reqs, own.num_actual_tokens, own.max_query_len, own.cached) == (2, 5, 3, None)
    assert own.slot_mapping.tolist() == [102, 103, 104, 105, 106]


def test_the_last_token_of_a_prompt_is_no_new_token() -> None:
    """A prompt's piece of one row, between two requests that decode."""
    given = batch((40, 1, False), (64, 1, True), (7, 1, False))
    found = split(given, whole=False)
    assert (found.decode.tolist(), found.prompt.tolist()) == ([0, 2], [1])
    decode = decode_rows(given, found, torch.tensor([5, 6, 7]))
    assert isinstance(decode.rows, torch.Tensor) and decode.rows.tolist() == [0, 2]
    assert decode.pos.tolist() == [40, 7] and decode.slots.tolist() == [5, 7]
    assert prompt_rows(given, found, torch.tensor([5, 6, 7])).slots.tolist() == [6]


def test_a_preempted_request_reads_its_answer_as_a_prompt() -> None:
    """Its prompt has been read, and it has several rows."""
    found = split(batch((40, 1, False), (30, 12, False)), whole=False)
    assert (found.decode.tolist(), found.prompt.tolist()) == ([0], [1])


def test_batches_that_may_replay_a_graph() -> None:
    given = batch((40, 1, False), (7, 1, True), padding=2)
    found = split(given, whole=True)
    assert (found.decode.tolist(), found.prompt.tolist(), found.dummy) == ([0, 1, 2, 3], [], False)
    buffers = DecodeBuffers(8, torch.device("cpu"))
    rows = buffers.fill(given, found, None, 4)
    assert rows.pos.tolist() == [40, 7, 0, 0] and rows.seq_lens.tolist() == [41, 8, 1, 1]
    assert rows.padding is not None and rows.padding.tolist() == [False, False, True, True]
    assert rows.table.tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
    others = batch((3, 1, False), (4, 1, False), (5, 1, False), (6, 1, False))
    again = buffers.fill(others, split(others, whole=True), torch.tensor([3, 1, 0, 2]), 4)
    for name in ("seq", "pos", "seq_lens", "table", "slots", "padding"):
        assert getattr(again, name).data_ptr() == getattr(rows, name).data_ptr()
    assert again.pos.tolist() == [3, 4, 5, 6] and again.slots.tolist() == [3, 1, 0, 2]
    mixed = split(batch((40, 1, False), (7, 2, True)), whole=True)
    assert (mixed.decode.tolist(), mixed.prompt.tolist()) == ([0], [1])


@pytest.mark.parametrize("apart", [False, True], ids=["first", "apart"])
def test_decoding_rows_of_a_mixed_batch_are_padded(apart: bool) -> None:
    """As first requests of the batch, and with a piece of a prompt between them."""
    decoding, prompt = [(40, 1, False), (7, 1, False)], [(9, 1, True)]
    given = batch(*(decoding[:1] + prompt + decoding[1:] if apart else decoding + prompt))
    found = split(given, whole=False)
    decode = decode_rows(given, found, torch.tensor([5, 6, 7]), 4)
    assert decode.pos.tolist() == [40, 7, 0, 0] and decode.seq_lens.tolist() == [41, 8, 1, 1]
    assert decode.padding is not None and decode.padding.tolist() == [False, False, True, True]
    second = 2 if apart else 1
    assert decode.slots.tolist() == [5, 5 + second, 8, 8]
    assert decode.table.tolist() == [*given.block_table_tensor[[0, second]].tolist(), [0, 0, 0], [0, 0, 0]]
    for rows in (3, 9):  # fewer rows in the batch than with padding, and more
        query = torch.randn(rows, 2, 4)
        mine, out = decode.of(query), torch.zeros(rows, 2, 4, dtype=torch.float16)
        assert mine.shape == (4, 2, 4) and torch.equal(mine[:2], query[[0, second]])
        decode.put(out, torch.ones(4, 2, 4))
        assert out.flatten(1).all(1).nonzero().flatten().tolist() == [0, second]


@pytest.mark.parametrize("requests", [((0, 1, False), (0, 1, False)), ((0, 4, False), (0, 4, False))])
def test_warm_up_is_told_from_requests(requests: tuple[tuple[int, int, bool], ...]) -> None:
    assert split(batch(*requests), whole=False).dummy


@pytest.mark.parametrize(
    ("device", "full", "most", "captured", "expected"),
    [
        ("cuda", True, 8, [1, 4, 8, 16], (1, 4, 8)),
        ("cuda", True, 40, [4, 1], (1, 4, 8, 16, 32, 40)),
        ("cuda", True, 6, None, (1, 2, 4, 6)),
        ("cuda", False, 8, [1, 3], (1, 2, 4, 8)),
        ("cpu", False, 8, [1, 3], ()),
    ],
)
def test_sizes_of_steps(
    device: str, full: bool, most: int, captured: list[int] | None, expected: tuple[int, ...]
) -> None:
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), scheduler_config=SimpleNamespace(max_num_seqs=most),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full), cudagraph_capture_sizes=captured
        ),
    )  # fmt: skip
    assert decode_sizes(config) == expected


def test_parts() -> None:
    cpu = torch.device("cpu")
    assert part_of(np.array([3, 4, 5]), cpu) == slice(3, 6) and part_of(np.array([], dtype=np.int64), cpu) == slice(
        0, 0
    )
    index = part_of(np.array([1, 3]), cpu)
    assert isinstance(index, torch.Tensor) and index.tolist() == [1, 3]
    assert rows_of(np.array([0, 2]), batch((0, 2, True), (0, 3, True), (0, 1, True))).tolist() == [0, 1, 5]
