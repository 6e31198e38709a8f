"""A measurement's definition: shapes, reads, competitors and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

TOP_K = "top-k"
# a model's step by method; what users get: time to the first token, memory; prompts of stored chunks; evicted prompts;
# a model's step with keys and values in host memory
STEPS, USER, FUSION, EVICT, HOST = "steps", "user", "fusion", "evict", "host"
KASCADE_PREFILL = "kascade-prefill"  # a prompt in all layers of a model
FIRST_TOKEN = "first-token"  # a prompt of a whole model, dense and by Kascade
PREFILLS = "transformers prefill", "dense prefill"  # entries: the model's own prefill, by transformers and by longreach
WITHOUT_ATTENTION = "without attention"  # entry: the step of a model whose attention reads nothing
# quantities that must not exceed their bound
MOST = (
    "microseconds", "time over", "% of KV", "% of KV held", "% of dense", "peak memory over", "ms of choosing",
    "slowest step over median",
)  # fmt: skip


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
    """The keys a row attends to: all, sinks and a recent window, or a drawn share of all keys."""

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
    """Layout of keys and values: page None: contiguous; heads first [P, G, page, D] or tokens first [P, page, G, D]."""

    page: int | None = None
    order: Literal["heads", "tokens"] = "heads"

    @property
    def label(self) -> str:
        where = "contiguous" if self.page is None else f"page {self.page}"
        return where if self.order == "heads" else f"{where}, tokens first"


@dataclass(frozen=True)
class Target:
    """A target of a case. of: the entry of ours; over: the entry to compare with, or the owner of such entries.

    "speed over baseline" is over the faster of FlashInfer and FlashAttention-3, "speed over fastest" over the fastest
    of them and torch's kernels, "speed over" over one of ours, or over the best of one of theirs, "speed over prefill"
    over the faster of PREFILLS. "attention speed over" is of whole steps, of what each takes more than the step of the
    same model WITHOUT_ATTENTION. "% of KV": what a method keeps for a sequence, of the sequence's keys and values;
    "% of KV held": what a cache holds of those of its prompts. "% of dense": bytes that a step reads, of those that
    dense attention reads. "mass of chosen keys": what they weigh, over the keys that
    exact scores choose. "best tokens/s": the most, of all sequences together, of the entries whose names begin with
    `of`. "peak memory over": over that of the entry `over`, in the phase (prefill or decoding) where the
    ratio is larger. "ms of choosing": of the device, tokens of a fused prompt. "slowest step over median": of the steps
    of a long answer.
    """

    quantity: Literal[
        "speed over baseline", "speed over fastest", "microseconds", "TB/s", "speed over", "time over",
        "share of limit", "% of KV", "% of KV held", "% of dense", "mass of chosen keys", "speed over prefill",
        "peak memory over", "ms of choosing", "best tokens/s", "slowest step over median", "attention speed over",
    ]  # fmt: skip
    bound: float
    of: str = "contiguous"
    over: str | None = None

    @property
    def least(self) -> bool:
        """Whether the bound is a lower one."""
        return self.quantity not in MOST


@dataclass(frozen=True)
class Model:
    """A Llama's sizes other than its heads: of Llama-3.1-8B by default."""

    layers: int = 32
    hidden: int = 4096
    feed_forward: int = 14336
    vocabulary: int = 128256


@dataclass(frozen=True)
class Stack:
    """A method in all layers of a model, one captured sequence: some layers choose keys, the others use them.

    options: of the method, as JSON has them. anchors: the layers that choose (Kascade's for Llama-3.1-8B). captured:
    False for a prompt whose layers take too long together: one layer of each kind is timed, and their mean is weighted
    by their number, as in Kascade's Table 3.
    """

    method: str = "kascade"
    options: tuple[tuple[str, Any], ...] = ()
    anchors: tuple[int, ...] = (0, 2, 8, 13, 14)
    layers: int = 32
    captured: bool = True

    @property
    def share(self) -> float:
        """Share of the keys that most layers read."""
        return dict(self.options).get("k", 0.1)


