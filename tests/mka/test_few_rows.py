"""Block-MKA's step of few rows, by the kernels made for it, against the reference; interpreted without a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from longreach.mka.block import Blocks, Reach, Recalled, block_attention, choose, few_rows
from longreach.mka.config import MKAConfig
from longreach.ops import BlockCode, KVView, Partial, RotaryFrequencies, RowRange, Rows
from longreach.ops.recall import code_completed, code_places, code_view, planes_of
from longreach.testing.inputs import random_kv
from tests.ops.attend.kernels import HALF, PLACE, here, needs_gpu
from tests.tiers import swept


@dataclass
class Step:
    """A decode step over random memory of which each sequence has its last row."""

    rows: Rows
    kv: KVView
    codes: dict[str, Tensor]
    code: BlockCode
    means: BlockCode
    weights: Tensor
    config: MKAConfig

    def blocks(self) -> Blocks:
        places, of = code_places(self.kv, self.config.block), self.codes
        keys, values, codes = (
            code_view(self.kv, of[n], self.config.block, places) for n in ("keys", "values", "codes")
        )
        summaries = KVView(keys.k, values.k, keys.seq_lens, keys.block_table) if 2 in self.config.tiers else None
        return Blocks(codes if 3 in self.config.tiers else None, summaries)

    def __call__(self, impl: str, *, among: Recalled | None = None) -> tuple[Recalled | None, Partial]:
        """among: the blocks to recall, None for those chosen."""
        config, scale = self.config, self.rows.q.shape[2] ** -0.5
        code_completed(self.rows, self.kv, self.codes["keys"], self.means, config.block, means=self.codes["values"])
        if self.code is not self.means:
            code_completed(self.rows, self.kv, self.codes["codes"], self.code, config.block)
        blocks, reach = self.blocks(), Reach.of(self.rows.pos.long(), None, config)
        recalled = among
        if recalled is None and 3 in config.tiers:
            recalled = choose(self.rows, self.rows.pos, self.kv.heads, blocks, reach, self.code, config, scale,
                              impl=impl)  # fmt: skip
        return recalled, block_attention(self.rows, self.kv, reach, blocks, recalled, self.weights, config, scale,
                                         impl=impl)  # fmt: skip


def make_step(
    seed: int, *, dim: int = 16, group: int = 2, dtype: torch.dtype = torch.float32, longest: int = 90
) -> Step:
    dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    block, heads = dice.choice((2, 4, 8)), dice.choice((1, 2))
    tiers = dice.choice(((1, 2, 3), (1, 2, 3), (1, 3), (1, 2)))
    recall = dice.choice(("summary", "summary", "bounds", "hash")) if 3 in tiers and dim <= 128 else "summary"
    chosen = {"blocks": dice.choice((1, 3, 9)), "recall": recall} if 3 in tiers else {}
    config = MKAConfig.make("block_mka", block=block, window=2 * block, tiers=tiers, **chosen)
    lengths = [dice.choice((1, 3, 8, 17, 40, longest)) for _ in range(dice.choice((1, 3)))]
    page = dice.choice((None, 1, 2, 16)) if block != 8 else dice.choice((None, 4, 24))
    kv = here(random_kv(lengths, heads=heads, dim=dim, page=page, dtype=dtype, seed=seed))
    even = torch.arange(0, dim, 2, dtype=torch.float64)
    frequencies = RotaryFrequencies(here(100.0 ** (-even / dim)), "half")
    means = BlockCode("summary", frequencies)
    code = means
    if recall == "bounds":
        code = BlockCode("bounds")
    elif recall == "hash":
        code = BlockCode("hash", frequencies, here(planes_of(dim, 32, 0)))
    q = torch.randn(len(lengths), heads * group, dim, generator=draw).to(dtype)
    rows = here(Rows(q, torch.arange(len(lengths)), torch.tensor(lengths) - 1))
    units = -(-kv.page // block)
    widths = {"keys": dim, "values": dim, "codes": code.width(dim)}
    shape = kv.k.shape[0], heads, units
    codes = {n: here(torch.full((*shape, width), torch.nan, dtype=dtype)) for n, width in widths.items()}
    if code is means:
        codes["codes"] = codes["keys"]
    weights = here(torch.randn(len(lengths), len(tiers), generator=draw) + 0.5)
    step = Step(rows, kv, codes, code, means, weights, config)
    for slot in range(block - 1, max(lengths) - 1, block):  # blocks that earlier rows completed
        before = replace(rows, pos=torch.full_like(rows.pos, slot))
        code_completed(before, kv, codes["keys"], means, block, means=codes["values"])
        if code is not means:
            code_completed(before, kv, codes["codes"], code, block)
    return step


def compared(step: Step, impl: str = "triton") -> None:
    """The choice, where no two blocks score nearly alike, and the attention given that choice."""
    recalled, got = step(impl)
    wide = replace(step.kv, k=step.kv.k.float(), v=step.kv.v.float())
    codes = {name: x.float() for name, x in step.codes.items()}
    exact = replace(step, rows=replace(step.rows, q=step.rows.q.float()), kv=wide, codes=codes)
    if step.code is step.means:
        exact.codes["codes"] = exact.codes["keys"]
    among = None if recalled is None else Recalled(recalled.index, recalled.used)
    blocks, reach = exact.blocks(), Reach.of(step.rows.pos.long(), None, step.config)
    want = block_attention(exact.rows, wide, reach, blocks, among, step.weights, step.config,
                           step.rows.q.shape[2] ** -0.5, impl="reference")  # fmt: skip
    close = 4 * torch.finfo(step.kv.k.dtype).eps if step.kv.k.dtype != torch.float32 else 3e-5
    torch.testing.assert_close(got.out, want.out, rtol=close, atol=close)
    torch.testing.assert_close(got.lse, want.lse, rtol=close, atol=close)
    if recalled is not None and step.kv.k.dtype == torch.float32:
        chosen, _ = step("reference")
        assert chosen is not None
        assert torch.equal(chosen.index, recalled.index) and torch.equal(chosen.used, recalled.used)


@pytest.mark.parametrize("seed", swept(range(60), 20))
def test_any_step(seed: int) -> None:
    compared(make_step(seed))


def test_attention_comes_with_a_choice_by_summaries_alone() -> None:
    """And only for rows of which no gradient is asked."""
    for seed in range(20):
        step = make_step(seed)
        recalled, _ = step("triton")
        with_means = step.config.recall == "summary" and step.config.tiers == (1, 2, 3)
        assert recalled is None or (recalled.summaries is not None) == with_means
        if with_means and PLACE == "cpu":
            trained = replace(step, rows=replace(step.rows, q=step.rows.q.clone().requires_grad_()))
            recalled, found = trained("auto")
            assert recalled is not None and recalled.summaries is None and found.out.requires_grad


def test_which_rows_are_few() -> None:
    """About one a sequence, of keys in order on the device, computed by Triton, without gradients."""
    kv, evicted = (random_kv([9, 7], heads=1, dim=8, evicted=x) for x in (False, True))
    q, two = torch.zeros(4, 2, 8), torch.arange(2)
    rows, many = Rows(q[:2], two, two), Rows(q, two.repeat(2), two.repeat(2))
    runs = replace(rows, seq=two * 0, runs=(RowRange(2, 0),))
    assert few_rows(rows, kv, "triton", q)
    assert few_rows(replace(rows, runs=(RowRange(1, 0), RowRange(1, 1))), kv, "triton")
    assert not (few_rows(many, kv, "triton") or few_rows(runs, kv, "triton") or few_rows(rows, evicted, "triton"))
    assert not any(few_rows(rows, kv, impl) for impl in ("reference", "numba", "auto"))  # on a CPU
    trained = q.clone().requires_grad_()
    assert not few_rows(rows, kv, "triton", trained)
    with torch.no_grad():
        assert few_rows(rows, kv, "triton", trained)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [(64, 16, HALF), (80, 3, HALF), (128, 4, HALF), (256, 1, HALF), (128, 5, torch.float16), (80, 8, torch.float32)],
)
@pytest.mark.parametrize("seed", range(4))
def test_odd_shapes_on_a_gpu(dim: int, group: int, dtype: torch.dtype, seed: int) -> None:
    compared(make_step(seed, dim=dim, group=group, dtype=dtype, longest=3000), "auto")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_a_captured_step_gives_the_same_bits(seed: int) -> None:
    step = make_step(seed, dim=128, group=4, dtype=HALF, longest=2000)
    step("auto")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recalled, got = step("auto")
    for _ in range(3):
        step.rows.q.normal_()
        step.weights.normal_()
        step.rows.pos.sub_(1).clamp_(min=0)
        graph.replay()
        torch.cuda.synchronize()
        chosen, want = step("auto")
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
        assert recalled is None or (chosen is not None and torch.equal(recalled.index, chosen.index))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("recall", ["summary", "bounds"])
def test_a_thousand_replays_give_the_same_bits(recall: str) -> None:
    """Kernels that start before the one ahead of them has ended read nothing that it still writes."""
    seed = next(n for n in range(1000) if (c := make_step(n).config).recall == recall and c.tiers == (1, 2, 3))
    step = make_step(seed, dim=128, group=4, dtype=HALF, longest=3000)
    step("auto")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, got = step("auto")
    graph.replay()
    out, lse = got.out.clone(), got.lse.clone()
    different = torch.zeros(2, dtype=torch.int64, device=PLACE)
    for _ in range(1000):
        got.out.fill_(torch.nan)
        graph.replay()
        different += torch.stack(((got.out != out).any(), (got.lse != lse).any()))
    assert different.tolist() == [0, 0] and bool(out.isfinite().all())
