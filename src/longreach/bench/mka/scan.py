"""The session level's scan of keys and values, forward and backward separately."""

from __future__ import annotations

from typing import Any

import torch

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.mka.training import Trial, measure_training
from longreach.bench.targets import judge
from longreach.ops import ScanCarry, scan

CHECKED = 512  # first tokens that are compared with fp64


def run_scan(case: Case, device: torch.device, *, replays: int, seed: int) -> dict[str, Any]:
    """Measure a case; the result as a record's part. Raises WrongResult."""
    shape = case.shape
    draw, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, shape.dtype)
    x = torch.randn(shape.context, shape.kv_heads, 2 * shape.dim, dtype=dtype, device=device, generator=draw)
    decay = (2.0 ** -(1 / 1024 ** torch.linspace(0, 1, shape.kv_heads, device=device))).requires_grad_()
    seq, pos = torch.zeros(shape.context, dtype=torch.int64, device=device), torch.arange(shape.context, device=device)
    carry = ScanCarry.empty(1, shape.kv_heads, 2 * shape.dim, device=device)
    x.requires_grad_()
    trial = Trial(lambda: scan(x, decay, seq, pos, carry)[0], (x, decay))
    with torch.no_grad():
        few = slice(0, min(CHECKED, shape.context))
        wide = ScanCarry.empty(1, shape.kv_heads, 2 * shape.dim, dtype=torch.float64)
        want = scan(x[few].double().cpu(), decay.double().cpu(), seq[few].cpu(), pos[few].cpu(), wide, impl="reference")
        got = trial.forward()[few].double().cpu()
        error = float((got - want[0]).norm() / want[0].norm())
    if not error <= torch.finfo(dtype).eps:
        raise WrongResult(f"scan: relative error {error:.2e} of its output; its time does not count")
    times = measure_training({"scan": trial}, device, replays=replays, ahead=True)["scan"]
    bytes_moved = 2 * x.numel() * x.element_size()
    entries = [
        {"name": name, "who": "longreach", "settings": {}, **timing.recorded(), "error": error,
         "tb_per_s": share * bytes_moved / timing.median / 1e12}
        for name, timing, share in (("forward", times.forward, 1.0), ("backward", times.backward, 1.5))
    ]  # fmt: skip
    return {
        "entries": entries,
        "timing": {"how": times.both.how, "replays": replays, "warm_up": 2},
        "bytes_moved": {"forward": bytes_moved, "backward": 1.5 * bytes_moved},
        "targets": judge(case, entries),
    }
