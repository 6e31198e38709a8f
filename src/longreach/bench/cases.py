"""The measurements by name."""

from __future__ import annotations

from dataclasses import replace

from longreach.bench.case import (
    EVICT,
    FIRST_TOKEN,
    FUSION,
    HOST,
    KASCADE_PREFILL,
    STEPS,
    TOP_K,
    USER,
    Case,
    Hits,
    Memory,
    Model,
    Reads,
    Reuse,
    Shape,
    Stack,
    Target,
)
from longreach.bench.host import cases as host
from longreach.bench.mac import cases as mac
from longreach.bench.magicpig import cases as magicpig
from longreach.bench.mka import cases as mka
from longreach.errors import UnknownName

K = 1024
PAGED = tuple(Memory(page) for page in (16, 64, 256))
EVERYWHERE = (Memory(), *PAGED)
RIVALS = ("flashinfer", "flash_attention_3")


def _label(context: int) -> str:
    return f"{context // K}k"


def _dense(batch: int, context: int, least: float) -> Case:
    return Case(
        f"dense-{_label(context)}-b{batch}", "dense-decode", Shape(batch, context), memories=EVERYWHERE,
        baselines=(*RIVALS, "torch_sdpa"), targets=(Target("speed over baseline", least),),
    )  # fmt: skip


def _span(batch: int, keys: int, sinks: int, most: float) -> Case:
    kind = "sinks" if sinks else "plain"
    return Case(
        f"span-{keys}-{kind}-b{batch}", "span-decode", Shape(batch, 128 * K), Reads("window", sinks, keys - sinks),
        EVERYWHERE, targets=(Target("microseconds", most),),
    )  # fmt: skip


def _list(batch: int, rate: float) -> Case:
    paged = tuple(Target("speed over", 0.93, f"page {page}", "contiguous") for page in (16, 64))
    return Case(
        f"list-10pct-128k-b{batch}", "list-decode", Shape(batch, 128 * K), Reads("list", share=0.1),
        EVERYWHERE[:3], targets=(Target("TB/s", rate), *paged),
    )  # fmt: skip


def _verify(batch: int) -> Case:
    return Case(
        f"rows-8-128k-b{batch}", "rows-decode", Shape(batch, 128 * K, rows=8), also_rows=(1,),
        baselines=("flash_attention_3",), targets=(Target("time over", 1.15, over="1 row"),),
    )  # fmt: skip


def _prefill(rows: int, before: int = 0, replays: int | None = None) -> Case:
    name = f"prefill-{_label(rows)}"
    targets: tuple[Target, ...] = ()
    if before:
        name = f"prefill-{rows}-after-{_label(before)}"
        targets = (Target("speed over", 0.85, "sdpa_cudnn", "flash_attention_3"),)
    return Case(
        name,
        "prefill",
        Shape(1, before + rows, rows),
        baselines=("flash_attention_3", "torch_sdpa"),
        targets=targets,
        impls=("sdpa_cudnn", "sdpa_flash", "triton"),
        replays=replays,
    )


def _model(context: int, least: float) -> Case:
    return Case(
        f"8b-{_label(context)}-b1", "decode-8b", Shape(1, context), baselines=("transformers_static",), model=Model(),
        targets=(Target("share of limit", least, "captured step"),),
    )  # fmt: skip


def _sparse_model(batch: int) -> Case:
    name = f"8b-kascade-128k-b{batch}"
    least = 2.8 if batch == 1 else 4.0
    target = Target("attention speed over", least, "kascade: captured step", "captured step")
    return Case(name, "decode-8b-sparse", Shape(batch, 128 * K), stack=Stack(), model=Model(), targets=(target,))


FUSIONS = ("full_reuse", "pie", "legolink", "cacheblend", "a3", "a3_deep", "dependence")
CHOOSING = ("cacheblend", "a3", "a3_deep", "dependence")
METHODS = ("dense", "streaming_llm", "less_is_more", "omnikv", "quest", "loki", "kascade", "mac")
EARLY = ("streaming_llm", "less_is_more")  # not slower than dense attention at 8K either
AT_128K = {"streaming_llm": 0.75, "quest": 0.85, "loki": 0.95}


