"""The kernels compile for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import SHARED_MEMORY, printed

COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops.simhash import (
    HashTables, attend_sampled, build, codes, collide, projections, seal, triton, triton_attention,
    triton_kernels, weigh,
)
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv, random_rows

found = {}
with patch.object(triton, "refuse", lambda *a: None), patch.object(triton_attention, "refuse", lambda *a: None):
    for dim, group, dtype, page, bits, tables, size, share in (
        (128, 4, torch.bfloat16, None, 10, 150, 65536, "own"), (128, 8, torch.bfloat16, 64, 10, 75, 65536, "group"),
        (64, 1, torch.float16, 16, 1, 3, 8, "group"), (72, 7, torch.float32, None, 16, 300, 1024, "own"),
        (256, 16, torch.float32, 48, 8, 75, 32, "group"),
    ):
        kv = random_kv([70, 50], heads=2, dim=dim, page=page, dtype=dtype)
        rows, centre = random_rows(kv, 2, group=group), torch.zeros(2, 2, dim)
        memory = HashTables.empty(2, 2, 200, bits=bits, tables=tables, size=size, first=4)
        drawn, one = projections(dim, bits, tables, 0), torch.arange(2)
        with compiling(triton_kernels, "codes", "build", "average", "seal", "hash_keys", "add_keys", "look_up",
                       "gather", "weigh") as made:  # fmt: skip
            queries = codes(rows.q, drawn, impl="triton")
            keys = codes(kv.k.unflatten(0, (1, -1))[:, :2], drawn, centre=centre[:, :, None], impl="triton")
            new = torch.zeros(2, 5, 2, tables, dtype=torch.uint16)
            build(memory, new, one, one, impl="triton")
            stop = torch.full((2,), 40)
            means = torch.zeros(2, 2, dim)
            seal(kv, one, memory, drawn, means, stop, centred=16, block=256, impl="triton")
            seal(kv, one, memory, drawn, means, stop, centred=16, impl="triton")
            got = collide(rows, memory, torch.zeros_like(queries), capacity=64, share=share, impl="triton")
            weigh(rows, kv, memory, got, centre, impl="triton")
        with (
            compiling(triton_attention, "search_parts", "attend_parts", "merge_parts") as more,
            compiling(triton_kernels, "codes"),
        ):
            attend_sampled(
                rows, kv, one, memory, drawn, centre, torch.full((len(rows.pos),), 9), share=share, sinks=4, scale=0.1,
                softcap=5.0 if dim == 64 else None, impl="triton",
            )
        made = [*made, *more]
        found[f"{dim} {group} {dtype} {page} {bits} {tables} {size} {share}"] = [
            [m.metadata.name, m.metadata.shared, "cubin" in m.asm, m.asm["ptx"].count(" longreach_words[")]
            for m in made
        ]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    cases = printed(COMPILE)
    assert len(cases) == 5
    for case, kernels in cases.items():
        assert [name for name, *_ in kernels] == [
            "codes", "codes", "build", "average", "seal", "average", "hash_keys", "add_keys", "look_up", "gather",
            "weigh", "search_parts", "attend_parts", "merge_parts",
        ], case  # fmt: skip
        assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin, _ in kernels), (case, kernels)
        # counters and buckets take 38 KiB more, and beyond 48 together room would have to be asked for
        assert all(shared <= 10 << 10 for name, shared, *_ in kernels if name == "search_parts"), (case, kernels)
        # more would be arrays of their own
        arrays = {name: count for name, _, _, count in kernels}
        assert arrays["search_parts"] == arrays["attend_parts"] == 1, (case, arrays)
