"""Run a case of a whole model: ms per token of longreach's loop over a filled cache, and of transformers' generate.

The limit is the time that reading takes: weights (of the input embedding one row, so it does not count) and filled keys
and values at BANDWIDTH. Keys and values are drawn, not read from a prompt; both go on from the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import WITHOUT_ATTENTION, Case
from longreach.bench.check import WrongResult
from longreach.bench.check_method import UNSTEADY, LayerErrors, MethodVerdict, judge_method
from longreach.bench.check_step import COUNT, Steps, Verdict, passes, relative, require_right, run_steps
from longreach.bench.clock import Clock
from longreach.bench.filled import note_filled
from longreach.bench.inputs import bytes_needed, check_shape
from longreach.bench.launches import complete, observed, profiled
from longreach.bench.mac import decoding as mac
from longreach.bench.mac.phases import phases
from longreach.bench.memory import allocated_bytes, peak_bytes, release, reset_peak
from longreach.bench.stack import planned
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.cache import SequenceState
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod, Outcome
from longreach.methods.call import LayerCall
from longreach.ops import Partial
from longreach.records.launches import Launched, together

Say = Callable[[str], None]
BANDWIDTH = 4.26e12  # bytes a second: what reads of an H200's memory reach
REPLAYS, QUICK = 64, 16  # decode steps that are timed
WARM = 16  # tokens before them: compiling and capturing lie there
FEW = 6  # tokens that are enough for a step to be captured and replayed
SLOW, SLOW_REPLAYS = 0.05, 5  # seconds of a step, and how often one that takes longer is replayed
LEAST, ENOUGH = 20, 1.0  # replays of a faster one: as many as take this many seconds, but no fewer than LEAST
PROFILED = 2  # tokens after them whose kernels are counted, where there is no step to replay
COMPARED = 1 << 18  # tokens of the sequences whose exact pass is made: its keys and values in fp32 take memory
BASELINE = "transformers_static"
BASELINE_SECONDS = 150.0  # of all cases of a run together; the record names those that did not fit
TOKENS_TEST = "tests/adapters/transformers/test_loop.py"  # fp32 tokens equal transformers', for every family


@dataclass(frozen=True)
class Stepped:
    """A method's step over a filled cache, timed.

    entries: the captured step and the loop that users call, as `_entry` takes them but for their errors; without `loop`
    the captured step alone. done: what the timed step then did; setup: seconds of each part; eager: logits [B, V] of
    one step run as it is, over the same tokens as the first of `done`, and layers: attention's errors in it;
    uncompiled: those of that step captured without compiled parts.
    """

    entries: list[dict[str, Any]]
    done: Steps
    setup: dict[str, float]
    eager: Tensor | None = None
    layers: LayerErrors | None = None
    uncompiled: Tensor | None = None

    @property
    def timing(self) -> Timing:
        """The timing of the captured step."""
        timing = self.entries[0]["timing"]
        assert isinstance(timing, Timing)
        return timing

    def named(self, prefix: str, **more: Any) -> list[dict[str, Any]]:
        """The entries with a prefix before their names, and further fields."""
        return [{**entry, "name": f"{prefix}{entry['name']}", **more} for entry in self.entries]


@dataclass(frozen=True)
class NoAttention(AttentionMethod):
    """All of a model's step but attention: keys and values are appended and reads counted, outputs are zeros."""

    name = "no attention"
    phases = ("decode",)

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        return Outcome(Partial.empty(*call.rows.q.shape, device=call.rows.q.device))


