"""Run a case of the group "fusion": time to the first token of a prompt whose chunks are stored, by fusion method.

Chunks of random tokens, with drawn keys, values and dependence, wait in page-locked memory. Every method reads the same
prompt: chunks and a question. The first chunk's keys and values are computed, not drawn: at the beginning of a prompt a
chunk is exact, so that every method keeps them, and at ratio 1.0 must give the logits of a prefill. The baseline is the
model's own prefill of the same token ids, by transformers and by longreach; only the last token's logits are made on
either side. Host clock, from the call until the logits are there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import PREFILLS, Case
from longreach.bench.check import WrongResult
from longreach.bench.check_step import relative
from longreach.bench.chunk_store import drop_pages
from longreach.bench.decoding import Decoding
from longreach.bench.launches import launched
from longreach.bench.memory import allocated_bytes, peak_bytes, release, reset_peak
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.bench.user import rounding
from longreach.errors import OutOfMemory

CHUNK, QUESTION = 512, 64  # tokens
REPLAYS, WARM = 5, 2
CHECKED = (
    "dense prefill and every method at ratio 1.0, by their logits, against transformers' (relative, norms); errors of "
    "other ratios are of chunks that were drawn, and say nothing"
)
Run = Callable[[], Tensor]


def run_fusion(bench: Decoding, case: Case, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a case; the result as a record's part, also given to `save` after each entry. Raises WrongResult."""
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.fusing import FusedPrompt
    from longreach.methods.registry import fusion_class

    model, _ = bench.model(case)
    ids = bench.tokens(case, model, case.shape.context)[0]
    weights, kv = bench.bytes(case, model)
    size, question = (min(most, case.shape.context // 4) for most in (CHUNK, QUESTION))
    bench.say(f"{case.name}: {len(ids)} tokens, chunks of {size}, a question of {question}")
    most = rounding(model, ids[None]).logits
    chunks = _chunks(bench, case, model, ids[:-question].cpu().split(size))
    prompt = FusedPrompt.of([*chunks, ids[-question:].cpu()])
    entries, left_out = list[dict[str, Any]](), dict[str, str]()

    def result() -> dict[str, Any]:
        return {
            **bench.described(case, weights, kv),
            "chunk_tokens": size, "question_tokens": question, "chunk_bytes": sum(c.bytes for c in chunks),
            "check": {"how": CHECKED, "error_bound": most},
            "left_out": dict(left_out),
            "timing": {"how": "host clock, until the logits are there", "replays": REPLAYS, "warm_up": WARM},
            "baselines": {"versions": {}, "left_out": [], "tried": {}},
            "entries": list(entries),
            "targets": judge(case, entries),
        }  # fmt: skip

    def add(name: str, who: str, run: Run, settings: dict[str, Any], bound: float | None = None) -> None:
        release(bench.device)
        try:
            logits, measured = _timed(bench, run)
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            left_out[name] = f"out of memory: {' '.join(str(error).split())[:200]}"
            bench.say(f"  {name}: {left_out[name]}")
            return
        exact.setdefault("logits", logits)
        off = relative(exact["logits"], logits)
        if bound is not None and not off <= bound:
            raise WrongResult(f"{case.name}: {name}: logits differ by {off:.2e}, more than {bound:.2e}")
        checked = {"error": off} if bound is None else {"error": off, "error_bound": bound}
        entries.append({"name": name, "who": who, "settings": settings, **measured, **checked})
        bench.say(f"  {name}: {entries[-1]['microseconds']['median'] / 1e3:.1f} ms, error {off:.1e}")
        save(result())

    exact: dict[str, Tensor] = {}
    add(
        PREFILLS[0],
        "transformers",
        lambda: _prefill(model, ids),
        {"attention": model.config._attn_implementation},
        most,
    )
    with attach(model) as session:
        add(PREFILLS[1], "longreach", lambda: _prefill(model, ids, session), {"impl": "auto"}, most)
    for name in case.methods:
        kind = fusion_class(name)
        for ratio in case.ratios if "ratio" in kind.__dataclass_fields__ else (None,):
            method = kind() if ratio is None else kind.make(ratio=ratio)
            with attach(model, fuse=method) as session:
                reader = _Reader(session, prompt)
                label = name if ratio is None else f"{name} {ratio:g}"
                settings: dict[str, Any] = {}
                add(label, "longreach", reader.read, settings, most if ratio == 1.0 else None)
                if label not in left_out:
                    settings |= {**reader.told(), "milliseconds": reader.parts(bench)}
                    save(result())
    loads = _loads(bench, chunks)
    return {**result(), "loads": loads}


def _loads(bench: Decoding, chunks: Sequence[Any]) -> dict[str, Any]:
    """Seconds in which all chunks come from files into page-locked memory, checksums compared: the files' pages cached,
    and dropped before. dropped: share of the files whose pages were gone then.

    A first load, not reported, allocates the page-locked memory, which torch keeps for the others.
    """
    from longreach.store import ChunkPool, ChunkStore

    found: dict[str, Any] = {"bytes": sum(chunk.bytes for chunk in chunks)}
    with tempfile.TemporaryDirectory(prefix="longreach-bench-") as folder, ChunkStore(folder, verify="always") as store:
        for chunk in chunks:
            store.put(chunk)
        for name in ("first", "page_cache", "disk"):
            gone = [drop_pages(Path(folder) / f"{chunk.key.name}.safetensors") for chunk in chunks if name == "disk"]
            pool = ChunkPool(1 << 40, pinned=bench.device.type == "cuda")
            started = bench.now()
            for chunk in chunks:
                loaded = store.load(chunk.key).chunk
                assert loaded is not None
                pool.add(loaded)
            seconds = bench.now() - started
            if name != "first":
                found[f"{name}_seconds"] = seconds
        found["dropped"] = sum(gone) / len(gone)
    told = ", ".join(f"{name} {found[f'{name}_seconds']:.2f} s" for name in ("page_cache", "disk"))
    bench.say(f"  {found['bytes'] / 1e9:.2f} GB into memory: {told}")
    return found


class _Reader:
    """A prompt read by a session's fusion method, again and again."""

    def __init__(self, session: Any, prompt: Any):
        self.session, self.prompt = session, prompt
        self.cache = session.new_cache(1)
        self.report: Any = None

    def read(self) -> Tensor:
        from longreach.adapters.transformers.fusing import read

        self.cache.empty()
        logits, self.report = read(self.session, self.cache, self.prompt)
        return logits

    def told(self) -> dict[str, Any]:
        r = self.report
        counts = {name: getattr(r, name) for name in ("exact", "recomputed", "reused", "computed", "loaded_bytes")}
        waited = r.waited_seconds
        return {**counts, "waited_microseconds": None if waited is None else 1e6 * waited}

    def parts(self, bench: Decoding) -> dict[str, float]:
        """Milliseconds of the device, in one more read: all of it, its first layer, placing, the choice, waiting for
        copies; "recompute" is the rest."""
        from longreach.adapters.transformers.checks import decoder_of
        from longreach.adapters.transformers.rotary import attention_modules

        marks = _Marks(bench.device)
        attending = attention_modules(decoder_of(self.session.model))
        with marks.around(attending[0], attending[1], self.session.fuse):
            marks.mark("start")
            self.read()
            marks.mark("end")
        found = marks.milliseconds()
        if found:
            if self.report.waited_seconds is not None:
                found["waited for copies"] = 1e3 * self.report.waited_seconds
            found["recompute"] = 2 * found["all"] - sum(found.values())
        return found


class _Marks:
    """CUDA events at named moments; the host's clock on the CPU."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.at: dict[str, Any] = {}
        self.placed: list[tuple[Any, Any]] = []  # before and after stored keys and values of a layer are placed

    def mark(self, name: str) -> None:
        if self.cuda:
            self.at[name] = _now()

    @contextmanager
    def around(self, first: torch.nn.Module, second: torch.nn.Module, fusion: Any) -> Iterator[None]:
        """Within this block: when the first two layers begin to attend, and when choosing and placing begin and end."""
        from longreach.cache import KVCache

        kind: Any = type(fusion)
        cache: Any = KVCache
        plain, append = kind.choose, cache.append

        def place(held: Any, *args: Any, angles: Any = None, **given: Any) -> None:
            if angles is None or not self.cuda:
                append(held, *args, angles=angles, **given)
                return
            before = _now()
            append(held, *args, angles=angles, **given)
            self.placed.append((before, _now()))

        def choose(*args: Any) -> Any:
            self.mark("choosing")
            found = plain(*args)
            self.mark("chosen")
            return found

        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: None if name in self.at else self.mark(name))
            for name, module in (("first", first), ("second", second))
        ]
        kind.choose, cache.append = choose, place
        try:
            yield
        finally:
            kind.choose, cache.append = plain, append
            for hook in hooks:
                hook.remove()

    def milliseconds(self) -> dict[str, float]:
        if not self.cuda:
            return {}
        torch.cuda.synchronize()
        spans = {"all": ("start", "end"), "layer 0": ("first", "second"), "choose": ("choosing", "chosen")}
        found = {
            name: float(self.at[a].elapsed_time(self.at[b]))
            for name, (a, b) in spans.items() if a in self.at and b in self.at
        }  # fmt: skip
        return found | {"place": sum(float(before.elapsed_time(after)) for before, after in self.placed)}


def _now() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@torch.no_grad()
def _prefill(model: Any, ids: Tensor, session: Any = None) -> Tensor:
    """Logits [V] after the prompt, which a fresh cache then holds."""
    if session is None:
        return model(input_ids=ids[None], use_cache=True, logits_to_keep=1).logits[0, -1].float()  # type: ignore[no-any-return]
    cache = session.new_cache(1)
    out = model(input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float()  # type: ignore[no-any-return]


def _timed(bench: Decoding, run: Run) -> tuple[Tensor, dict[str, Any]]:
    """Logits, and the timing with one run's launches and memory."""
    for _ in range(WARM):
        run()
    release(bench.device)
    before, seconds = allocated_bytes(bench.device), list[float]()
    reset_peak(bench.device)
    for _ in range(REPLAYS):
        started = bench.now()
        logits = run()
        seconds.append(bench.now() - started)
    memory = {"before": before, "prefill_peak": peak_bytes(bench.device)}
    timing = Timing.of(seconds, 1, "host clock, until the logits are there", launched(run, bench.device))
    return logits, {**timing.recorded(), "how": timing.how, "memory": memory}


def _chunks(bench: Decoding, case: Case, model: Any, parts: Sequence[Tensor]) -> list[Any]:
    """Chunks of these tokens in page-locked memory if there is a GPU: the first as the model computes it, the others of
    drawn keys and values; all of drawn dependence."""
    from longreach.adapters.transformers import attach
    from longreach.adapters.transformers.precompute import Precompute
    from longreach.store import Chunk, ChunkPool

    assert case.model is not None
    shape, layers = case.shape, case.model.layers
    pool = ChunkPool(1 << 40, pinned=bench.device.type == "cuda")
    draw = torch.Generator(bench.device).manual_seed(bench.seed)
    size, dtype = (2, layers, shape.kv_heads, len(parts[0]), shape.dim), getattr(torch, shape.dtype)
    keys, values = torch.randn(size, dtype=dtype, device=bench.device, generator=draw).cpu()
    with attach(model) as session:
        first = Precompute(session).compute(parts[0])
    drawn = (
        Chunk.of(first.key.model, [], tokens, *([x[:, : len(tokens)] for x in both] for both in (keys, values)))
        for tokens in parts[1:]
    )
    return [
        pool.add(replace(chunk, dependence=torch.rand(len(chunk.tokens), dtype=torch.float64)))
        for chunk in (first, *drawn)
    ]
