"""Methods compared with dense on one prompt: divergence of next-token distributions, bytes read, time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import (
    CHUNK,
    Advance,
    Answer,
    FusedPrompt,
    FusionReport,
    Reader,
    Session,
    attach,
    check_host,
    check_length,
    check_method,
    planned_shape,
    shape_of,
    stop_tokens,
    unapplied,
    unfit_methods,
)
from longreach.cache import CacheConfig, MemoryUse
from longreach.errors import InvalidInput
from longreach.evals.layers import LayerErrors, sample
from longreach.evals.methods import DENSE, Spec, by_reading, pairings, refuse_slots
from longreach.evals.plans import plans_of
from longreach.evals.progress import Progress, unseen
from longreach.evals.read_shares import ReadShares
from longreach.evals.sampling import bars_of, mean_bars, mean_of, sampling_of
from longreach.methods.registry import choose
from longreach.methods.slots import Fusion
from longreach.runtime import PlanReport


@dataclass(frozen=True)
class Comparison:
    """One method compared with dense over the same tokens: dense's own greedy continuation, fed to both.

    kl: mean over the decode steps of KL(dense || method) of the next-token distributions, in nats (natural log);
    kl_steps: its terms, the first of them for the token right after the prompt, which no decode step made.
    first_divergence: the first of these distributions whose most likely token is not dense's, from 0; None if none.
    read_seconds: reading the prompt, once for all methods with the same prefill: the time to the first token.
    seconds_per_token: mean decode step past a warm-up, None where all went into setting the loop up.
    layer_error: of decode steps, see `LayerErrors.to_json`; prefill_layer_error: of a sample of the prompt's rows, None
    where the prompt is read densely. Both None unless requested; with them, times include measuring them.
    evict, fuse: configurations, None for none. fusion: what became of the tokens of a prompt with stored chunks.
    memory: where keys and values lay, if some were in host memory. sampling, error_bars: of decode steps of a method
    that samples keys, see `evals.sampling.mean_of` and `mean_bars`; else None. plans: those of the method that the
    session found or made itself.
    """

    label: str
    prefill: dict[str, Any]
    decode: dict[str, Any]
    kl: float
    kl_steps: tuple[float, ...]
    first_divergence: int | None
    steps: int
    prefill_reads: ReadShares | None
    decode_reads: ReadShares | None
    read_seconds: float
    seconds_per_token: float | None
    layer_error: dict[str, Any] | None = None
    prefill_layer_error: dict[str, Any] | None = None
    evict: dict[str, Any] | None = None
    fuse: dict[str, Any] | None = None
    fusion: FusionReport | None = None
    memory: MemoryUse | None = None
    sampling: dict[str, Any] | None = None
    error_bars: dict[str, Any] | None = None
    plans: tuple[PlanReport, ...] = ()


class Compare:
    """A prompt, and the methods to be compared on it over at most `steps` decode steps.

    methods: None for all, but those that do not fit the model without options: `left_out` names them, with the reason.
    options: per method name. specs: instead of both, methods as `evals.methods` reads them, dense first.
    layers: measure errors layer by layer too, in steps captured piecewise at most. graph: as in `generate`. past_end:
    go on for all steps where dense attention's answer ends sooner.
    fused: the same prompt with stored chunks, for specs that fuse them. Each way of reading is then timed the second
    time, so that what happens once (kernels compiled, rotations found) is in no time.
    cache: its place in memory, the same for all methods; its capacity is that of prompt and steps.
    not_applied: settings of the model's generation config that its greedy answer is made without.
    Raises InvalidInput for a prompt too long or no steps, UnknownName for a method or option that does not exist.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompt: Sequence[int], *, steps: int = 32,
        methods: Sequence[str] | None = None, options: Mapping[str, Mapping[str, Any]] | None = None,
        specs: Sequence[Spec] | None = None, layers: bool = False, graph: bool | None = None,
        past_end: bool = False, fused: FusedPrompt | None = None, cache: CacheConfig | None = None,
    ):  # fmt: skip
        if steps < 1:
            raise InvalidInput(f"steps: expected at least 1, got {steps}")
        check_length(model, len(prompt), steps)
        self.stop = () if past_end else stop_tokens(model, tokenizer)
        self.model, self.prompt, self.steps = model, prompt, steps
        self.options, self.layers, self.graph = options or {}, layers, graph
        self.not_applied = unapplied(model, sampled=False)
        self.left_out = dict[str, str]()
        if methods is None and specs is None:
            self.left_out = {n: why for n, why in unfit_methods(model).items() if n not in self.options}
        chosen = pairings(methods, self.left_out)
        for name in self.options:
            if not any(name == prefill or name in decodes for prefill, decodes in chosen):
                raise InvalidInput(f"options for {name}, which is not compared; name it among the methods")
        self.specs = list(specs) if specs is not None else [self._spec(p, d) for p, decodes in chosen for d in decodes]
        if fused is None:
            refuse_slots(self.specs, ("fuse",), "a --document is read whole; give --documents FILE instead")
        elif fused.ids != tuple(prompt):
            raise InvalidInput("fused: expected the prompt's own tokens, or methods would answer different prompts")
        self.fused = fused
        self.cache = replace(cache or CacheConfig(), capacity=len(prompt) + steps)
        for spec in self.specs:  # now, not when it is their turn
            check_method(model, spec.prefill, "prefill")
            check_method(model, spec.decode)
            if spec.fuse is not None:
                spec.fuse.check(shape_of(model))
            check_host(self.cache, spec.evict, shape_of(model))
        self.tokens: list[int] = []
        self.reference: list[Tensor] = []

    def _spec(self, prefill: str, decode: str) -> Spec:
        label = decode if prefill == DENSE else f"{prefill}/{decode}"
        return Spec(label, choose("prefill", prefill, **self._options(prefill)),
                    choose("decode", decode, **self._options(decode)))  # fmt: skip

    def _options(self, name: str) -> dict[str, Any]:
        return dict(self.options.get(name, {}))

    def run(self, chunk: int | None = CHUNK, progress: Progress = unseen) -> Iterator[Comparison]:
        """Compare method by method; dense comes first.

        chunk: prompt tokens per pass where the prompt is not fused; None: all in one pass, the fastest where it fits
        into memory. Raises OutOfMemory where it does not.
        """
        for specs in by_reading(self.specs):
            fuse, prefill, evict = specs[0].fuse, specs[0].prefill, specs[0].evict
            with attach(self.model, fuse=fuse, prefill=prefill, evict=evict, cache=self.cache) as session:
                session.prepare(*(spec.decode for spec in specs))
                reader = Reader(session, chunk or len(self.prompt), graph=self.graph)
                if self.fused is not None:
                    self._read(reader, fuse, progress)
                    reader.cache.empty()
                    session.reset_report()
                    reader.read_seconds = 0.0
                read_errors = self._prefill_errors() if prefill.name != DENSE else None
                session.on_layer = read_errors
                first, fusion = self._read(reader, fuse, progress)
                reads = [ReadShares.of(session.report(spec.decode), "prefill") for spec in specs]
                for spec, prefill_reads in zip(specs, reads, strict=True):
                    session.switch(spec.decode)
                    reader.warm_up(first, self.steps + 1)
                    errors = LayerErrors(shape_of(self.model), self.model.device, "decode") if self.layers else None
                    session.on_layer = errors
                    with reader.rollback(spec.decode), progress(f"decoding, {spec.label}", self.steps) as advance:
                        rows, seconds = self._decode(reader, first, advance)
                    session.on_layer = None
                    yield self._compared(
                        spec, session, prefill_reads, rows, reader.read_seconds, seconds, read_errors, errors, fusion
                    )

    def _read(self, reader: Reader, fuse: Fusion | None, progress: Progress) -> tuple[Tensor, FusionReport | None]:
        """Logits [V] after the prompt, and the account of its tokens if it was fused."""
        session = reader.session
        with progress(f"reading, {session.prefill.name if fuse is None else fuse.name}", len(self.prompt)) as advance:
            if fuse is None:
                return reader.read(self.prompt, advance), None
            assert self.fused is not None
            return reader.read_fused(self.fused)

    def _prefill_errors(self) -> LayerErrors | None:
        if not self.layers:
            return None
        device = self.model.device
        return LayerErrors(shape_of(self.model), device, "prefill", sample(len(self.prompt), device))

    def _decode(self, reader: Reader, first: Tensor, advance: Advance) -> tuple[list[Tensor], float | None]:
        """Log-probabilities after the prompt and after each token of dense's answer, which the first call makes."""
        rows: list[Tensor] = []
        leading, answer = not self.reference, Answer()
        forced = torch.tensor([*self.tokens, 0], device=first.device)  # the last is chosen, but never read

        def choose(logits: Tensor) -> Tensor:
            rows.append(logits[0].double().log_softmax(0))
            return rows[-1].argmax(0, keepdim=True) if leading else forced[len(rows) - 1 : len(rows)]

        most = self.steps if leading else len(self.tokens)
        with closing(reader.decode(first, most + 1, answer, choose=choose)) as chosen:
            for step, token in enumerate(chosen):
                if step == most or (leading and step and token in self.stop):
                    break
                if leading:
                    self.tokens.append(token)
                advance(1)
        rows = [row.cpu() for row in rows[: len(self.tokens) + 1]]  # without those of steps past the end
        if leading:
            self.reference = rows
        return rows, answer.seconds_per_token

    def _compared(
        self,
        spec: Spec,
        session: Session,
        prefill_reads: ReadShares | None,
        rows: list[Tensor],
        read_seconds: float,
        seconds: float | None,
        read_errors: LayerErrors | None,
        errors: LayerErrors | None,
        fusion: FusionReport | None,
    ) -> Comparison:
        pairs = list(zip(self.reference, rows, strict=True))
        kl = [float(divergence(a, b)) for a, b in pairs]
        differs = [i for i, (a, b) in enumerate(pairs) if a.argmax() != b.argmax()]
        steps, report = len(rows) - 1, session.report()
        return Comparison(
            spec.label,
            spec.prefill.to_json(),
            spec.decode.to_json(),
            sum(kl[1:]) / steps,
            tuple(kl),
            differs[0] if differs else None,
            steps,
            prefill_reads,
            ReadShares.of(report, "decode"),
            read_seconds,
            seconds,
            errors.to_json() if errors else None,
            read_errors.to_json() if read_errors else None,
            spec.evict.to_json() if spec.evict else None,
            spec.fuse.to_json() if spec.fuse else None,
            fusion,
            report.memory,
            mean_of([sampled] if (sampled := sampling_of(report)) else []),
            mean_bars([bars] if (bars := bars_of(report)) else []),
            plans_of(report, spec, planned_shape(self.model)),
        )


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """[...]: KL(a || b) of log-probabilities [..., V], nats; tokens that `a` excludes (-inf) add nothing."""
    terms = torch.where(a == -torch.inf, 0.0, a.exp() * (a - b))
    return terms.sum(-1).clamp(min=0.0)  # rounding may leave a zero below zero
