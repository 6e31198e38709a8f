"""Run a case of the group "user": TTFT, TPOT and peak memory, compared with transformers' generate.

A random prompt is really read. Three ways: transformers' generate (its own cache, sdpa), the same call on an attached
model, and longreach.generate; the last one for every method of the case. A case with a target for a step captured
piecewise times longreach.generate so too, where the device captures steps. Memory is what torch has allocated at most:
"prefill_peak" until the first token is there, "decode_peak" from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longreach.bench.case import Case
from longreach.bench.check import WrongResult
from longreach.bench.check_method import UNSTEADY, LayerErrors, judge_method
from longreach.bench.check_step import WIDER, computing_in, relative, run_steps
from longreach.bench.clock import Clock
from longreach.bench.decoding import Decoding, entry_of
from longreach.bench.launches import observed
from longreach.bench.memory import allocated_bytes, peak_bytes, release, reset_peak
from longreach.bench.methods import method_for
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.errors import OutOfMemory
from longreach.methods.base import AttentionMethod
from longreach.records.launches import Launched

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Loop
    from longreach.adapters.transformers.loop.run import GraphOption

NEW, TIMED = 24, 16  # tokens of an answer; of these, the last ones are timed
PROFILED = 2  # tokens more, whose kernels are counted
KEPT = 4  # first tokens that are checked, those after the first one by decode steps
WARM_UP = 256  # tokens of a prompt that is read before anything is timed
ROUNDING = 512, 16  # tokens of the prompt by which rounding is measured, and how many of their logits
THEIRS, ATTACHED, OURS = "transformers generate", "attach + model.generate", "longreach.generate"
PIECEWISE, CAPTURED = f"{OURS}, piecewise", f"{ATTACHED}, captured"
CHECKED = (
    "dense: logits against those of transformers' own answer while the tokens agree (relative, norms), of longreach's "
    "decoder in steps repeated after those that are timed; its tokens by how far they are behind the best of "
    "transformers' logits. Methods: attention of every layer of a repeated step against fp64 over the keys that the "
    "method chose, and that step's logits against the captured step's"
)
UNCHECKED = {  # methods whose steps are not checked, and why
    "mac": "its output holds reused results, so it cannot be compared with attention over the keys it reads; `steps` "
    "checks its step with forced hits"
}


def run_user(bench: Decoding, case: Case, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure a case; the result as a record's part, also given to `save` after each way.

    Raises WrongResult where tokens, logits or attention differ by more than rounding explains. A way that does not fit
    into memory is named under left_out; if it is transformers', its answer to the first prompt alone is the reference.
    """
    from longreach.adapters.transformers import shape_of

    model, _ = bench.model(case)
    ids = bench.tokens(case, model, case.shape.context)
    weights, kv = bench.bytes(case, model)
    bench.say(f"{case.name}: prompts of {case.shape.batch} x {case.shape.context} tokens")
    most = rounding(model, ids)
    entries, left_out = list[dict[str, Any]](), dict[str, str]()

    def result() -> dict[str, Any]:
        return {
            **bench.described(case, weights, kv),
            **chunked(case),
            "check": {"how": CHECKED, "logits_bound": most.logits, "behind_bound": most.behind},
            "left_out": dict(left_out),
            "timing": {"how": "host clock, token by token", "replays": TIMED, "warm_up": NEW - TIMED},
            "baselines": {"versions": {}, "left_out": [], "tried": {}},
            "entries": list(entries),
            "targets": judge(case, entries),
        }

    def keep(measured: dict[str, Any] | None) -> None:
        if measured is not None:
            entries.append(entry_of(weights, kv, **measured))
            bench.say(f"  {describe(entries[-1])}")
            save(result())

    answer = Answer()
    found = tried(bench, THEIRS, left_out, partial(_transformers, bench, case, model, ids, answer))
    if found is None:  # one prompt fits
        _transformers(bench, case, model, ids[:1], answer)
    keep(found and {**found, "error": 0.0, "error_bound": most.logits})
    loops: tuple[tuple[str, Loop], ...] = ((ATTACHED, "plain"), (CAPTURED, "captured"))
    for label, loop in loops:
        if loop == "plain" or captures(bench.device):
            found = tried(bench, label, left_out, partial(_attached, bench, case, model, ids, answer, most, loop))
            keep(found and {**found, "name": label})
    for name in case.methods:
        label = OURS if name == "dense" else f"{OURS}, {name}"
        with method_for(name, case, shape_of(model), bench.seed) as method:
            measure = partial(_longreach, bench, case, model, ids, method, answer, most)
            found = tried(bench, label, left_out, measure)
        keep(found and {**found, "name": label})
    if any(target.of == PIECEWISE for target in case.targets) and captures(bench.device):
        measure = partial(_longreach, bench, case, model, ids, None, answer, most, graph="piecewise")
        found = tried(bench, PIECEWISE, left_out, measure)
        keep(found and {**found, "name": PIECEWISE})
    return result()


