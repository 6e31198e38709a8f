"""Inputs of cases: random keys and values in as many copies as cold caches need, in any layout."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from longreach.bench.case import Case, Memory
from longreach.bench.sampling_inputs import draw_sequence
from longreach.bench.timing import copies_needed
from longreach.errors import InvalidInput
from longreach.ops import KVView, Lists, Rows, Selection, Span, Spans, absolute
from longreach.ops.types import RowRange

CHUNK = 1 << 28  # elements drawn at a time
LEAST_SAMPLED = 0.015  # of dense attention's bytes: no preset of MagicPIG reads less; bench.magicpig checks it
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes


class Inputs:
    """Copies of a case's inputs. Layouts share memory: they are views of the same random numbers.

    Physical pages of paged layouts are a random permutation of the pool, one for each page size.
    """

    def __init__(self, case: Case, device: torch.device, seed: int = 0):
        check_shape(case)
        self.case, self.shape, self.device = case, case.shape, device
        self.dtype: torch.dtype = getattr(torch, case.shape.dtype)
        self.draw = torch.Generator(device).manual_seed(seed)
        self.copies = copies_needed(bytes_needed(case), device)
        if case.stack:  # layers that share a choice of keys read the same share of theirs one after the other
            self.copies = max(2, copies_needed(int(bytes_needed(case) * case.stack.share), device))
        if case.stack and case.prefill:  # queries and results of a long prompt leave nothing in the L2
            moved = 2 * case.shape.batch * case.shape.rows * case.shape.heads * case.shape.dim * self.dtype.itemsize
            self.copies = min(2, copies_needed(moved, device))
        if case.reuse or case.sampling:
            self.copies = copies_needed(least_read(case), device)
        shape = self.shape
        numbers = shape.batch * shape.kv_heads * shape.context * shape.dim
        if case.sampling:
            drawn = [self._sampled(numbers) for _ in range(self.copies)]
            self._kv, self._q = [(k, v) for k, v, _ in drawn], [q for _, _, q in drawn]
        else:
            self._kv = [(self._normal(numbers), self._normal(numbers)) for _ in range(self.copies)]
            self._q = [self._normal(shape.batch * shape.rows * shape.heads * shape.dim) for _ in range(self.copies)]
        self._tables: dict[int, Tensor] = {}
        self.seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)

    def _normal(self, numbers: int) -> Tensor:
        x = torch.empty(numbers, dtype=self.dtype, device=self.device)
        for start in range(0, numbers, CHUNK):
            x[start : start + CHUNK].normal_(generator=self.draw)
        return x

    def _sampled(self, numbers: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and queries of one row a sequence, drawn by `sampling_inputs.draw_sequence`, flat."""
        shape = self.shape
        k, v = (torch.empty(numbers, dtype=self.dtype, device=self.device) for _ in "kv")
        form, group = (shape.batch, shape.kv_heads, shape.context, shape.dim), shape.heads // shape.kv_heads
        q = [draw_sequence(*pair, group, self.draw) for pair in zip(k.view(form), v.view(form), strict=True)]
        return k, v, torch.stack(q).to(self.dtype).flatten()

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5

    def table(self, page: int) -> Tensor:
        """int32 [B, pages]: the physical pages of each sequence."""
        if page not in self._tables:
            count = self.shape.context // page
            order = torch.randperm(self.shape.batch * count, generator=self.draw, device=self.device)
            self._tables[page] = order.view(self.shape.batch, count).int()
        return self._tables[page]

    def kv(self, copy: int, memory: Memory) -> tuple[Tensor, Tensor]:
        """k, v [P, G, page, D] of a copy, strided where tokens come first; contiguous memory has a page a sequence."""
        size = memory.page or self.shape.context
        heads, dim = self.shape.kv_heads, self.shape.dim
        form = (-1, heads, size, dim) if memory.order == "heads" else (-1, size, heads, dim)
        k, v = (x.view(form) for x in self._kv[copy])
        return (k, v) if memory.order == "heads" else (k.transpose(1, 2), v.transpose(1, 2))

    def view(self, copy: int, memory: Memory) -> KVView:
        """As the library's cache would hand it over: contiguous memory too has a table, of one page a sequence."""
        k, v = self.kv(copy, memory)
        if memory.page is None:
            table = torch.arange(self.shape.batch, dtype=torch.int32, device=self.device)[:, None]
            return KVView(k, v, self.seq_lens, table)
        return KVView(k, v, self.seq_lens, self.table(memory.page))

    def q(self, copy: int, rows: int) -> Tensor:
        """[B * rows, H, D]; fewer rows than the shape's are the last ones of each sequence."""
        shape = self.shape
        q = self._q[copy].view(shape.batch, shape.rows, shape.heads, shape.dim)
        return q[:, shape.rows - rows :].reshape(-1, shape.heads, shape.dim)

    def rows(self, copy: int, rows: int) -> Rows:
        """The last `rows` positions of each sequence, sequence by sequence.

        Their positions are known on the device only, but those of a prompt on the host too.
        """
        batch, context = self.shape.batch, self.shape.context
        seq = torch.arange(batch, dtype=torch.int32, device=self.device).repeat_interleave(rows)
        pos = torch.arange(context - rows, context, dtype=torch.int32, device=self.device).repeat(batch)
        first = context - rows if self.case.prefill else None
        return Rows(self.q(copy, rows), seq, pos, tuple(RowRange(rows, b, first) for b in range(batch)))

    @cached_property
    def lists(self) -> list[Tensor]:
        """For each copy int32 [B, G, n]: ascending slots drawn for each KV head of each sequence."""
        shape, keys = self.shape, self.case.reads.keys(self.shape.context)

        def one() -> Tensor:
            order = torch.randperm(shape.context, generator=self.draw, device=self.device)
            return order[:keys].sort().values.int()

        count = shape.batch * shape.kv_heads
        form = (shape.batch, shape.kv_heads, keys)
        return [torch.stack([one() for _ in range(count)]).view(form) for _ in range(self.copies)]

    def selection(self, copy: int, rows: int) -> Selection:
        """The case's reads as a Selection. Lists serve all rows of their sequence."""
        reads = self.case.reads
        if reads.kind == "dense":
            return Spans.dense()
        if reads.kind == "window":
            recent = Spans.window(reads.window).spans
            return Spans((Span(absolute(0), absolute(reads.sinks)), *recent)) if reads.sinks else Spans(recent)
        index = self.lists[copy]
        count = torch.full(index.shape[:2], index.shape[2], dtype=torch.int32, device=self.device)
        of = None if rows == 1 else self.rows(copy, rows).seq
        return Lists(index, count, row_to_list=of)

    def seen(self, copy: int, seq: int, head: int, position: int) -> Tensor:
        """int64 [n]: slots that a row attends to, worked out without longreach's operators."""
        reads = self.case.reads
        slots = torch.arange(position + 1, device=self.device)
        if reads.kind == "window":
            return slots[(slots < reads.sinks) | (slots > position - reads.window)]
        if reads.kind == "list":
            listed = self.lists[copy][seq, head].long()
            return listed[listed <= position]
        return slots


