"""The operator alone, on tensors: attention over selected keys, and partial results merged.

Run: python examples/attend_alone.py
"""

import torch

from longreach.ops import KVView, Rows, Span, Spans, at, attend, merge, near

torch.manual_seed(0)
H, G, N, D = 8, 2, 1000, 64  # query heads, KV heads (GQA), keys, head dim

# one sequence of N tokens; the last three of them ask
q = torch.randn(3, H, D)
k, v = torch.randn(1, G, N, D), torch.randn(1, G, N, D)
rows = Rows(q, seq=torch.zeros(3, dtype=torch.long), pos=torch.tensor([N - 3, N - 2, N - 1]))
kv = KVView(k, v, filled=torch.tensor([N]))
scale = D**-0.5

dense = attend(rows, kv, Spans.dense(), scale=scale)

# sinks and a window relative to each row: what StreamingLLM attends to
sinks, window = Span(at(0), at(4)), Span(near(-127), near(1))
some = attend(rows, kv, Spans((sinks, window)), scale=scale)
print(f"132 of {N} keys: output differs from dense by {(some.out - dense.out).abs().max():.3f}")

# attention over disjoint sets of keys merges into attention over all of them
first = attend(rows, kv, Spans((Span(at(0), at(500)),)), scale=scale)
rest = attend(rows, kv, Spans((Span(at(500), near(1)),)), scale=scale)
both = merge(first, rest)
print(f"two halves merged: differs from dense by {(both.out - dense.out).abs().max():.1e}")
print(f"share of attention in the second half: {(rest.lse - both.lse).exp().mean():.2f}")