class Decoding:
    """Cases of whole models in one run: the model is made once, and the baselines' time is added up."""

    def __init__(self, device: torch.device, *, without: Iterable[str], quick: bool, seed: int, say: Say):
        self.device, self.without, self.seed, self.say = device, set(without), seed, say
        self.steps = QUICK if quick else REPLAYS
        self.spent, self.last = 0.0, 0.0
        self.shared: dict[str, Any] = {}  # what the cases of a group share; `Runner` empties it for another group
        self._model: tuple[Any, Any, float] | None = None

    @property
    def rows(self) -> int:
        """The most tokens that are decoded before the cache is cut back to the context."""
        return self.steps + WARM + 1

    def run(self, case: Case) -> dict[str, Any]:
        """Measure a case; the result as a record's part. Raises WrongResult where the step errs beyond rounding."""
        model, model_seconds = self.model(case)
        if case.fill:
            release(self.device)
            batch = mac.as_many_as_fit(case, self.device)
            case = replace(case, shape=replace(case.shape, batch=batch))
        self.say(f"{case.name}: {case.shape.batch} x {case.shape.context} keys in every layer")
        ids = self.tokens(case, model, case.shape.context + 2)
        weights, kv = self.bytes(case, model)
        ours = self.step(case, model, ids)
        exact, verdict = self.judge_steps(case, model, ids, ours.done)
        entries = ours.named("", error=verdict.error, error_bound=verdict.error_bound)
        setup, found = ours.setup, dict[str, Any]()
        if case.stack:
            more, sparse, found = self._method(case, model, ids, exact, verdict)
            entries, setup = entries + more, setup | sparse
        if case.reuse:
            more, sparse, found = self._forced(case, model, ids, ours.timing)
            entries, setup = entries + more, setup | sparse
        rivals, baselines = self._baseline(case, model, ids, exact[:, 0], verdict.error_bound)
        written = [entry_of(weights, kv, **measured) for measured in (*entries, *rivals)]
        return {
            **self.described(case, weights, kv),
            "error_bound": verdict.error_bound,
            "check": verdict.recorded(),
            "tokens_tested_by": TOKENS_TEST,
            **found,
            "setup_seconds": {"model": model_seconds, **setup},
            "timing": {"how": ours.timing.how, "replays": self.steps, "warm_up": WARM},
            "baselines": baselines,
            "entries": written,
            "targets": judge(case, written),
        }

    def tokens(self, case: Case, model: Any, columns: int) -> Tensor:
        """Random tokens [B, columns], the same for the same seed."""
        draw = torch.Generator(self.device).manual_seed(self.seed)
        size = case.shape.batch, columns
        return torch.randint(model.config.vocab_size, size, generator=draw, device=self.device)

    def bytes(self, case: Case, model: Any) -> tuple[int, int]:
        """Bytes of the weights, and of the keys and values, that dense attention's step reads."""
        from longreach.adapters.transformers.synthetic import weight_bytes

        assert case.model is not None
        return weight_bytes(model), case.model.layers * bytes_needed(case)

    def described(self, case: Case, weights: int, kv: int) -> dict[str, Any]:
        """A record's fields for any case of a model."""
        needed = weights + kv
        return {
            "shape": asdict(case.shape),
            "model": asdict(case.model) if case.model else None,
            "bytes_needed": needed,
            "bytes": {"weights": weights, "kv": kv},
            "limit": {"bytes_per_second": BANDWIDTH, "microseconds": needed / BANDWIDTH * 1e6},
            "seed": self.seed,
        }

    def model(self, case: Case) -> tuple[Any, float]:
        """The case's model and the seconds it took to make; the previous case's if it is the same.

        Raises InvalidInput for a shape that is no model's.
        """
        from longreach.adapters.transformers.synthetic import random_llama

        shape = case.shape
        assert case.model is not None
        if shape.rows != 1:
            raise InvalidInput(f"{case.name}: a model decodes one row a step, got --rows {shape.rows}")
        check_shape(case)
        if case.model.hidden % shape.heads:
            wanted = f"expected a divisor of the hidden size {case.model.hidden}"
            raise InvalidInput(f"{case.name}: heads: {wanted}, got {shape.heads}")
        sizes = {**asdict(case.model), "heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.dim}
        key = (sizes, shape.dtype)
        if self._model is None or self._model[0] != key:
            self._model = None
            started = self.now()
            made = random_llama(**sizes, dtype=getattr(torch, shape.dtype), device=self.device, seed=self.seed)
            self._model = key, made, self.now() - started
        return self._model[1:]

    def judge_steps(
        self, case: Case, model: Any, ids: Tensor, done: Steps, window: int | None = None
    ) -> tuple[Tensor, Verdict]:
        """The exact logits of the first sequences, and the verdict on the steps. window: as in `passes`."""
        batch, tokens = case.shape.batch, case.shape.context
        count = max(1, min(batch, COMPARED // (tokens if window is None else window)))
        some = Steps(done.read[:count], done.chosen[:count], done.logits[:count])
        plain, exact = passes(model, tokens, some.read, self.seed, batch=batch, window=window)
        release(self.device)
        return exact, require_right(case.name, some, ids[:count, tokens], plain, exact)

    def judge_method(self, name: str, case: Case, stepped: Stepped, dense: Verdict) -> MethodVerdict:
        """The verdict on a method's steps, by its layers. dense: the verdict on dense attention's step."""
        assert case.model is not None and stepped.layers is not None and stepped.eager is not None
        captured = stepped.done.logits[:, 0]
        steady = name.rpartition(" ")[2] not in UNSTEADY
        layers = case.model.layers
        return judge_method(
            name, stepped.layers, stepped.eager, captured, dense.error_bound, layers, steady=steady,
            uncompiled=stepped.uncompiled,
        )  # fmt: skip

    def _forced(
        self, case: Case, model: Any, ids: Tensor, dense: Timing
    ) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, Any]]:
        """MAC with forced hits in the same loop, its set-up times, and further fields of the record."""
        assert case.reuse is not None
        method = mac.forced(case, self.rows)
        ours = self.step(case, model, ids, method)
        _, verdict = self.judge_steps(case, model, ids, ours.done, mac.window(case))
        named = ours.named("mac: ", error=verdict.error, error_bound=verdict.error_bound)
        steps = {"mac": ours.timing.median * 1e6, "dense": dense.median * 1e6}
        found = {
            "forced": mac.FORCED,
            "reuse": asdict(case.reuse),
            "method": method.to_json(),
            "check_forced": verdict.recorded(),
            "phases": phases(case, self.device, steps, replays=self.steps // 4, seed=self.seed),
        }
        release(self.device)
        return named, {f"mac: {what}": seconds for what, seconds in ours.setup.items()}, found

    def _method(
        self, case: Case, model: Any, ids: Tensor, exact: Tensor, dense: Verdict
    ) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, Any]]:
        """The case's decode method in the same loop: entries, seconds of setting up, and how it was checked.

        left_out: the relative error of its logits against dense attention's exact ones, which is no fault of the step.
        """
        from longreach.adapters.transformers import shape_of

        assert case.stack is not None
        name = case.stack.method
        with planned(case, self.seed, shape_of(model)) as (method, _, _):
            ours = self.step(case, model, ids, method, check_layers=True)
        verdict = self.judge_method(f"{case.name}: {name}", case, ours, dense)
        left_out = relative(ours.done.logits[: len(exact), :1], exact[:, :1])
        named = ours.named(f"{name}: ", error=verdict.error, error_bound=verdict.error_bound, left_out=left_out)
        rest = self.step(case, model, ids, NoAttention()).entries[0]
        rest |= {"name": WITHOUT_ATTENTION, "error": None, "error_bound": None, "unchecked": NoAttention.__doc__}
        setup = {f"{name}: {what}": s for what, s in ours.setup.items()}
        return [*named, rest], setup, {"check_method": verdict.recorded()}

    @torch.no_grad()
    def step(
        self, case: Case, model: Any, ids: Tensor, decode: AttentionMethod | None = None, *, check_layers: bool = False
    ) -> Stepped:
        """Time a method's step after ids [B, context + 1 or more], all but one of them drawn keys.

        decode: None for dense. check_layers: compare each layer's attention with fp64 in one step more.
        """
        from longreach.adapters.transformers import attach, shape_of
        from longreach.adapters.transformers.synthetic import fill
        from longreach.cache import CacheConfig

        batch, tokens = case.shape.batch, case.shape.context
        room_for_all = CacheConfig(capacity=tokens + self.rows)
        with attach(model, decode=decode, cache=room_for_all, impl=case.impls[0]) as session:
            cache = session.new_cache(batch)
            started = self.now()
            fill(cache, model, tokens, self.seed)
            if decode is not None:
                note_filled(cache, decode, shape_of(model))
            seconds = {"fill": self.now() - started}
            stepped = self.filled_step(
                case, session, cache, ids, seconds, LayerErrors() if check_layers else None, share=decode is not None
            )
        del cache
        release(self.device)
        return stepped

    @torch.no_grad()
    def filled_step(
        self, case: Case, session: Any, cache: Any, ids: Tensor, seconds: dict[str, float],
        layers: LayerErrors | None = None, *, share: bool = True, loop: bool = True,
    ) -> Stepped:  # fmt: skip
        """Time the step of a session's method over a cache that holds the case's context.

        ids [B, context + 1 or more]: the last ones are read. The cache has room for `rows` more tokens. seconds: of
        what was done before, for the record. layers: compares attention with fp64 in one step more; None: no check.
        share: record the share of keys and values that is read, of dense attention's. loop: also time the loop that
        users call; else only the captured step is timed, with as many replays as `enough` has it.
        """
        from longreach.adapters.transformers.loop import generate
        from longreach.adapters.transformers.loop.run import decoder_for

        tokens, room = case.shape.context, self.rows if loop else FEW
        capture = self.device.type == "cuda"
        marks = [self.now()]
        clock, before = Clock(self.device), allocated_bytes(self.device)
        reset_peak(self.device)
        with observed() as seen:
            got = generate(session, ids[:, : tokens + 1], max_new_tokens=room, eos_token_id=(),
                           past_key_values=cache, streamer=clock)  # fmt: skip
        memory = {"before": before, "decode_peak": peak_bytes(self.device)}
        (decoder,) = cache.decoders.values()
        if got.captured != ("full" if capture else None):
            raise WrongResult(
                f"{case.name}: the step was not one CUDA graph ({got.not_captured_reason}); its time does not count"
            )
        cache.drop_columns(cache.columns - tokens)
        marks.append(self.now())
        replays = self.replays(decoder, capture, self.steps) if loop else self.enough(decoder, capture)
        cache.drop_columns(cache.columns - tokens)
        marks.append(self.now())
        launched = self.launched_by(decoder, None if not capture else seen.captured)
        cache.drop_columns(cache.columns - tokens)
        done = run_steps(decoder, ids[:, tokens], capture=capture, count=COUNT if loop else 1)
        settings = {"compile": decoder.compile, "impl": case.impls[0], "captured": got.captured is not None}
        setup = {**seconds, "compile_and_capture": got.setup_seconds, "capture": decoder.capture_seconds}
        if share:
            settings["keys_and_values_read"] = session.report().fraction("decode")  # of dense attention's
        whole = {**settings, "mean_microseconds": 1e6 * (got.seconds_per_token or 0.0)}
        eager, uncompiled = None, None
        if layers is not None:
            cache.drop_columns(cache.columns - tokens)
            eager = self.observed_step(session, decoder, ids[:, tokens], layers)
        if layers is not None and capture:
            plain = decoder_for(session, cache, room, sampled=False, compile="none", capture="full")
            for count in (FEW, 1):  # the first run captures on its way
                cache.drop_columns(cache.columns - tokens)
                uncompiled = run_steps(plain, ids[:, tokens], capture=True, count=count).logits[:, 0]
        how = "CUDA graph replays in a row" if capture else "host clock, functional run only"
        by_token = "host clock, token by token"
        entries: list[dict[str, Any]] = [
            {"name": "captured step", "settings": settings, "timing": Timing.of(replays, 1, how, launched)}
        ]
        if loop:
            entries.append({"name": "generate", "settings": whole,
                            "timing": Timing.of(clock.steps(self.steps), 1, by_token, launched)})  # fmt: skip
        else:
            marks.append(self.now())
            first, timed, checked = (b - a for a, b in pairwise(marks))
            setup |= {"other_first_steps": first - got.setup_seconds, "time": timed, "check": checked}
        measured = [{**e, "who": "longreach", "memory": memory} for e in entries]
        return Stepped(measured, done, setup, eager, layers, uncompiled)

    def launched_by(self, decoder: Any, triton: Any) -> Launched:
        """Launches of one step of a decoder. triton: those of its graphs; None: the step runs without capture."""
        with decoder.run(_no_end(), 1), observed() as seen:
            kernels = profiled(lambda: decoder.step(capture=triton is not None), self.device)
        triton = together((*(triton or ()), *seen.all))  # pieces' host work launches in addition to their graphs
        return Launched(triton, complete(kernels, triton))

    def observed_step(self, session: Any, decoder: Any, first: Tensor, layers: LayerErrors) -> Tensor:
        """Logits [B, V] of one step from the tokens first [B], run as it is, with a hook in every layer."""
        session.on_layer = layers
        try:
            with decoder.run(_no_end(), 1):
                decoder.take(first)
                decoder.step(capture=False)
                return decoder.logits.clone()  # type: ignore[no-any-return]
        finally:
            session.on_layer = None

    def enough(self, decoder: Any, capture: bool) -> list[float]:
        """Seconds of as many steps as their median needs: ENOUGH seconds of them, at least LEAST and at most `steps`,
        or SLOW_REPLAYS where one takes longer than SLOW."""
        before = decoder.cache.columns
        step = min(self.replays(decoder, capture, 2, warm=1))
        decoder.cache.drop_columns(decoder.cache.columns - before)
        if step > SLOW:
            return self.replays(decoder, capture, min(SLOW_REPLAYS, self.steps), warm=1)
        return self.replays(decoder, capture, min(max(LEAST, int(ENOUGH / step)), self.steps))

    def replays(self, decoder: Any, capture: bool, steps: int, warm: int = WARM // 2) -> list[float]:
        """Seconds of each of `steps` steps queued one behind the other, after `warm` others."""
        marks: list[Any] = []
        with decoder.run(_no_end(), warm + steps):
            for _ in range(warm):
                decoder.step(capture=capture)
            for number in range(steps + 1):
                if capture:
                    marks.append(torch.cuda.Event(enable_timing=True))
                    marks[-1].record()
                else:
                    marks.append(time.perf_counter())
                if number < steps:
                    decoder.step(capture=capture)
        if not capture:
            return [b - a for a, b in pairwise(marks)]
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]

    def _baseline(
        self, case: Case, model: Any, ids: Tensor, exact: Tensor, most: float
    ) -> tuple[list[Any], dict[str, Any]]:
        """transformers' generate on its static cache, compiled as it does by itself; its part of the record."""
        from longreach.bench.baselines import baseline

        told: dict[str, Any] = {"versions": {}, "left_out": [], "why": {}, "seconds": 0.0}
        why = None
        if BASELINE not in case.baselines or BASELINE in self.without:
            why = "as asked for"
        elif self.spent and self.spent + self.last > BASELINE_SECONDS:
            why = (
                f"{self.spent:.0f} s were spent on it in this run, the last case's {self.last:.0f} s more would exceed "
                f"{BASELINE_SECONDS:.0f} s"
            )
        if why is not None:
            return [], {**told, "left_out": [BASELINE], "why": {BASELINE: why}}
        started = self.now()
        told["versions"] = baseline(BASELINE).load()
        try:
            found = [self._transformers(case, model, ids, exact, most)]
        except (RuntimeError, ValueError, NotImplementedError) as failure:  # dynamo's and inductor's are RuntimeErrors
            reason = f"failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            self.say(f"  {BASELINE} {reason}")
            found, told["left_out"], told["why"] = [], [BASELINE], {BASELINE: reason}
        finally:
            torch.compiler.reset()  # what was compiled for this length holds the memory of its graphs
            release(self.device)
        self.last = self.now() - started
        self.spent += self.last
        return found, {**told, "seconds": self.last}

    @torch.no_grad()
    def _transformers(self, case: Case, model: Any, ids: Tensor, exact: Tensor, most: float) -> dict[str, Any]:
        from longreach.adapters.transformers.cache_name import CACHE
        from longreach.adapters.transformers.synthetic import filled_static_cache

        torch.compiler.reset()  # a second length would be compiled for any length, and be slower
        tokens, new = case.shape.context, self.steps + WARM + 1 + PROFILED
        cache = filled_static_cache(model, case.shape.batch, tokens, room=128, seed=self.seed)
        theirs = model(input_ids=ids[:, tokens : tokens + 1], **{CACHE: cache}).logits[:, -1]
        error = relative(theirs, exact)
        if not error <= most:
            raise WrongResult(f"{case.name}: transformers' logits differ by {error:.2e}, more than {most:.1e}")
        clock = Clock(self.device, (new - PROFILED, PROFILED))
        started = self.now()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, streamer=clock,
            **{CACHE: cache},
        )  # fmt: skip
        setup = clock.times[WARM] - started
        compiled = hasattr(model, "_compiled_call") and self.device.type == "cuda"
        settings = {
            "cache": type(cache).__name__,
            "attention": model.config._attn_implementation,
            "compiled_by_itself": compiled,
            "first_tokens_seconds": setup,
        }
        timing = Timing.of(clock.steps(self.steps), 1, "host clock, token by token", clock.launched)
        name = "transformers generate, static cache"
        return {"name": name, "who": BASELINE, "settings": settings, "error": error, "error_bound": most,
                "timing": timing}  # fmt: skip

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _no_end() -> Any:
    from longreach.adapters.transformers.loop.sampling import Ends

    return Ends((), 0)


def entry_of(
    weights: int, kv: int, *, name: str, who: str, settings: dict[str, Any], timing: Timing, error: float | None,
    error_bound: float | None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A record's entry. weights, kv: bytes that dense attention's step reads; a method's rate counts its own reads.

    error: None for an entry that is not checked; `more` then has the reason, unchecked.
    """
    share = settings.get("keys_and_values_read")
    entry = {
        "name": name,
        "who": who,
        "settings": settings,
        **timing.recorded(),
        "how": timing.how,
        "tb_per_s": (weights + (1 if share is None else share) * kv) / timing.median / 1e12,
        "error": error,
        "error_bound": error_bound,
        **more,
    }
    return entry if share is not None else {**entry, "share_of_limit": (weights + kv) / BANDWIDTH / timing.median}