def check_shape(case: Case) -> None:
    """Raise InvalidInput for a shape that cannot be measured."""
    shape, pages = case.shape, [memory.page for memory in case.memories if memory.page]
    group, rest = divmod(shape.heads, shape.kv_heads)
    uneven = [page for page in pages if shape.context % page]
    told = None
    if rest or not 1 <= group <= 16:
        told = f"heads: expected 1 to 16 times the {shape.kv_heads} KV heads, got {shape.heads}"
    elif uneven:
        told = f"context: expected a multiple of {max(pages)}, the page size, got {shape.context}"
    elif case.sampling and shape.rows != 1:
        told = f"rows: expected 1, as MagicPIG's step has one row a sequence, got {shape.rows}"
    elif shape.rows > shape.context:
        told = f"rows: expected at most {shape.context}, the context, got {shape.rows}"
    elif not case.reads.keys(shape.context):
        told = f"list: {case.reads.share:g} of {shape.context} keys is none; give a longer context"
    if told:
        raise InvalidInput(f"{case.name}: {told}")


def bytes_needed(case: Case) -> int:
    """Bytes of the keys and values that rows attend to, once for each KV head and sequence.

    Rows of one sequence share them. Queries, results, lists and block tables are overhead: they do not count.
    """
    shape = case.shape
    keys = case.reads.keys(shape.context)
    if case.reads.kind == "window":
        keys = min(shape.context, keys + shape.rows - 1)
    return 2 * shape.batch * shape.kv_heads * keys * shape.dim * WIDTHS[shape.dtype]


def least_read(case: Case) -> int:
    """Bytes that the entry with the fewest reads needs: of MAC keys, values and, if searched, the ring; of MagicPIG
    LEAST_SAMPLED of dense attention's."""
    shape, reuse = case.shape, case.reuse
    if case.sampling:
        return int(LEAST_SAMPLED * bytes_needed(case))
    assert reuse is not None
    vector = shape.dim * WIDTHS[shape.dtype]
    ring = shape.batch * shape.heads * reuse.window * vector
    kv = {hits: 2 * vector * hits.streams(shape, reuse.window) for hits in reuse.hits}
    return min(read + (ring if hits.part == "step" else 0) for hits, read in kv.items())


def flops_needed(case: Case) -> int:
    """Multiply-adds of dense attention, as two operations each: for q.k and for the sum of values."""
    shape = case.shape
    keys = shape.rows * shape.context - shape.rows * (shape.rows - 1) // 2  # all keys visible to the rows
    return 4 * shape.batch * shape.heads * shape.dim * keys
