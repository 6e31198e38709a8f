"""attend_amend's kernels compile for an H200 where there is none: down to machine code that fits."""

from __future__ import annotations

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import Rows, Span, Spans, absolute, relative
from longreach.ops.attend import Entries, triton, triton_amend, triton_amend_kernels, triton_kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

dim, found = int(sys.argv[1]), []
with (patch.object(triton_amend, "refuse", lambda *a: None),
      patch.object(Tuning, "programs", lambda s, d: 132 * s.per_sm)):
    for dtype, page, sequences in ((torch.bfloat16, None, 1), (torch.bfloat16, None, 8), (torch.bfloat16, 16, 160)):
        kv = random_kv([256] * sequences, heads=8, dim=dim, page=page, dtype=dtype)
        rows = Rows(torch.randn(sequences, 32, dim).to(dtype), torch.arange(sequences), torch.full((sequences,), 255))
        spans = Spans((Span(absolute(torch.zeros(sequences, 32).int()), relative(1)),), "query")
        place = torch.zeros(sequences, 32, dtype=torch.int32)
        entries = Entries(torch.zeros(99, dim), torch.zeros(99))
        sink = torch.zeros(32) if page else None
        with compiling(triton_kernels, "attend_pieces") as made, \\
             compiling(triton_amend_kernels, "amend_pieces") as last:
            triton_amend.attend_amend(rows, kv, spans, relative(-63), entries, place, place, scale=1.0, softcap=None,
                                      sink_logit=sink)
        if sequences < 160:  # more are not dealt out, and nothing is chained
            before, _ = last[0].asm["ptx"].split("griddepcontrol.wait")[1].split("griddepcontrol.launch_dependents")
            assert ("st.global" in before) == (sequences > 3), "behind few results the next kernel starts at once"
        found.append([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in (*made, *last)])
print(json.dumps(found))
"""


@pytest.mark.parametrize("dim", swept([64, 128], 1))
def test_compiles_for_an_h200(dim: int) -> None:
    for kernels in printed(COMPILE, dim):
        assert [name for name, _, _ in kernels] == ["attend_pieces", "amend_pieces"]
        for name, shared, machine_code in kernels:
            assert machine_code and shared <= SHARED_MEMORY, (name, shared)
