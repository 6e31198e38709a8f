"""Cases of MKA: training of attention and of a decoder layer, scan, and decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from longreach.bench.case import Case, Model, Shape, Target, Trained

K = 1024
ATTENTION, LAYER, SCAN, DECODE, MODEL = "mka-attention", "mka-layer", "mka-scan", "mka-decode", "mka-model"
BLOCK, DENSE = "block_mka", "gqa"
SPOTS = {
    ATTENTION: ("mka-attention-16k",),
    LAYER: ("mka-layer-4k",),
    SCAN: ("mka-scan-128k",),
    DECODE: ("mka-decode-128k-b1",),
    MODEL: ("mka-8b-32k-b1",),
}
EXACT = "torch_sdpa"
Recall = Literal["summary", "bounds"]


def cases() -> tuple[Case, ...]:
    attention = {4: None, 8: None, 16: 1.4, 32: 2.5, 64: 4.5, 128: 7.0}
    layer = {4: None, 32: 1.25, 64: 1.6, 128: 2.2}
    decode = {1: 4.5, 8: 15.0, 32: 20.0}
    return (
        *(_attention(context * K, least) for context, least in attention.items()),
        *(_attention(context * K, attention[context], "bounds") for context in (32, 128)),
        *(_layer(context * K, least) for context, least in layer.items()),
        *(_layer(context * K, layer[context], "bounds") for context in (32, 128)),
        Case(
            "mka-scan-128k", SCAN, Shape(1, 128 * K, 128 * K), trained=Trained("scan"),
            targets=(Target("microseconds", 400.0, "forward"), Target("microseconds", 800.0, "backward")),
        ),
        *(_decode(batch, least) for batch, least in decode.items()),
        *(_decode(batch, least, "bounds") for batch, least in decode.items()),
        Case(
            "mka-8b-32k-b1", MODEL, Shape(1, 32 * K), model=Model(), trained=Trained("model", (DENSE, "fastmka")),
            targets=(Target("speed over", 0.97, "fastmka", DENSE),),
        ),
    )  # fmt: skip


def tiny(trained: Trained) -> Trained:
    """Blocks and a window that a few hundred tokens hold several times."""
    return replace(trained, block=16, window=32, blocks=3)


def _attention(context: int, least: float | None, recall: Recall = "summary") -> Case:
    targets = () if least is None else (Target("speed over", least, BLOCK, EXACT),)
    return Case(
        f"mka-attention-{context // K}k{_end(recall)}", ATTENTION, Shape(1, context, context), targets=targets,
        replays=7, trained=Trained("attention", (BLOCK,), recall=recall),
    )  # fmt: skip


def _layer(context: int, least: float | None, recall: Recall = "summary") -> Case:
    kinds: tuple[str, ...] = (DENSE, BLOCK) if recall == "bounds" else (DENSE, "fastmka", BLOCK)
    if context <= 32 * K and recall == "summary":
        kinds = (*kinds, "mla", "mka softmaxes", "mka gated")
    targets = [Target("speed over", 0.93, "fastmka", DENSE)] if context != 64 * K and "fastmka" in kinds else []
    if least is not None:
        targets += [Target("speed over", least, BLOCK, DENSE), Target("peak memory over", 1.3, BLOCK, DENSE)]
    return Case(
        f"mka-layer-{context // K}k{_end(recall)}", LAYER, Shape(1, context, context), targets=tuple(targets),
        replays=5, trained=Trained("layer", kinds, recall=recall),
    )  # fmt: skip


def _decode(batch: int, least: float, recall: Recall = "summary") -> Case:
    targets = [Target("speed over fastest", least, BLOCK), Target("% of dense", 2.6, BLOCK)]
    return Case(
        f"mka-decode-128k-b{batch}{_end(recall)}", DECODE, Shape(batch, 128 * K), targets=tuple(targets),
        baselines=("flashinfer", "flash_attention_3", EXACT), trained=Trained("decode", (BLOCK,), recall=recall),
    )  # fmt: skip


def _end(recall: Recall) -> str:
    return "" if recall == "summary" else f"-{recall}"


WIDTH, FEED_FORWARD = Model.hidden, Model.feed_forward  # of a decoder layer
