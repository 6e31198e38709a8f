"""Cases of a model's decode step whose keys and values lie in host memory, and of a long answer."""

from __future__ import annotations

from dataclasses import replace

from longreach.bench.case import HOST, Case, HostMemory, Model, Preset, Sampling, Shape, Stack, Target
from longreach.bench.magicpig.cases import PRESETS

K = 1024
DENSE, MAGICPIG = "dense", "magicpig"
TINY_LAYERS = 6  # enough for layers in both kinds of memory
BATCHES = (2, 4, 8, 10)  # 10 sequences take 112.6 GiB of host memory, 11 would take 123.9: near all of 128
# of the paper's Table 6, whose column "TBT (ms)" holds tokens a second of one sequence
TABLE_6 = tuple(Preset(*pair, "own") for pair in ((10, 150), (11, 300), (10, 170), (10, 220), (9, 120), (8, 75)))


def cases() -> tuple[Case, ...]:
    most, least = 16_000.0, 12.0  # microseconds of a step, and speed over dense attention
    group, own = (entry_name(MAGICPIG, preset) for preset in PRESETS)
    fast = [Target("microseconds", most, name) for name in (group, own)]
    faster = [Target("speed over", least, name, DENSE) for name in (group, own)]
    small, large = HostMemory(4 << 30), HostMemory(48 << 30)
    answer = _case("tokens-4k-at-128k", 128 * K, None, (MAGICPIG,), PRESETS[:1],
                   (Target("slowest step over median", 1.3, group),))  # fmt: skip
    return (
        _case("host-96k-b1", 96 * K, small, (DENSE, MAGICPIG, "kascade", "quest"), PRESETS, (*fast, *faster)),
        _case("host-96k-batches", 96 * K, replace(small, batches=BATCHES), (DENSE, MAGICPIG), PRESETS,
              tuple(Target("best tokens/s", 120.0, name) for name in (group, own))),
        _case("host-96k-table-6", 96 * K, small, (MAGICPIG,), TABLE_6, ()),
        _case("host-prompt-96k", 96 * K, replace(small, prompt=True), (MAGICPIG,), PRESETS[:1], ()),
        _case("host-1m-b1", K * K, large, (MAGICPIG,), PRESETS[:1], ()),
        replace(answer, generated=4096),
    )  # fmt: skip


def entry_name(method: str, preset: Preset | None, batch: int | None = None, way: str = "link") -> str:
    """Name of a record's entry.

    preset: MagicPIG's, else None. batch: None if the case has only one. way: who attends.
    """
    name = method if preset is None else f"{method} {preset.name}"
    name = name if way == "link" else f"{name} on the CPU"
    return name if batch is None else f"{name}, batch {batch}"


def tiny(host: HostMemory) -> HostMemory:
    """A limit that the staging of one sequence already exceeds, and a second batch where there was one."""
    return replace(host, device_bytes=1 << 16, batches=host.batches[:1])


def _case(
    name: str, context: int, host: HostMemory | None, methods: tuple[str, ...], presets: tuple[Preset, ...],
    targets: tuple[Target, ...],
) -> Case:  # fmt: skip
    return Case(
        name, HOST, Shape(1, context), stack=Stack(), sampling=Sampling(presets), model=Model(), host=host,
        methods=methods, targets=targets,
    )  # fmt: skip
