"""MagicPIG's cases: a preset of the paper's kind for the fewest reads, and one of the paper's."""

from __future__ import annotations

from longreach.bench.case import Case, Preset, Sampling, Shape, Target

K = 1024
GROUP = "magicpig-decode"
RIVALS = ("flashinfer", "flash_attention_3", "torch_sdpa")
PRESETS = (Preset(10, 75, "group"), Preset(10, 150, "own"))
AT_128K = {1: (4.0, 3.0), 32: (12.0, 6.0)}  # batch -> speed over the fastest kernel that each of PRESETS must reach
READ = 4.0  # % of dense attention's bytes that the first of PRESETS may read at 128K
SIZES = ((1, 128), (32, 128), (8, 32), (64, 8), (1, 256))  # batch, and thousands of keys
# alone, to find the length from which a step is faster than dense attention
ALONE = tuple((1, context) for context in (8, 16, 32, 64))


def cases() -> tuple[Case, ...]:
    return tuple(_case(batch, context) for batch, context in (*SIZES, *ALONE))


def _case(batch: int, context: int) -> Case:
    least = AT_128K[batch] if context == 128 else ()
    targets = tuple(Target("speed over fastest", x, p.name) for x, p in zip(least, PRESETS, strict=bool(least)))
    if least:
        targets += (Target("% of dense", READ, PRESETS[0].name),)
    return Case(
        f"magicpig-{context}k-b{batch}", GROUP, Shape(batch, context * K), baselines=RIVALS, sampling=Sampling(PRESETS),
        targets=targets,
    )  # fmt: skip


def tiny(sampling: Sampling) -> Sampling:
    """Presets that sample a few of 256 keys, in two layers."""
    presets = (Preset(5, p.tables // 15, p.share, local=16, seal=16, centre=32) for p in sampling.presets)
    return Sampling(tuple(presets), layers=2)
