"""Block-MKA's attention of whole prompts, forward and backward with the choice of blocks, and torch's exact kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.mka.cases import BLOCK, EXACT
from longreach.bench.mka.training import Trained, Trial, measure_training
from longreach.bench.targets import judge
from longreach.mka.block import Blocks, Reach, block_attention, choose
from longreach.mka.config import MKAConfig
from longreach.mka.layout import Layout
from longreach.mka.tokens import Tokens
from longreach.ops import Rows
from longreach.ops.recall import BlockCode
from longreach.ops.rope import RotaryFrequencies

KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHECKED = 64  # rows whose results and gradients are compared


class BlockAttention:
    """The attention of one layer over random queries, keys and values, with weights 0.5, 8 and 1 for the levels."""

    def __init__(self, case: Case, device: torch.device, seed: int):
        trained, shape = case.trained, case.shape
        assert trained is not None
        draw, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, shape.dtype)

        def random(heads: int) -> Tensor:
            x = torch.empty(shape.batch * shape.context, heads, shape.dim, dtype=dtype, device=device)
            return x.normal_(generator=draw).requires_grad_()

        self.q, self.k, self.v = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)
        self.config = MKAConfig(
            "block_mka", block=trained.block, window=trained.window, blocks=trained.blocks, recall=trained.recall
        )
        self.tokens = Tokens.of((shape.batch, shape.context), device)
        self.scale, self.heads = shape.dim**-0.5, shape.kv_heads
        rate = 500000.0 ** -(torch.arange(0, shape.dim, 2, dtype=torch.float64, device=device) / shape.dim)
        self.frequencies = RotaryFrequencies(rate, "half")
        weights = torch.tensor([0.5, 8.0, 1.0], device=device)
        self.weights = weights.expand(shape.batch * shape.context, 3).contiguous().requires_grad_()
        self.code = BlockCode(trained.recall, self.frequencies)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.weights

    def forward(self, impl: str = "auto") -> Tensor:
        """[R, H, D], and everything that a layer computes for it, the choice included."""
        config, code = self.config, self.code
        layout = Layout.of(self.tokens, config.block)
        rows, kv = layout.rows(self.q), layout.view(self.k, self.v)
        reach = Reach.of(layout.slot, layout.start, config)
        blocks = Blocks.of(kv, layout.first, code, self.frequencies, config.block, summaries=True)
        recalled = choose(rows, self.tokens.pos, self.heads, blocks, reach, code, config, self.scale, impl=impl)
        weights = self.weights * torch.stack([torch.ones_like(reach.has_blocks), *[reach.has_blocks] * 2], 1)
        return block_attention(rows, kv, reach, blocks, recalled, weights, config, self.scale, impl=impl).out

    @torch.no_grad()
    def check(self) -> float:
        """The largest relative error of some rows' results against fp32. Raises WrongResult where it is too large."""
        config, code = self.config, self.code
        layout = Layout.of(self.tokens, config.block)
        rows, kv = layout.rows(self.q), layout.view(self.k, self.v)
        reach = Reach.of(layout.slot, layout.start, config)
        blocks = Blocks.of(kv, layout.first, code, self.frequencies, config.block, summaries=True)
        recalled = choose(rows, self.tokens.pos, self.heads, blocks, reach, code, config, self.scale)
        some = torch.linspace(0, len(self.q) - 1, CHECKED, device=self.q.device).long()
        wide = type(kv)(kv.k.float(), kv.v.float(), kv.seq_lens)
        assert blocks.summaries is not None
        summaries = type(kv)(blocks.summaries.k.float(), blocks.summaries.v.float(), blocks.summaries.seq_lens)
        part = Reach(reach.window[some], reach.start[some], reach.stop[some])
        weights = self.weights[some] * torch.stack([torch.ones_like(part.has_blocks), *[part.has_blocks] * 2], 1)
        want = block_attention(
            Rows(self.q[some].float(), layout.seq[some], layout.slot[some]), wide, part, Blocks(None, summaries),
            type(recalled)(recalled.index[some], recalled.used[some]), weights, config, self.scale, impl="reference",
        ).out  # fmt: skip
        got = self.forward()[some].float()
        off = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
        most = 4 * torch.finfo(self.q.dtype).eps
        if not off <= most:
            raise WrongResult(
                f"{BLOCK}: relative error {off:.2e} of its output exceeds {most:.1e}; its time does not count"
            )
        return off


def exact_trials(ours: BlockAttention, case: Case, device: torch.device) -> Iterator[tuple[str, Trial]]:
    """Dense causal attention of the same inputs by each of torch's exact kernels that runs here."""
    batch, length = ours.tokens.shape
    q, k, v = (
        x.detach().unflatten(0, (batch, length)).transpose(1, 2).contiguous().requires_grad_()
        for x in (ours.q, ours.k, ours.v)
    )
    kernels = KERNELS if device.type == "cuda" else {"math": SDPBackend.MATH}
    for name, backend in kernels.items():

        def forward(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=ours.scale)

        try:
            forward()
        except RuntimeError:  # this kernel does not take these inputs here
            continue
        yield f"torch {name}", Trial(forward, (q, k, v))


def run_attention(case: Case, device: torch.device, *, replays: int, seed: int) -> dict[str, Any]:
    """Measure a case; the result as a record's part. Raises WrongResult."""
    ours = BlockAttention(case, device, seed)
    error = ours.check()
    trials = {BLOCK: Trial(ours.forward, ours.inputs), **dict(exact_trials(ours, case, device))}
    times = measure_training(trials, device, replays=min(replays, case.replays or replays))
    ours.check()
    entries = [_entry(name, trained, error if name == BLOCK else None) for name, trained in times.items()]
    return {"entries": entries, "timing": {"how": times[BLOCK].both.how, "replays": replays, "warm_up": 2},
            "targets": judge(case, entries)}  # fmt: skip


def _entry(name: str, trained: Trained, error: float | None) -> dict[str, Any]:
    own = name == BLOCK
    return {"name": name, "who": "longreach" if own else EXACT, "settings": {"kernel": name},
            **trained.recorded(), "error": error}  # fmt: skip