def _steps(batch: int, context: int) -> Case:
    """Every method's captured step over dense attention's."""
    judged = METHODS[1:] if context >= 32 * K else EARLY
    most = AT_128K if context == 128 * K else {}
    targets = tuple(Target("time over", most.get(name, 1.0), name, "dense") for name in judged)
    return Case(
        f"steps-{_label(context)}-b{batch}", STEPS, Shape(batch, context), stack=Stack(),
        reuse=Reuse((Hits("gap 350"),)), model=Model(), methods=METHODS, targets=targets,
    )  # fmt: skip


def _user(batch: int, context: int, methods: tuple[str, ...] = ("dense",)) -> Case:
    """Users' measures: TTFT, TPOT, peak memory."""
    name = f"user-{_label(context)}-b{batch}{'' if methods == ('dense',) else '-methods'}"
    targets = () if methods != ("dense",) else tuple(
        Target("peak memory over", 1.03, ours, "transformers generate")
        for ours in ("longreach.generate", "attach + model.generate")
    )  # fmt: skip
    if targets and context <= 32 * K:
        targets = (*targets, Target("time over", 1.05, "attach + model.generate, captured", "longreach.generate"))
    if targets and (batch, context) == (1, 8 * K):  # where the host, which launches attention, is what is waited for
        targets = (*targets, Target("time over", 1.35, "longreach.generate, piecewise", "longreach.generate"))
    return Case(
        name, USER, Shape(batch, context), stack=Stack(), reuse=Reuse((Hits("gap 350"),)), model=Model(),
        methods=methods, targets=targets, prefill_chunk=8 * K if batch * context > 256 * K else None,
    )  # fmt: skip


def _top_k(batch: int, most: float) -> Case:
    shape = Shape(batch, 128 * K, dtype="float32")
    reads = Reads("list", share=0.1)
    target = Target("microseconds", most, "top_k")
    name = f"top-k-128k-{shape.batch * shape.kv_heads}"
    return Case(name, TOP_K, shape, reads, targets=(target,))


def _kascade(batch: int, context: int, least: float) -> Case:
    name, targets = f"kascade-{_label(context)}-b{batch}", (Target("speed over fastest", least, "kascade"),)
    rivals = (*RIVALS, "torch_sdpa")
    return Case(name, "kascade-decode", Shape(batch, context), baselines=rivals, stack=Stack(), targets=targets)


def _kascade_int8(batch: int, context: int, least: float | None = None) -> Case:
    """Anchors scored with 8-bit copies of their keys."""
    targets = () if least is None else (
        Target("speed over fastest", least, "kascade"),
        Target("mass of chosen keys", 0.995, "kascade"),
    )  # fmt: skip
    case, stack = _kascade(batch, context, 0.0), Stack(options=(("scoring", "int8"),))
    return replace(case, name=f"kascade-int8-{_label(context)}-b{batch}", stack=stack, targets=targets)


def _kascade_prefill(context: int, percent: int, every: int = 1, least: float | None = None) -> Case:
    """A prompt in a model's layers. every: n, where log-sums are estimated from each n-th key."""
    options: tuple[tuple[str, object], ...] = (("k", percent / 100),)
    name = f"{_label(context)}-{percent}pct"
    targets = [] if least is None else [Target("speed over", least, "kascade", "flash_attention_3")]
    captured = context <= 256 * K
    if every > 1:
        options, name = (*options, ("lse_every", every)), f"sampled-{name}"
        targets.append(Target("mass of chosen keys", 0.98, "kascade"))
    return Case(
        f"kascade-prefill-{name}", KASCADE_PREFILL, Shape(1, context, context),
        baselines=("flash_attention_3", "flashinfer", "torch_sdpa"), stack=Stack(options=options, captured=captured),
        targets=tuple(targets), replays=2 if context > 128 * K else 3 if context >= 64 * K else 7, impls=("auto",),
    )  # fmt: skip


def _first_token(context: int, least: float, replays: int) -> Case:
    """A prompt of a whole model, dense and by Kascade."""
    targets = Target("speed over", least, "kascade", "dense"), Target("peak memory over", 1.05, "kascade", "dense")
    return Case(f"first-token-{_label(context)}", FIRST_TOKEN, Shape(1, context), stack=Stack(), model=Model(),
                targets=targets, replays=replays)  # fmt: skip


