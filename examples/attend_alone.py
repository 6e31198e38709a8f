"""The operator alone, on tensors: attention over selected keys, and partial results merged.

Run: python examples/attend_alone.py
"""

import torch

from longreach.ops import KVView, Rows, Span, Spans, absolute, attend, merge, relative

torch.manual_seed(0)
H, G, N, D = 8, 2, 1000, 64  # query heads, KV heads (GQA), keys, head dim

# one sequence of N tokens; the last three of them ask
q = torch.randn(3, H, D)
k, v = torch.randn(1, G, N, D), torch.randn(1, G, N, D)
rows = Rows(q, seq=torch.zeros(3, dtype=torch.long), pos=torch.tensor([N - 3, N - 2, N - 1]))
kv = KVView(k, v, seq_lens=torch.tensor([N]))
scale = D**-0.5

dense = attend(rows, kv, Spans.dense(), scale=scale)

# sinks and a window relative to each row: what StreamingLLM attends to
sinks, window = Span(absolute(0), absolute(4)), Span(relative(-127), relative(1))
some = attend(rows, kv, Spans((sinks, window)), scale=scale)
print(f"132 of {N} keys: output differs from dense by {(some.out - dense.out).abs().max():.3f}")

# attention over disjoint sets of keys merges into attention over all of them
first = attend(rows, kv, Spans((Span(absolute(0), absolute(500)),)), scale=scale)
rest = attend(rows, kv, Spans((Span(absolute(500), relative(1)),)), scale=scale)
both = merge(first, rest)
print(f"two halves merged: differs from dense by {(both.out - dense.out).abs().max():.1e}")
print(f"share of attention in the second half: {(rest.lse - both.lse).exp().mean():.2f}")
