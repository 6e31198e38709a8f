"""One decoder layer of an 8B model, forward and backward, with attention of each kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longreach.bench.case import Case
from longreach.bench.mka.cases import FEED_FORWARD, WIDTH
from longreach.bench.mka.training import Trial, measure_training
from longreach.bench.targets import judge
from longreach.mka.module import AttentionShape, attention


class DecoderLayer(nn.Module):
    """Norm, attention, norm, SwiGLU, as in Llama."""

    def __init__(self, kind: str, shape: AttentionShape, feed_forward: int, **options: Any):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))
        self.attention = attention(kind, shape, **options)
        self.gate, self.up = (nn.Linear(shape.width, feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def run_layer(case: Case, device: torch.device, *, replays: int, seed: int) -> dict[str, Any]:
    """Measure a case; the result as a record's part."""
    shape, trained = case.shape, case.trained
    assert trained is not None
    small = shape.dim < 64
    width, inner = (64, 96) if small else (WIDTH, FEED_FORWARD)
    dtype = getattr(torch, shape.dtype)
    sizes = AttentionShape(width, shape.heads, shape.kv_heads, shape.dim, theta=500000.0)
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape.batch, shape.context, width, dtype=dtype, device=device, generator=draw).requires_grad_()
    trials = dict[str, Trial]()
    for name in trained.kinds:
        kind, *mode = name.split()
        options: dict[str, Any] = {"mode": mode[0]} if mode else {}
        if kind in ("block_mka", "mka"):
            names = "block", "window", "blocks", "recall"
            options |= {name: getattr(trained, name) for name in names}
        torch.manual_seed(seed)
        with device:
            layer = DecoderLayer(kind, sizes, inner, **options).to(dtype)
        trials[name] = Trial(partial(layer, x), (x, *layer.parameters()))
    times = measure_training(trials, device, replays=min(replays, case.replays or replays))
    entries = [
        {"name": name, "who": "longreach", "settings": {"kind": name}, **trained_times.recorded()}
        for name, trained_times in times.items()
    ]
    first = times[trained.kinds[0]].both
    return {"entries": entries, "timing": {"how": first.how, "replays": replays, "warm_up": 2},
            "targets": judge(case, entries)}  # fmt: skip