def captures(device: torch.device) -> bool:
    """Whether steps are captured there."""
    return device.type == "cuda"


class Answer:
    """A logits processor that keeps the logits [B, V] of a generate's first KEPT tokens, on the host."""

    def __init__(self, logits: Iterable[Tensor] = ()) -> None:
        self.logits = list(logits)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(self.logits) < KEPT:  # the copy would slow the tokens that are timed
            self.logits.append(scores.cpu())
        return scores

    def behind(self, tokens: Tensor, steps: int) -> float:
        """How far tokens [B, new] are behind the best of these logits at most, each row until it first differs.

        steps: limit on tokens. Rows that the reference does not have are skipped.
        """
        worst = 0.0
        for row in range(len(self.logits[0])):
            for step in range(min(steps, len(self.logits), tokens.shape[1])):
                logits, token = self.logits[step][row], int(tokens[row, step])
                worst = max(worst, float(logits.max() - logits[token]))
                if token != int(logits.argmax()):
                    break
        return worst

    def off(self, other: Answer) -> float:
        """The largest relative difference (norms) of another answer's logits, each row until the tokens differ."""
        worst = 0.0
        for row in range(len(self.logits[0])):
            for mine, theirs in zip(self.logits, other.logits, strict=False):
                worst = max(worst, relative(theirs[row], mine[row]))
                if int(mine[row].argmax()) != int(theirs[row].argmax()):
                    break
        return worst


class Rounding(NamedTuple):
    """Rounding differences between two passes. logits: relative difference (norms); behind: how far the token that
    one chooses may be behind the best in the other's logits.
    """

    logits: float
    behind: float


@torch.no_grad()
def rounding(model: Any, ids: Tensor) -> Rounding:
    """Measured on the first tokens of the prompt: the model's own pass against one in a wider dtype.

    Each of two passes may err twice as much as that; a token is behind by the errors of two logits in each of them.
    """
    tokens, kept = ROUNDING
    given = {"input_ids": ids[:1, :tokens], "use_cache": False, "logits_to_keep": kept}
    plain = model(**given).logits
    with computing_in(model, WIDER[model.dtype]):
        exact = model(**given).logits
    return Rounding(4 * relative(plain, exact), 8 * float((plain.double() - exact.double()).abs().max()))


def describe(entry: dict[str, Any]) -> str:
    """An entry in a line."""
    memory = {name: "-" if size is None else f"{size / 2**30:.2f} GiB" for name, size in entry["memory"].items()}
    return (
        f"{entry['name']}: first token {entry['ttft_seconds']:.3f} s, {entry['microseconds']['median'] / 1e3:.2f} ms a "
        f"token, peak {memory['prefill_peak']} of prefill, {memory['decode_peak']} of decoding, "
        f"{entry['launched']['kernels']} kernels a token"
    )


def tried(
    bench: Decoding, name: str, left_out: dict[str, str], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """A way's measurement; None, and named in left_out, where it does not fit into memory."""
    try:
        return measure()
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        left_out[name] = f"out of memory: {' '.join(str(error).split())[:200]}"
        bench.say(f"  {name}: {left_out[name]}")
        return None
    finally:
        release(bench.device)


@torch.no_grad()
def _transformers(bench: Decoding, case: Case, model: Any, ids: Tensor, answer: Answer) -> dict[str, Any]:
    short = ids[:, :WARM_UP]
    model.generate(short, attention_mask=torch.ones_like(short), max_new_tokens=4, do_sample=False)
    answer.logits.clear()
    clock, taken = timed(bench, lambda clock: model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW + PROFILED, do_sample=False, streamer=clock,
        logits_processor=[answer], **chunked(case),
    ), (NEW, PROFILED))  # fmt: skip
    settings = {"attention": model.config._attn_implementation, "cache": "its own"}
    return as_entry(THEIRS, "transformers", clock, taken, settings, clock.launched)


@torch.no_grad()
def _attached(
    bench: Decoding, case: Case, model: Any, ids: Tensor, answer: Answer, most: Rounding, loop: Loop
) -> dict[str, Any]:
    """The same call with longreach attached; its error is that of its logits."""
    from longreach.adapters.transformers import attach

    mine, found = Answer(), list[Tensor]()

    def run(prompt: Tensor, new: int, **given: Any) -> None:
        mask = torch.ones_like(prompt)
        found.append(model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, **given))

    with attach(model, loop=loop):
        run(ids[:, :WARM_UP], 4)
        clock, taken = timed(
            bench,
            lambda clock: run(ids, NEW + PROFILED, streamer=clock, logits_processor=[mine], **chunked(case)),
            (NEW, PROFILED),
        )
    require_tokens(case.name, answer, found[-1][:, ids.shape[1] :], KEPT, most)
    measured = as_entry(ATTACHED, "longreach", clock, taken, {"impl": "auto"}, clock.launched)
    return {**measured, **require_logits(case.name, answer, mine, most)}