def _fusion(context: int, ratios: tuple[float, ...] = (0.05, 0.15), methods: tuple[str, ...] = FUSIONS) -> Case:
    """Time to the first token of a prompt of stored chunks, over an exact prefill of the same tokens."""
    least = {"a3 0.15": 3.5, "cacheblend 0.15": 3.5, "a3_deep 0.15": 3.5, "dependence 0.15": 4.0,
             "dependence 0.05": 7.0, "pie": 7.0} if context >= 16 * K else {}  # fmt: skip
    most = methods if context == 6 * K else ()
    choosing = (Target("ms of choosing", 0.1, f"{name} {ratios[0]:g}") for name in most)
    return Case(
        f"fusion-{_label(context)}", FUSION, Shape(1, context), model=Model(), methods=methods, ratios=ratios,
        targets=(*(Target("speed over prefill", bound, name) for name, bound in least.items()), *choosing),
    )  # fmt: skip


def _evict(batch: int) -> Case:
    """Decoding after 7K tokens, with all keys and with 1,024 of them."""
    ours = "longreach.generate, snapkv"
    faster = (Target("speed over", 1.4, ours, "longreach.generate"),) if batch == 16 else ()
    targets = (Target("% of KV held", 20.0, ours), *faster)
    shape, chunk = Shape(batch, 7 * K), K if batch > 16 else None
    return Case(f"evict-7k-b{batch}", EVICT, shape, model=Model(), targets=targets, prefill_chunk=chunk)


def _kascade_table(context: int, percent: int, least: float) -> Case:
    """A cell of Kascade's Table 3: batch 64, the paper's speedup over FlashAttention-3."""
    target = Target("speed over", least, "kascade", "flash_attention_3")
    stack = Stack(options=(("k", percent / 100),))
    name = f"kascade-{_label(context)}-{percent}pct-b64"
    shape = Shape(64, context)
    return Case(name, "kascade-table", shape, baselines=("flash_attention_3",), stack=stack, targets=(target,))


