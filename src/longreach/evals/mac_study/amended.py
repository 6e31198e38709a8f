"""A row's output if an earlier row's result replaces the keys before that row's band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longreach.evals.layers import relative_errors
from longreach.methods.call import LayerCall
from longreach.ops import KVView, Partial, Rows, Span, Spans, absolute, merge, relative
from longreach.ops.attend import attend_from_logits, score_keys
from longreach.ops.types import Logits

MOST = 1 << 22  # logits of one set of queries in memory at a time
IMPL = "reference"  # a few rows, and fp32 logits: errors of reuse alone


def steps(call: LayerCall, index: Tensor) -> Sequence[Tensor]:
    """Rows `index` [r] in blocks with at most MOST logits (but one row at least)."""
    return index.split(max(1, MOST // (call.rows.q.shape[1] * call.kv.capacity)))


class Reused:
    """Rows of a pass with their logits, to which results of earlier rows are brought. call: of these rows alone."""

    def __init__(self, call: LayerCall):
        self.call = call
        self.logits = self._scored(call.rows)
        self.dense = self._values(call.rows, Spans.dense(), self.logits, sink=True)

    def errors(self, queries: Tensor, position: Tensor, bands: Sequence[int], sinks: int) -> Tensor:
        """fp64 [R, H, bands]: |o - o_dense| / |o_dense| of Eq. 7.

        queries: [R, H, D] after rotation, those of the rows at `position` int [R, H] (-1: none, all is read). A row at
        p gave attention over [sinks, p + 1 - band); the row reads what is left under its own query.
        """
        theirs = replace(self.call.rows, q=queries.contiguous(), runs=None)
        logits, found = self._scored(theirs), []
        for band in bands:
            start = (position.long() + 1 - band).clamp(min=sinks)
            entry = self._values(theirs, Spans((Span(absolute(sinks), absolute(start)),), "query"), logits, sink=False)
            left = Spans((Span(absolute(0), absolute(sinks)), Span(absolute(start), relative(1))), "query")
            mine = self._values(self.call.rows, left, self.logits, sink=True)
            found.append(relative_errors(merge(mine, entry).out, self.dense.out))
        return torch.stack(found, -1)

    def _scored(self, rows: Rows) -> Logits:
        call = self.call
        return score_keys(rows, call.kv, scale=call.scale, softcap=call.softcap, impl=IMPL)[1]

    def _values(self, rows: Rows, selection: Spans, logits: Logits, *, sink: bool) -> Partial:
        kv: KVView = self.call.kv
        return attend_from_logits(
            rows, kv, selection, logits, sink_logit=self.call.sink_logit if sink else None, impl=IMPL
        )
