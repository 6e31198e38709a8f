"""Block-MKA's decode step of a layer, all levels in use, compared with dense attention's fastest kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from longreach.bench.baselines import baseline
from longreach.bench.case import Case, Memory
from longreach.bench.check import WrongResult
from longreach.bench.competitor import Competitor
from longreach.bench.entries import rival_entry, speeds
from longreach.bench.inputs import WIDTHS, Inputs, bytes_needed
from longreach.bench.mka.cases import BLOCK
from longreach.bench.sweep import Sweeps
from longreach.bench.targets import judge
from longreach.bench.timing import Call, measure
from longreach.mka.block import Blocks, Reach, block_attention, choose
from longreach.mka.config import MKAConfig
from longreach.ops import KVView, Rows
from longreach.ops.recall import BlockCode, code_completed
from longreach.ops.rope import RotaryFrequencies

WEIGHTS = (0.5, 8.0, 1.0)  # of the levels
HOW = (
    "Times are those of a layer: summary of the block that a row completes, choice of blocks, attention to the window, "
    "to summaries and to recalled blocks, and their mixture. Keys and values are appended already, for ours as well. "
    "What all layers of a step share, the numbers of blocks before each row, is computed before, as a session does."
)


class BlockStep:
    """The step for each copy of a case's inputs, over contiguous memory with summaries of all blocks."""

    def __init__(self, inputs: Inputs, impl: str):
        trained = inputs.case.trained
        assert trained is not None
        self.inputs, self.impl = inputs, impl
        self.config = MKAConfig(
            "block_mka", block=trained.block, window=trained.window, blocks=trained.blocks, recall=trained.recall
        )
        even = torch.arange(0, inputs.shape.dim, 2, dtype=torch.float64, device=inputs.device)
        frequencies = RotaryFrequencies(500000.0 ** (-even / inputs.shape.dim), "half")
        self.means = BlockCode("summary", frequencies)
        self.code = self.means if trained.recall == "summary" else BlockCode(trained.recall)
        self.weights = torch.tensor(WEIGHTS, device=inputs.device).expand(inputs.shape.batch, 3)
        self._views = [self._view(copy) for copy in range(inputs.copies)]
        self._blocks = [self._codes(view) for view in self._views]

    def _view(self, copy: int) -> KVView:
        k, v = self.inputs.kv(copy, Memory())
        return KVView(k, v, self.inputs.seq_lens)

    def _codes(self, kv: KVView) -> Blocks:
        """Of one sequence at a time: means are taken of keys in fp32."""
        size, frequencies = self.config.block, self.means.frequencies
        first = torch.arange(0, kv.capacity // size * size, size, device=kv.k.device)[None]
        assert frequencies is not None
        codes, means = list[Tensor](), list[KVView]()
        for one in range(kv.sequences):
            alone = KVView(kv.k[one : one + 1], kv.v[one : one + 1], kv.seq_lens[one : one + 1])
            code = None if self.code is self.means else self.code
            found = Blocks.of(alone, first, code, frequencies, size, summaries=True)
            assert found.summaries is not None
            means.append(found.summaries)
            codes.append((found.codes or found.summaries).k)
        k, v, lens = (torch.cat([getattr(x, name) for x in means]) for name in ("k", "v", "seq_lens"))
        own = k if self.code is self.means else torch.cat(codes)
        return Blocks(KVView(own, own, lens), KVView(k, v, lens))

    def call(self, copy: int, impl: str | None = None) -> Callable[[], Tensor]:
        """The step, which returns [B, H, D]."""
        kv, blocks, config = self._views[copy], self._blocks[copy], self.config
        rows, impl = replace(self.inputs.rows(copy, 1), runs=None), impl or self.impl
        reach = Reach.of(rows.pos.long(), None, config)

        def run() -> Tensor:
            assert blocks.summaries is not None and blocks.codes is not None
            means = blocks.summaries
            code_completed(rows, kv, means.k, self.means, config.block, means=means.v)
            if self.code is not self.means:
                code_completed(rows, kv, blocks.codes.k, self.code, config.block)
            recalled = choose(rows, rows.pos, kv.heads, blocks, reach, self.code, config, self.inputs.scale, impl=impl)
            return block_attention(
                rows, kv, reach, blocks, recalled, self.weights, config, self.inputs.scale, impl=impl
            ).out

        return run

    @property
    def bytes_read(self) -> int:
        """Bytes of all sequences: keys and values of window and recalled blocks, those of the own block, and summaries.

        Mean keys are read once, as one pass attends to the summaries and, without other codes, chooses blocks.
        """
        shape, config = self.inputs.shape, self.config
        vector = shape.dim * WIDTHS[shape.dtype] * shape.batch * shape.kv_heads
        last = shape.context - 1
        first = max(0, (last // config.block) * config.block - config.window)
        keys = last + 1 - first + min(config.blocks, first // config.block) * config.block
        codes = 0 if self.code is self.means else self.code.width(shape.dim) // shape.dim
        return vector * (2 * (keys + last % config.block + 1) + (2 + codes) * (first // config.block))

    def check(self) -> float:
        """The largest relative error of the step against the reference in fp32, given its choice of blocks."""
        kv, blocks, config = self._views[0], self._blocks[0], self.config
        rows = replace(self.inputs.rows(0, 1), runs=None)
        reach = Reach.of(rows.pos.long(), None, config)
        got = self.call(0)().float()
        recalled = choose(rows, rows.pos, kv.heads, blocks, reach, self.code, config, self.inputs.scale, impl=self.impl)
        assert blocks.summaries is not None
        wide = [KVView(x.k.float(), x.v.float(), x.seq_lens) for x in (kv, blocks.summaries)]
        want = block_attention(
            Rows(rows.q.float(), rows.seq, rows.pos), wide[0], reach, Blocks(None, wide[1]), recalled, self.weights,
            config, self.inputs.scale, impl="reference",
        ).out  # fmt: skip
        off = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
        most = 4 * torch.finfo(self.inputs.dtype).eps
        if not off <= max(most, 1e-4):
            raise WrongResult(
                f"{BLOCK}: relative error {off:.2e} of its output exceeds {most:.1e}; its time does not count"
            )
        return off

    def calls(self) -> list[Call]:
        return [self.call(copy) for copy in range(self.inputs.copies)]


@torch.no_grad()
def run_decode(
    case: Case, device: torch.device, *, without: Iterable[str], replays: int, seed: int,
    say: Callable[[str], None], sweeps: Sweeps | None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case; the result as a record's part. Raises WrongResult, Unsupported and BaselineFailed as run_case."""
    names = [name for name in case.baselines if name not in set(without)]
    versions: dict[str, str] = {}
    for name in names:
        versions |= baseline(name).load()
    inputs, sweeps = Inputs(case, device, seed), sweeps or Sweeps()
    mine = BlockStep(inputs, case.impls[0])
    error = mine.check()
    rivals, tried = list[Competitor](), dict[str, Any]()
    for name in names:
        found, tests = sweeps.fastest(name, inputs, say)
        tried[name] = [asdict(test) for test in tests]
        rivals += found
    times = measure({BLOCK: mine.calls(), **{c.name: c.calls for c in rivals}}, device, replays=replays)
    mine.check()
    dense = bytes_needed(case)
    entries: list[dict[str, Any]] = [
        {
            "name": BLOCK,
            "who": "longreach",
            "settings": {"impl": mine.impl, "config": mine.config.to_json(), "weights": list(WEIGHTS)},
            **times[BLOCK].recorded(),
            "tb_per_s": mine.bytes_read / times[BLOCK].median / 1e12,
            "bytes_read": mine.bytes_read,
            "percent_of_dense": 100 * mine.bytes_read / dense,
            "error": error,
        },
        *(rival_entry(c, times[c.name], inputs) for c in rivals),
    ]
    return {
        "bytes_needed": dense,
        "copies": inputs.copies,
        "timing": {"how": times[BLOCK].how, "replays": replays, "warm_up": 3, "of": HOW},
        "baselines": {"versions": versions, "left_out": sorted(set(case.baselines) - set(names)), "tried": tried},
        "entries": entries,
        "speed_over_fastest": speeds(entries),
        "targets": judge(case, entries),
    }
