"""The measurements by name: shapes, what is read, who competes, and what must be reached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from longreach.errors import UnknownName

K = 1024
TOP_K = "top-k"


@dataclass(frozen=True)
class Shape:
    """Letters as in ops/README.md; context: filled slots of a sequence, the last rows' own included."""

    batch: int
    context: int
    rows: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Reads:
    """What a row attends to: all, sinks and a recent window, or a drawn share of all keys."""

    kind: Literal["dense", "window", "list"] = "dense"
    sinks: int = 0
    window: int = 0
    share: float = 1.0

    def keys(self, context: int) -> int:
        """Keys a row at the last position attends to."""
        if self.kind == "window":
            return min(context, self.sinks + self.window)
        return context if self.kind == "dense" else int(self.share * context)


@dataclass(frozen=True)
class Memory:
    """How keys and values lie: page None is contiguous; heads first [P, G, page, D] or tokens first [P, page, G, D]."""

    page: int | None = None
    order: Literal["heads", "tokens"] = "heads"

    @property
    def label(self) -> str:
        where = "contiguous" if self.page is None else f"page {self.page}"
        return where if self.order == "heads" else f"{where}, tokens first"


@dataclass(frozen=True)
class Target:
    """What a case must reach. of: the entry of ours it is about; over: the entry, or whose entries, it is compared to.

    "speed over baseline" is over the faster of FlashInfer and FlashAttention-3, "speed over fastest" over the fastest
    of them and torch's kernels, "speed over" over one of ours, or over the best of one of theirs.
    """

    quantity: Literal[
        "speed over baseline", "speed over fastest", "microseconds", "TB/s", "speed over", "time over", "share of limit"
    ]
    bound: float
    of: str = "contiguous"
    over: str | None = None

    @property
    def least(self) -> bool:
        """Whether the bound is a lower one."""
        return self.quantity not in ("microseconds", "time over")


@dataclass(frozen=True)
class Model:
    """A Llama's sizes beside its heads: of Llama-3.1-8B by default."""

    layers: int = 32
    hidden: int = 4096
    feed_forward: int = 14336
    vocabulary: int = 128256


@dataclass(frozen=True)
class Stack:
    """A decode method in all layers of a model, one captured sequence: some layers choose keys, the others use them.

    options: of the method, as JSON has them. anchors: the layers that choose (Kascade's for Llama-3.1-8B).
    """

    method: str = "kascade"
    options: tuple[tuple[str, Any], ...] = ()
    anchors: tuple[int, ...] = (0, 2, 8, 13, 14)
    layers: int = 32

    @property
    def share(self) -> float:
        """Of the keys that most layers read."""
        return dict(self.options).get("k", 0.1)


@dataclass(frozen=True)
class Case:
    """One measurement of attend, of top_k, of a method's layers, or of a model's decode step.

    also_rows: measured beside shape.rows in the same run. impls: attend's implementations that are measured.
    replays: at most so many, where a call takes long.
    """

    name: str
    group: str
    shape: Shape
    reads: Reads = Reads()
    memories: tuple[Memory, ...] = (Memory(),)
    baselines: tuple[str, ...] = ()
    also_rows: tuple[int, ...] = ()
    targets: tuple[Target, ...] = ()
    model: Model | None = None
    stack: Stack | None = None
    impls: tuple[str, ...] = ("triton",)
    replays: int | None = None

    @property
    def prefill(self) -> bool:
        """Whether its rows are a prompt's, whose positions the host knows."""
        return self.group == "prefill"

    @property
    def measured(self) -> tuple[str, ...]:
        """What of the library it measures, as `records.kernels.SOURCES` names it."""
        if self.stack and self.model:
            return ("attend", "choosing", self.stack.method, "decode_step")
        if self.stack:
            return ("attend", "choosing", self.stack.method)
        if self.group == TOP_K:
            return ("choosing",)
        return ("attend", "decode_step") if self.model else ("attend", "attend_sdpa") if self.prefill else ("attend",)

    def by(self, impl: str) -> Case:
        """The case measured by another implementation than it says, under a name of its own and without targets."""
        return replace(self, name=f"{self.name} impl={impl}", impls=(impl,), targets=())

    def but(self, **shape: Any) -> Case:
        """The case with another shape and a name that says so. Its targets stay behind: they were set for the other."""
        old = vars(self.shape)
        changed = {key: value for key, value in shape.items() if value not in (None, old[key])}
        if not changed:
            return self
        name = " ".join([self.name, *(f"{key}={value}" for key, value in changed.items())])
        return replace(self, name=name, shape=replace(self.shape, **changed), targets=())


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
    impls: tuple[str, ...] = ("sdpa_cudnn", "sdpa_flash", "triton")
    if before:  # torch's cuDNN kernel aligns the causal triangle with the first key
        name, impls = f"prefill-{rows}-after-{_label(before)}", ("sdpa_flash", "triton")
    return Case(
        name, "prefill", Shape(1, before + rows, rows), baselines=(*RIVALS, "torch_sdpa"), impls=impls, replays=replays
    )


def _model(context: int, least: float) -> Case:
    return Case(
        f"8b-{_label(context)}-b1", "decode-8b", Shape(1, context), baselines=("transformers_static",), model=Model(),
        targets=(Target("share of limit", least, "captured step"),),
    )  # fmt: skip


def _sparse_model(batch: int) -> Case:
    name = f"8b-kascade-128k-b{batch}"
    return Case(name, "decode-8b-sparse", Shape(batch, 128 * K), stack=Stack(), model=Model())


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


def _kascade_table(context: int, percent: int, least: float) -> Case:
    """A cell of Kascade's Table 3: batch 64, the paper's speedup over FlashAttention-3."""
    target = Target("speed over", least, "kascade", "flash_attention_3")
    stack = Stack(options=(("k", percent / 100),))
    name = f"kascade-{_label(context)}-{percent}pct-b64"
    shape = Shape(64, context)
    return Case(name, "kascade-table", shape, baselines=("flash_attention_3",), stack=stack, targets=(target,))


TABLE_3 = {  # context in K -> speedup over FlashAttention-3 at 10, 20 and 30 percent (Kascade, Table 3, decode)
    8: (2.91, 2.27, 1.85),
    16: (3.40, 2.50, 1.98),
    32: (3.97, 2.76, 2.13),
    64: (4.08, 2.87, 2.21),
    128: (4.12, 2.92, 2.17),
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
        *(
            _kascade_table(context * K, percent, least)
            for context, cells in TABLE_3.items()
            for percent, least in zip((10, 20, 30), cells, strict=True)
        ),
        _model(8 * K, 0.65),
        _model(32 * K, 0.65),
        _model(128 * K, 0.78),
        *(_sparse_model(batch) for batch in (1, 4)),
    )
}
GROUPS = tuple(dict.fromkeys(case.group for case in CASES.values()))


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
    stack = case.stack and replace(case.stack, anchors=(0, 2), layers=4)
    model = case.model and Model(4 if stack else 2, 64, 96, 264)
    return replace(cut, name=case.name, reads=small, impls=("reference",), model=model, stack=stack)