QWEN3 = Stack(anchors=(0, 2, 7, 14, 23), layers=36)  # Kascade's anchors for Qwen3-8B, which has as many heads
TABLE_3 = {  # context in K -> speedup over FlashAttention-3 at 10, 20 and 30 percent (Kascade, Table 3, decode)
    8: (2.91, 2.27, 1.85),
    16: (3.40, 2.50, 1.98),
    32: (3.97, 2.76, 2.13),
    64: (4.08, 2.87, 2.21),
    128: (4.12, 2.92, 2.17),
}
TABLE_3_PREFILL = {  # the same for prefill, batch 1; 2.3 instead of 2.19
    8: (1.23, 1.04, 0.88),
    16: (1.59, 1.26, 1.01),
    32: (1.91, 1.42, 1.15),
    64: (2.18, 1.62, 1.29),
    128: (2.3, 1.58, 1.25),
    256: (2.12,),
}
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _dense(1, 128 * K, 1.0),
        _dense(8, 128 * K, 1.0),
        _dense(32, 128 * K, 1.0),
        _dense(64, 8 * K, 0.97),
        _dense(1, 32 * K, 0.95),
        _span(1, 1280, 4, 8.5),
        _span(1, 1280, 0, 8.5),
        _span(32, 1536, 4, 58.0),
        _span(32, 1536, 0, 58.0),
        _list(1, 2.3),
        _list(8, 4.0),
        _list(32, 4.2),
        _verify(1),
        _verify(8),
        _prefill(8 * K),
        _prefill(32 * K),
        _prefill(128 * K, replays=5),
        *(_prefill(rows, before) for before in (8 * K, 32 * K) for rows in (512, 2048)),
        _top_k(32, 100.0),
        _top_k(1, 25.0),
        _kascade(32, 128 * K, 4.7),
        _kascade(64, 8 * K, 3.8),
        _kascade(1, 128 * K, 2.8),
        _kascade(1, 256 * K, 4.08),
        _kascade(1, 512 * K, 4.10),
        replace(_kascade(1, 128 * K, 2.8), name="kascade-qwen3-128k-b1", stack=QWEN3),
        _kascade_int8(32, 128 * K, 5.4),
        _kascade_int8(64, 8 * K),
        _kascade_int8(1, 128 * K),
        *(
            _kascade_table(context * K, percent, least)
            for context, cells in TABLE_3.items()
            for percent, least in zip((10, 20, 30), cells, strict=True)
        ),
        *(_kascade_prefill(context * K, 10) for context in (2, 4)),
        *(
            _kascade_prefill(context * K, percent, least=least)
            for context, cells in TABLE_3_PREFILL.items()
            for percent, least in zip((10, 20, 30), cells, strict=False)
        ),
        _kascade_prefill(512 * K, 10),
        *(_kascade_prefill(context * K, 10, every=16, least=3.0 if context == 128 else None) for context in (32, 128)),
        _model(8 * K, 0.65),
        _model(32 * K, 0.65),
        _model(128 * K, 0.78),
        *(_sparse_model(batch) for batch in (1, 4)),
        *mac.cases(),
        *magicpig.cases(),
        *(_steps(batch, context * K) for context in (8, 32, 128) for batch in (1, 4)),
        *(_user(batch, context * K) for context in (8, 32, 128) for batch in (1, 4)),
        _user(1, 32 * K, METHODS),
        _first_token(32 * K, 1.15, 5),
        _first_token(128 * K, 1.8, 2),
        _fusion(4 * K),
        _fusion(6 * K, (0.15,), CHOOSING),
        _fusion(8 * K),
        _fusion(16 * K, (0.0, 0.05, 0.15, 0.3, 1.0)),
        _fusion(32 * K),
        *(_evict(batch) for batch in (1, 4, 16, 64)),
        *host.cases(),
        *mka.cases(),
    )
}
GROUPS = tuple(dict.fromkeys(case.group for case in CASES.values()))
# group -> the cases by which it is confirmed: small ones that together launch the kernels of all its cases
SPOTS: dict[str, tuple[str, ...]] = {
    "dense-decode": ("dense-32k-b1",),
    "span-decode": ("span-1280-sinks-b1",),
    "list-decode": ("list-10pct-128k-b1",),
    "rows-decode": ("rows-8-128k-b1",),
    "prefill": ("prefill-8k",),
    "top-k": ("top-k-128k-8",),
    "kascade-decode": ("kascade-128k-b1", "kascade-int8-128k-b1"),
    "kascade-table": ("kascade-8k-10pct-b64",),
    KASCADE_PREFILL: ("kascade-prefill-8k-10pct",),
    "decode-8b": ("8b-8k-b1",),
    "decode-8b-sparse": ("8b-kascade-128k-b1",),
    "mac-hit": ("mac-hit-128k-b1",),
    "mac-share": ("mac-share-32k-b32",),
    "mac-table": ("mac-table-32k-b1",),
    "mac-rates": ("mac-rates-32k-b1",),
    "mac-miss": ("mac-miss-128k-b1",),
    "decode-8b-mac": ("8b-mac-128k-b1",),
    magicpig.GROUP: ("magicpig-128k-b1",),
    STEPS: ("steps-8k-b1",),
    USER: ("user-8k-b1",),
    FIRST_TOKEN: ("first-token-32k",),
    FUSION: ("fusion-4k",),
    EVICT: ("evict-7k-b1",),
    HOST: ("host-96k-b1",),
    **mka.SPOTS,
}


def choose(names: list[str]) -> list[Case]:
    """Cases by their own or their group's name, in the order of CASES; all for no name. Raises UnknownName."""
    for name in names:
        if name not in CASES and name not in GROUPS:
            raise UnknownName("case or group", name, (*GROUPS, *CASES))
    return [case for case in CASES.values() if not names or case.name in names or case.group in names]


def tiny(case: Case) -> Case:
    """The case at a size that a CPU computes at once; it measures nothing."""
    shape = case.shape
    small = Reads(case.reads.kind, case.reads.sinks, case.reads.window and 60, case.reads.share)
    rows = 256 if shape.rows == shape.context else min(2, shape.rows)
    cut = case.but(batch=min(2, shape.batch), context=256, rows=rows, heads=4, kv_heads=2, dim=16,
                   dtype="float32")  # fmt: skip
    layers = host.TINY_LAYERS if case.host else 4 if case.stack else 2
    stack = case.stack and replace(case.stack, anchors=(0, 2), layers=layers)
    model = case.model and Model(layers, 64, 96, 264)
    reuse = case.reuse and replace(mac.tiny(case.reuse), window=128 if model else 64)  # a model's steps fit the ring
    return replace(
        cut,
        name=case.name,
        reads=small,
        prefill_chunk=case.prefill_chunk and 64,
        generated=case.generated and 24,
        impls=("reference",),
        model=model,
        stack=stack,
        reuse=reuse,
        sampling=case.sampling and magicpig.tiny(case.sampling),
        host=case.host and host.tiny(case.host),
        trained=case.trained and mka.tiny(case.trained),
    )
