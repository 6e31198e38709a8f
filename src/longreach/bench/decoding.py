"""Run a case of a whole model: ms a token of longreach's loop over a filled cache, beside transformers' own generate.

The limit is the time that reading takes: weights (of the input embedding one row, so it does not count) and filled keys
and values at BANDWIDTH. Keys and values are drawn, not read from a prompt; both go on from the same ones.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.filled import note_filled
from longreach.bench.inputs import bytes_needed, check_shape
from longreach.bench.mac import decoding as mac
from longreach.bench.mac.phases import phases
from longreach.bench.stack import planned
from longreach.bench.steps import Steps, Verdict, passes, relative, require_right, run_steps
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod

Say = Callable[[str], None]
BANDWIDTH = 4.26e12  # bytes a second: what reads of an H200's memory reach
STEPS, QUICK = 64, 16  # decode steps that are timed
WARM = 16  # tokens before them: compiling and capturing lie there
COMPARED = 1 << 18  # tokens of the sequences whose exact pass is made: its keys and values in fp32 take memory
BASELINE = "transformers_static"
BASELINE_SECONDS = 150.0  # of all cases of a run together; where the next may not fit, the record says so
TOKENS_TEST = "tests/adapters/transformers/test_loop.py"  # fp32 tokens equal transformers', for every family


class Decoding:
    """Cases of whole models in one run: the model is made once, and the baselines' time is added up."""

    def __init__(self, device: torch.device, *, without: Iterable[str], quick: bool, seed: int, say: Say):
        self.device, self.without, self.seed, self.say = device, set(without), seed, say
        self.steps = QUICK if quick else STEPS
        self.spent, self.last = 0.0, 0.0
        self._model: tuple[Any, Any, float] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        """Measure a case; the result as a record's part. Raises WrongResult where the step errs beyond rounding."""
        from longreach.adapters.transformers.synthetic import weight_bytes

        if case.shape.rows != 1:
            raise InvalidInput(f"{case.name}: a model decodes one row a step, got --rows {case.shape.rows}")
        check_shape(case)
        if case.model and case.model.hidden % case.shape.heads:
            wanted = f"expected a divisor of the hidden size {case.model.hidden}"
            raise InvalidInput(f"{case.name}: heads: {wanted}, got {case.shape.heads}")
        model, model_seconds = self.model(case)
        if case.fill:
            self._free()
            batch = mac.as_many_as_fit(case, self.device)
            case = replace(case, shape=replace(case.shape, batch=batch))
        self.say(f"{case.name}: {case.shape.batch} x {case.shape.context} keys in every layer")
        draw = torch.Generator(self.device).manual_seed(self.seed)
        size = case.shape.batch, case.shape.context + 2
        ids = torch.randint(model.config.vocab_size, size, generator=draw, device=self.device)
        weights = weight_bytes(model)
        kv = case.model.layers * bytes_needed(case) if case.model else 0
        needed = weights + kv
        ours, done, setup = self._ours(case, model, ids)
        exact, verdict = self._verdict(case, model, ids, done)
        ours = [{**measured, "error": verdict.error} for measured in ours]
        found: dict[str, Any] = {}
        if case.stack:
            more, sparse = self._method(case, model, ids, exact)
            ours, setup = ours + more, setup | sparse
        if case.reuse:
            more, sparse, found = self._forced(case, model, ids, ours[0]["timing"])
            ours, setup = ours + more, setup | sparse
        rivals, baselines = self._baseline(case, model, ids, exact[:, 0], verdict.error_bound)
        entries = [_entry(weights, kv, **measured) for measured in (*ours, *rivals)]
        return {
            "shape": asdict(case.shape),
            "model": asdict(case.model) if case.model else None,
            "bytes_needed": needed,
            "bytes": {"weights": weights, "kv": kv},
            "limit": {"bytes_per_second": BANDWIDTH, "microseconds": needed / BANDWIDTH * 1e6},
            "seed": self.seed,
            "error_bound": verdict.error_bound,
            "check": verdict.recorded(),
            "tokens_tested_by": TOKENS_TEST,
            **found,
            "setup_seconds": {"model": model_seconds, **setup},
            "timing": {"how": ours[0]["timing"].how, "replays": self.steps, "warm_up": WARM},
            "baselines": baselines,
            "entries": entries,
            "targets": judge(case, entries),
        }

    def model(self, case: Case) -> tuple[Any, float]:
        """The case's model and the seconds it took to make; that of the case before where it is the same."""
        from longreach.adapters.transformers.synthetic import random_llama

        shape = case.shape
        assert case.model is not None
        sizes = {**asdict(case.model), "heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.dim}
        key = (sizes, shape.dtype)
        if self._model is None or self._model[0] != key:
            self._model = None
            started = self._now()
            made = random_llama(**sizes, dtype=getattr(torch, shape.dtype), device=self.device, seed=self.seed)
            self._model = key, made, self._now() - started
        return self._model[1:]

    def _verdict(
        self, case: Case, model: Any, ids: Tensor, done: Steps, window: int | None = None
    ) -> tuple[Tensor, Verdict]:
        """The exact logits of the first sequences, and what the steps are worth. window: as `passes` has it."""
        batch, tokens = case.shape.batch, case.shape.context
        count = max(1, min(batch, COMPARED // (tokens if window is None else window)))
        some = Steps(done.read[:count], done.chosen[:count], done.logits[:count])
        plain, exact = passes(model, tokens, some.read, self.seed, batch=batch, window=window)
        self._free()
        return exact, require_right(case.name, some, ids[:count, tokens], plain, exact)

    def _forced(
        self, case: Case, model: Any, ids: Tensor, dense: Timing
    ) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, Any]]:
        """MAC with forced hits in the same loop, what setting it up took, and what the record says of it besides."""
        assert case.reuse is not None
        method = mac.forced(case)
        ours, done, setup = self._ours(case, model, ids, method)
        _, verdict = self._verdict(case, model, ids, done, mac.window(case))
        named = [{**measured, "name": f"mac: {measured['name']}", "error": verdict.error} for measured in ours]
        steps = {"mac": ours[0]["timing"].median * 1e6, "dense": dense.median * 1e6}
        found = {
            "forced": mac.FORCED,
            "reuse": asdict(case.reuse),
            "method": method.to_json(),
            "check_forced": verdict.recorded(),
            "phases": phases(case, self.device, steps, replays=self.steps // 4, seed=self.seed),
        }
        self._free()
        return named, {f"mac: {what}": seconds for what, seconds in setup.items()}, found

    def _method(
        self, case: Case, model: Any, ids: Tensor, exact: Tensor
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """The case's decode method in the same loop. Its error is what the method leaves out, and no fault of the step:
        that its layers are right is what the method's own case checks."""
        from longreach.adapters.transformers import shape_of

        assert case.stack is not None
        name = case.stack.method
        with planned(case, self.seed, shape_of(model)) as (method, _, _):
            ours, done, setup = self._ours(case, model, ids, method)
        error = relative(done.logits[: len(exact), :1], exact[:, :1])
        named = [{**measured, "name": f"{name}: {measured['name']}", "error": error} for measured in ours]
        return named, {f"{name}: {what}": seconds for what, seconds in setup.items()}

    @torch.no_grad()
    def _ours(
        self, case: Case, model: Any, ids: Tensor, decode: AttentionMethod | None = None
    ) -> tuple[list[dict[str, Any]], Steps, dict[str, float]]:
        """What was timed of ours, what the timed step then did, seconds of setting up. decode: None for dense."""
        from longreach.adapters.transformers import attach, shape_of
        from longreach.adapters.transformers.loop import generate
        from longreach.adapters.transformers.synthetic import fill
        from longreach.cache import CacheConfig

        batch, tokens = case.shape.batch, case.shape.context
        room = self.steps + WARM + 1
        capture = self.device.type == "cuda"
        room_for_all = CacheConfig(capacity=tokens + room)
        with attach(model, decode=decode, cache=room_for_all, impl=case.impls[0]) as session:
            cache = session.new_cache(batch)
            started = self._now()
            fill(cache, model, tokens, self.seed)
            if decode is not None:
                note_filled(cache, decode, shape_of(model))
            filled = self._now()
            clock = Clock()
            got = generate(session, ids[:, : tokens + 1], max_new_tokens=room, eos_token_id=(), past_key_values=cache,
                           streamer=clock)  # fmt: skip
            (decoder,) = cache.decoders.values()
            if got.captured != ("full" if capture else None):
                raise WrongResult(f"{case.name}: the step was not one CUDA graph ({got.why_not}); its time does not "
                                  f"count")  # fmt: skip
            cache.drop_columns(cache.columns - tokens)
            replays = self._replays(decoder, capture)
            cache.drop_columns(cache.columns - tokens)
            done = run_steps(decoder, ids[:, tokens], capture=capture)
            settings = {"fuse": decoder.fuse, "impl": case.impls[0], "captured": got.captured is not None}
            setup = {
                "fill": filled - started,
                "compile_and_capture": got.setup_seconds,
                "capture": decoder.capture_seconds,
            }
            if decode is not None:
                settings["keys_and_values_read"] = session.report().fraction("decode")  # of dense attention's
            whole = {**settings, "mean_microseconds": 1e6 * (got.seconds_per_token or 0.0)}
        del cache, decoder
        self._free()
        how = "CUDA graph replays in a row" if capture else "host clock, functional run only"
        return [
            {"name": "captured step", "who": "longreach", "settings": settings, "timing": Timing.of(replays, 1, how)},
            {"name": "generate", "who": "longreach", "settings": whole,
             "timing": Timing.of(clock.steps(self.steps), 1, "host clock, token by token")},
        ], done, setup  # fmt: skip

    def _replays(self, decoder: Any, capture: bool) -> list[float]:
        """Seconds of each of `steps` steps queued one behind the other."""
        marks: list[Any] = []
        with decoder.run(_no_end(), WARM // 2 + self.steps):
            for _ in range(WARM // 2):
                decoder.step(capture=capture)
            for number in range(self.steps + 1):
                if capture:
                    marks.append(torch.cuda.Event(enable_timing=True))
                    marks[-1].record()
                else:
                    marks.append(time.perf_counter())
                if number < self.steps:
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
        started = self._now()
        told["versions"] = baseline(BASELINE).load()
        try:
            found = [self._transformers(case, model, ids, exact, most)]
        except (RuntimeError, ValueError, NotImplementedError) as failure:  # dynamo's and inductor's are RuntimeErrors
            reason = f"failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            self.say(f"  {BASELINE} {reason}")
            found, told["left_out"], told["why"] = [], [BASELINE], {BASELINE: reason}
        finally:
            torch.compiler.reset()  # what was compiled for this length holds the memory of its graphs
            self._free()
        self.last = self._now() - started
        self.spent += self.last
        return found, {**told, "seconds": self.last}

    @torch.no_grad()
    def _transformers(self, case: Case, model: Any, ids: Tensor, exact: Tensor, most: float) -> dict[str, Any]:
        from longreach.adapters.transformers.synthetic import filled_static_cache

        torch.compiler.reset()  # a second length would be compiled for any length, and be slower
        tokens, new = case.shape.context, self.steps + WARM + 1
        cache = filled_static_cache(model, case.shape.batch, tokens, room=128, seed=self.seed)
        theirs = model(input_ids=ids[:, tokens : tokens + 1], past_key_values=cache).logits[:, -1]
        error = relative(theirs, exact)
        if not error <= most:
            raise WrongResult(f"{case.name}: transformers' logits differ by {error:.2e}, more than {most:.1e}")
        clock = Clock()
        started = self._now()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, do_sample=False,
            streamer=clock,
        )  # fmt: skip
        setup = clock.times[WARM] - started
        compiled = hasattr(model, "_compiled_call") and self.device.type == "cuda"
        settings = {
            "cache": type(cache).__name__,
            "attention": model.config._attn_implementation,
            "compiled_by_itself": compiled,
            "first_tokens_seconds": setup,
        }
        timing = Timing.of(clock.steps(self.steps), 1, "host clock, token by token")
        name = "transformers generate, static cache"
        return {"name": name, "who": BASELINE, "settings": settings, "error": error, "timing": timing}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Clock:
    """A streamer that notes when prompt and tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        return None

    def steps(self, count: int) -> list[float]:
        """Seconds between each of the last `count` tokens and the one before."""
        last = self.times[-count - 1 :]
        if len(last) != count + 1:
            raise InvalidInput(f"expected {count} tokens and one before them, {len(self.times)} came")
        return [b - a for a, b in pairwise(last)]


def _no_end() -> Any:
    from longreach.adapters.transformers.loop.choosing import Ends

    return Ends((), 0)


def _entry(
    weights: int, kv: int, *, name: str, who: str, settings: dict[str, Any], timing: Timing, error: float
) -> dict[str, Any]:
    """weights, kv: bytes that dense attention's step reads; a method's rate is of those that it reads itself."""
    share = settings.get("keys_and_values_read")
    entry = {
        "name": name,
        "who": who,
        "settings": settings,
        "microseconds": timing.microseconds(),
        "how": timing.how,
        "tb_per_s": (weights + (1 if share is None else share) * kv) / timing.median / 1e12,
        "calls_per_replay": timing.calls,
        "error": error,
    }
    return entry if share is not None else {**entry, "share_of_limit": (weights + kv) / BANDWIDTH / timing.median}