@torch.no_grad()
def _longreach(
    bench: Decoding, case: Case, model: Any, ids: Tensor, method: AttentionMethod | None, answer: Answer,
    most: Rounding, graph: GraphOption = None,
) -> dict[str, Any]:  # fmt: skip
    """longreach.generate. method: None for dense. After the run its first steps are repeated, and these are checked."""
    from longreach.adapters.transformers import attach, shape_of
    from longreach.adapters.transformers.loop import generate

    found, captured = list[Tensor](), list[str | None]()
    with attach(model, decode=method) as session:

        def run(prompt: Tensor, clock: Clock | None) -> None:
            made = generate(
                session, prompt, max_new_tokens=NEW, eos_token_id=(), streamer=clock, graph=graph, **chunked(case)
            )
            captured.append(made.captured)
            found.append(made.tokens)

        run(ids[:, :WARM_UP], None)
        session.static_caches.clear()
        with ExitStack() as observing:  # observing slows what the host launches, pieces' attention too
            seen = observing.enter_context(observed())
            clock, taken = timed(bench, lambda clock: run(ids, clock), None, {NEW - TIMED: observing.close})
        cache = session.static_caches[len(ids)]
        (decoder,) = cache.decoders.values()
        launched = bench.launched_by(decoder, None if decoder.graph is None else seen.captured)
        require_tokens(case.name, answer, found[-1], KEPT if method is None else 1, most)
        first = found[-1][:, 0].to(ids.device)
        first[: len(answer.logits[0])] = answer.logits[0].argmax(-1).to(first)  # as transformers went on

        def repeat(count: int) -> Tensor:
            cache.drop_columns(cache.columns - ids.shape[1])
            return run_steps(decoder, first, capture=decoder.graph is not None, count=count).logits

        if method is None:
            mine = Answer(repeat(KEPT - 1).cpu().unbind(1))
            checked: dict[str, Any] = require_logits(case.name, Answer(answer.logits[1:]), mine, most)
        elif method.name in UNCHECKED:
            checked = {"error": None, "error_bound": None, "unchecked": UNCHECKED[method.name]}
        else:
            captured_logits, layers = repeat(1)[:, 0], LayerErrors()
            cache.drop_columns(cache.columns - ids.shape[1])
            eager = bench.observed_step(session, decoder, first, layers)
            verdict = judge_method(
                f"{case.name}: {method.name}", layers, eager, captured_logits, most.logits / 2,
                shape_of(model).layers, steady=method.name not in UNSTEADY,
            )  # fmt: skip
            checked = {"error": verdict.error, "error_bound": verdict.error_bound}
    settings = {"impl": "auto", "captured": captured[-1]}
    return {**as_entry(OURS, "longreach", clock, taken, settings, launched), **checked}


def require_tokens(name: str, answer: Answer, tokens: Tensor, steps: int, most: Rounding) -> float:
    """How far tokens [B, new] are behind; raises WrongResult if rounding does not explain that."""
    behind = answer.behind(tokens.cpu(), steps)
    if not behind <= most.behind:
        what = f"the logit of a chosen token is {behind:.3g} behind the best, more than {most.behind:.3g}"
        raise WrongResult(f"{name}: {what}; its time does not count")
    return behind


def require_logits(name: str, answer: Answer, mine: Answer, most: Rounding) -> dict[str, float]:
    """An entry's error, that of its logits, and its bound; raises WrongResult if the error exceeds it."""
    off = answer.off(mine)
    if not off <= most.logits:
        what = f"logits differ from transformers' by {off:.2e}, more than {most.logits:.2e}"
        raise WrongResult(f"{name}: {what}; its time does not count")
    return {"error": off, "error_bound": most.logits}


def timed(
    bench: Decoding, call: Callable[[Clock], object], profiled: tuple[int, int] | None,
    at: Mapping[int, Callable[[], object]] | None = None,
) -> tuple[Clock, dict[str, Any]]:  # fmt: skip
    """Run a generate with a clock; seconds and bytes of it. profiled, at: as `Clock` has them."""
    release(bench.device)
    clock, before = Clock(bench.device, profiled, at), allocated_bytes(bench.device)
    reset_peak(bench.device)
    started = bench.now()
    try:
        call(clock)
    finally:
        clock.close()
    memory = {"before": before, "prefill_peak": clock.prefill_peak, "decode_peak": peak_bytes(bench.device)}
    return clock, {"ttft_seconds": clock.times[1] - started, "memory": memory}


def chunked(case: Case) -> dict[str, Any]:
    return {} if case.prefill_chunk is None else {"prefill_chunk_size": case.prefill_chunk}


def as_entry(
    name: str, who: str, clock: Clock, taken: dict[str, Any], settings: dict[str, Any], launched: Launched
) -> dict[str, Any]:
    timing = Timing.of(clock.steps(TIMED), 1, "host clock, token by token", launched)
    return {"name": name, "who": who, "settings": settings, "timing": timing, **taken}