@dataclass(frozen=True)
class Hits:
    """One entry of a case of MAC: which heads find an earlier row, where, and what they then read. All of it is forced.

    gap: positions back to the row found; band: keys before it that are read with all after it. share: a hit reads that
    share of the context instead: by its gap where window and band allow it, else the band is as wide as it takes.
    rate: share of query heads that find their row, drawn independently. misses: one query head of the batch, or of each
    sequence, finds none. spread: all heads find theirs, and read as many keys as all together would with these misses.
    guard: whether the profit guard is on; KV heads then rest as they do in the long run at this rate (at rate 0: all
    of them, as between two searches). part: what is timed, the whole step, or attention (attend_amend) alone.
    """

    name: str
    gap: int = 350
    band: int = 256
    share: float | None = None
    rate: float = 1.0
    misses: Literal["none", "one", "each"] = "none"
    spread: bool = False
    guard: bool = True
    part: Literal["step", "attention"] = "step"

    def missing(self, shape: Shape) -> int:
        """Number of KV heads of the batch with one head forced to miss."""
        return {"none": 0, "one": 1, "each": shape.batch}[self.misses]

    def span(self, shape: Shape, window: int) -> tuple[int, int]:
        """(gap, band): a hit reads gap + band keys."""
        keys = self.gap + self.band
        if self.spread:
            streams, long = shape.batch * shape.kv_heads, self.missing(shape)
            keys = (long * shape.context + (streams - long) * keys) // streams
        elif self.share is not None:
            keys = int(self.share * shape.context)
            if 1 <= keys - self.band <= window:
                return keys - self.band, self.band
        gap = min(self.gap, window, keys - 1)
        return gap, keys - gap

    def streams(self, shape: Shape, window: int) -> int:
        """Keys that all KV heads read, at least: where all heads hit that may."""
        long = 0 if self.spread else self.missing(shape)
        return long * shape.context + (shape.batch * shape.kv_heads - long) * sum(self.span(shape, window))


@dataclass(frozen=True)
class Reuse:
    """MAC, looking through the last `window` rows. hits: each an entry; a model decodes with the first."""

    hits: tuple[Hits, ...]
    window: int = 1024


@dataclass(frozen=True)
class Preset:
    """MagicPIG's options in an entry: signs in a code, tables, how the query heads of a KV head share samples, and when
    keys enter the tables."""

    bits: int
    tables: int
    share: Literal["group", "own"]
    local: int = 64
    seal: int = 256
    centre: int = 1024

    @property
    def name(self) -> str:
        return f"({self.bits},{self.tables}) {self.share}"


@dataclass(frozen=True)
class Sampling:
    """MagicPIG in `layers` layers of one captured pass; each preset is an entry."""

    presets: tuple[Preset, ...]
    layers: int = 32


@dataclass(frozen=True)
class HostMemory:
    """Keys and values in host memory. device_bytes: the most GPU memory for keys, values and staging.

    The limit is raised for a batch whose staging, and the layers that the method reads whole, take more. batches:
    further numbers of sequences, with which dense attention is not measured. ways: who attends, "link" (the GPU reads
    over the link) or "cpu", each an entry; dense attention is measured over the link alone. prompt: a prompt of
    `context` tokens is timed up to its first token instead of a step, with keys and values in host and in GPU memory.
    """

    device_bytes: int
    batches: tuple[int, ...] = ()
    ways: tuple[Literal["link", "cpu"], ...] = ("link", "cpu")
    prompt: bool = False


@dataclass(frozen=True)
class Trained:
    """Attention that is trained (MKA): forward and backward of attention, of a decoder layer or of scan, or decoding.

    kinds: of the layers that are compared, dense attention ("gqa") first. block, window, blocks, recall: of block_mka.
    """

    what: Literal["attention", "layer", "scan", "decode", "model"]
    kinds: tuple[str, ...] = ()
    block: int = 64
    window: int = 512
    blocks: int = 8
    recall: Literal["summary", "bounds"] = "summary"


@dataclass(frozen=True)
class Case:
    """One measurement of attend, of top_k, of a method's layers or step, or of a model's decode step.

    also_rows: measured in addition to shape.rows in the same run. impls: attend's implementations that are measured.
    replays: limit on replays, for long calls. fill: as many sequences as fit into memory, in place of the shape's
    number (a model's case). methods: decode methods that a model's case compares, by name, or fusion methods, and their
    ratios. generated: tokens of a long answer, each of which is timed, with all keys and values in GPU memory.
    prefill_chunk: tokens of a pass over a prompt, where one pass does not fit. rivals: baseline -> the only
    settings to try; None: all of them.
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
    reuse: Reuse | None = None
    sampling: Sampling | None = None
    host: HostMemory | None = None
    trained: Trained | None = None
    impls: tuple[str, ...] = ("triton",)
    replays: int | None = None
    fill: bool = False
    methods: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()
    prefill_chunk: int | None = None
    generated: int | None = None
    rivals: Mapping[str, Sequence[Mapping[str, Any]]] | None = None

    @property
    def prefill(self) -> bool:
        """Whether its rows are a prompt's, with positions on the host."""
        return self.group in ("prefill", KASCADE_PREFILL)

    def by(self, impl: str) -> Case:
        """The case measured by another implementation, under a name of its own and without targets."""
        return replace(self, name=f"{self.name} impl={impl}", impls=(impl,), targets=())

    def but(self, **shape: Any) -> Case:
        """The case with another shape, named in its name, and without targets: they were set for the first shape."""
        old = vars(self.shape)
        changed = {key: value for key, value in shape.items() if value not in (None, old[key])}
        if not changed:
            return self
        name = " ".join([self.name, *(f"{key}={value}" for key, value in changed.items())])
        return replace(self, name=name, shape=replace(self.shape, **changed), targets=())
