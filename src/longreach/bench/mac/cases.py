"""MAC's cases: those of the paper (Figure 6, Table 5, Figure 7), hit rates, and one long miss among hits."""

from __future__ import annotations

from dataclasses import replace

from longreach.bench.case import Case, Hits, Model, Reuse, Shape, Target

K = 1024
GAPS = (350, 64, 1024)
RATES = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 0.99, 1.0)
RIVALS = ("flashinfer", "flash_attention_3", "torch_sdpa")
FIGURE_6 = {32: 13.5, 64: 21.0, 128: 34.0, 256: 46.0}  # context in K -> speedup at batch 32, 99% skipped, 512 rows
SHARES = (1, 5, 10, 20)
TABLE_5 = {  # context in K -> us of full attention, and of MAC's whole attention path at each of SHARES
    32: (71.6, (63.9, 63.2, 62.8, 65.9)),
    60: (133.0, (62.5, 63.9, 65.8, 80.5)),
    120: (234.2, (63.6, 64.7, 78.8, 104.5)),
}


def cases() -> tuple[Case, ...]:
    return (
        *(_hit(batch, least) for batch, least in ((1, 8.0), (8, 22.0), (32, 30.0))),
        *(_share(context, least) for context, least in FIGURE_6.items()),
        *(_table(context) for context in TABLE_5),
        *(_rates(batch, context) for context in (32, 128) for batch in (1, 8, 32)),
        *(_miss(batch) for batch in (1, 32)),
        *(_model(batch, least) for batch, least in ((1, 1.6), (4, 3.2), (None, None))),
    )


def _hit(batch: int, least: float) -> Case:
    hits = tuple(Hits(f"gap {gap}", gap) for gap in GAPS)
    targets = Target("speed over fastest", least, "gap 350"), Target("% of KV", 4.8, "gap 350")
    shape = Shape(batch, 128 * K)
    return Case(
        f"mac-hit-128k-b{batch}", "mac-hit", shape, baselines=RIVALS, reuse=Reuse(hits),
        targets=targets if batch == 1 else targets[:1],
    )  # fmt: skip


def _read(percent: int) -> Hits:
    return Hits(f"{percent}% read", share=percent / 100)


def _share(context: int, least: float) -> Case:
    hits, targets = _read(1), (Target("speed over fastest", least, "1% read"),)
    shape, name = Shape(32, context * K), f"mac-share-{context}k-b32"
    return Case(name, "mac-share", shape, baselines=RIVALS, reuse=Reuse((hits,), window=512), targets=targets)


def _table(context: int) -> Case:
    full, paths = TABLE_5[context]
    hits = tuple(_read(percent) for percent in SHARES)
    least = (full / path for path in paths)
    targets = tuple(Target("speed over fastest", x, h.name) for x, h in zip(least, hits, strict=True))
    shape, name = Shape(1, context * K), f"mac-table-{context}k-b1"
    return Case(name, "mac-table", shape, baselines=RIVALS, reuse=Reuse(hits), targets=targets)


def _rates(batch: int, context: int) -> Case:
    def hits(guard: bool) -> tuple[Hits, ...]:
        return tuple(Hits(f"rate {rate:g}{', guard' if guard else ''}", rate=rate, guard=guard) for rate in RATES)

    shape, name = Shape(batch, context * K), f"mac-rates-{context}k-b{batch}"
    targets = (Target("speed over", 0.95, "rate 0, guard", "dense"),)
    return Case(name, "mac-rates", shape, baselines=RIVALS, reuse=Reuse((*hits(True), *hits(False))), targets=targets)


def _miss(batch: int) -> Case:
    hits, targets = list[Hits](), list[Target]()
    of_one = Hits("one miss", misses="one")
    of_each = Hits("a miss in each", misses="each")
    for miss in (of_one,) if batch == 1 else (of_one, of_each):
        even = replace(miss, name=f"{miss.name}, spread", spread=True)
        both = [replace(h, name=f"{h.name}: attention", part="attention") for h in (miss, even)]
        hits += [*both, miss, even]
        targets.append(Target("time over", 1.25, both[0].name, both[1].name))
    shape, name = Shape(batch, 128 * K), f"mac-miss-128k-b{batch}"
    return Case(name, "mac-miss", shape, reuse=Reuse(tuple(hits)), targets=tuple(targets))


def _model(batch: int | None, least: float | None) -> Case:
    """batch: None for as many as fit."""
    targets = () if least is None else (Target("speed over", least, "mac: captured step", "captured step"),)
    name = f"8b-mac-128k-{'most' if batch is None else f'b{batch}'}"
    return Case(
        name, "decode-8b-mac", Shape(batch or 1, 128 * K), reuse=Reuse((Hits("gap 350"),)), model=Model(),
        fill=batch is None, targets=targets,
    )  # fmt: skip


def tiny(reuse: Reuse) -> Reuse:
    """Hits that fit a context of 256 tokens."""
    hits = (replace(h, gap=min(h.gap, 20), band=16, share=h.share and max(h.share, 0.1)) for h in reuse.hits)
    return Reuse(tuple(hits), window=64)
