"""A run of the decode step: an answer's tokens one by one, and the time they took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop import compile as compiling
from longreach.adapters.transformers.loop.async_readback import read_back
from longreach.adapters.transformers.loop.decoder import WARM, Capture, Decoder
from longreach.adapters.transformers.loop.host_attend import host_attend
from longreach.adapters.transformers.loop.sampling import Ends, greedy
from longreach.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session

GraphOption = bool | Literal["piecewise"] | None  # as in `generate`
Choose = Callable[[Tensor], Tensor]  # the next tokens int64 [B] from logits [B, V]


class DecodeRun:
    """One answer for each sequence of a batch, of up to `new` tokens.

    choose: tokens from logits, called on the host at every step; `greedy` is part of the step instead.
    graph: whether the step is captured, as in `generate`. compile: see `loop.compile`.
    exactly: steps past an end must be rolled back, which state may refuse; so with state, and tokens that end an
    answer, no step runs ahead.
    finished: bool [B] on the device, sequences that have ended with the token that `choose` has just given; in place of
    `ends`. With it and `exactly` no step runs ahead.

    Afterwards: captured, how the steps ran ("full": one CUDA graph; "piecewise": one for each stretch between two
    attentions; None: uncaptured). not_captured_reason: why they were not one graph. setup_seconds: of the first steps,
    which may load or compile code, and of capturing; 0 if an earlier run did that. evict_seconds: of eviction, between
    the first token and the first step. decode_seconds: of the other `steps` steps, from the choice of the first token
    to the last, including the time of the tokens' reader.
    Raises UnknownName (compile) and Unsupported (capture where there can be none, or compile without a captured step).
    """

    def __init__(
        self,
        session: Session,
        new: int,
        ends: Ends,
        choose: Choose = greedy,
        *,
        graph: GraphOption = None,
        compile: str = "auto",
        exactly: bool = False,
        finished: Callable[[], Tensor] | None = None,
    ):
        self.session, self.new, self.ends, self.choose = session, new, ends, choose
        self._capture, self._why_not = capture_for(session, graph)
        self.compile = compiling.resolve(compile, captured=self._capture is not None)
        if self.compile != "none" and self._capture is None:
            raise Unsupported(
                f"compile={compile!r} needs a captured step, and this one is not: {self._why_not}; leave compile out"
            )
        self._exactly, self._finished = exactly, finished
        self._eos = torch.tensor(ends.eos, dtype=torch.int64)
        self._decoder: Decoder | None = None
        self._replayed = self._setup_steps = self._steps = 0
        self.setup_seconds = self.evict_seconds = self.decode_seconds = 0.0

    @property
    def captured(self) -> Capture | None:
        """How the steps past the first ones were captured."""
        return self._capture if self._replayed else None

    @property
    def not_captured_reason(self) -> str | None:
        """Why they were not one CUDA graph; None where they were."""
        if self._capture is not None and not self._replayed:
            return f"the answer was over within {WARM} steps"
        return self._why_not

    @property
    def steps(self) -> int:
        """Steps of the model past those of the setup."""
        return self._steps - self._setup_steps

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of these; None where there was none."""
        return self.decode_seconds / self.steps if self.steps else None

    @torch.no_grad()
    def tokens(self, cache: LongreachCache, logits: Tensor) -> Generator[Tensor]:
        """int64 [B] on the host, again and again: first chosen from the prompt's logits [B, V], until all have ended.

        cache holds the prompt. To be closed where it is not read to its end (contextlib.closing).
        The first token is known from the prompt. It comes before keys of the prompt are evicted, before the CPU's and
        the link's times are measured, and before the step is made. An answer of one token evicts nothing: the next step
        over the cache does.
        Raises CapacityError, OutOfMemory, Unsupported (a step that cannot be captured); before the first token, as
        `LongreachCache.check_eviction`.
        """
        self.session.make_plans(cache)
        started, early = now(self.session.model), cache.eviction_due
        try:
            if early:
                cache.check_eviction()
            chosen, count = self.choose(logits), 1
            first, done = self._ended(self._noted(chosen).to("cpu", copy=True))
            yield first
            if count == self.new or bool(done.all()):
                return
            paused = now(self.session.model)
            if early:
                cache.evict_prompt(room=self.new - 1)
                self.evict_seconds = now(self.session.model) - paused
            started += now(self.session.model) - paused
            paused = now(self.session.model)
            make = self._decoder_of(cache)
            chosen_before = len(cache.attends)
            with contextlib.ExitStack() as run:
                run.enter_context(host_attend(self.session, cache, self.new, chosen, make, capture=self._capture))
                if len(cache.attends) > chosen_before:  # steps were measured
                    self.setup_seconds += now(self.session.model) - paused
                decoder = self._decoder = make()
                run.enter_context(decoder.run(self.ends, self.new - 1))
                decoder.take(chosen)
                exactly = self._exactly or cache.recurrent is not None  # whose state cannot be cut by some steps
                kept = cache.states.states() or cache.recurrent is not None
                wait = exactly and (self._finished or (self.ends.eos and kept))
                back = read_back(self._noted(decoder.token), ahead=0 if wait else None)
                while True:
                    last = self._setting_up or count + back.pending >= self.new
                    for noted in back.ready(last=last):
                        count += 1
                        token, now_done = self._ended(noted)
                        done |= now_done
                        yield token
                        if count == self.new or bool(done.all()):
                            return
                    self._step(decoder)
                    back.note(self._noted(decoder.token))
        finally:
            self.decode_seconds = now(self.session.model) - started - self.setup_seconds

    def _noted(self, token: Tensor) -> Tensor:
        """What is read back of a step: its tokens [B], with `finished` also whether each was the last, [2, B]."""
        return token if self._finished is None else torch.stack([token, self._finished().to(token)])

    def _ended(self, noted: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B], and bool [B]: which of them end an answer. On the host."""
        if self._finished is not None:
            return noted[0], noted[1].bool()
        return noted, torch.isin(noted, self._eos)

    def _decoder_of(self, cache: LongreachCache) -> Callable[[], Decoder]:
        return lambda: decoder_for(
            self.session, cache, self.new, sampled=self.choose is not greedy, compile=self.compile,
            capture=self._capture,
        )  # fmt: skip

    @property
    def _setting_up(self) -> bool:
        """Whether the next step is part of the setup. It takes long, so earlier tokens are read first."""
        decoder_ready = self._decoder is not None and self._decoder.set_up
        return not decoder_ready

    def _step(self, decoder: Decoder) -> None:
        setup = self._setting_up
        started = now(self.session.model) if setup else 0.0
        decoder.step(capture=self._capture is not None)
        if self.choose is not greedy:
            assert decoder.logits is not None
            decoder.take(self.choose(decoder.logits))
        self._steps += 1
        self._replayed += decoder.graph is not None
        if setup:
            self.setup_seconds += now(self.session.model) - started
            self._setup_steps += 1


def capture_for(session: Session, graph: GraphOption) -> tuple[Capture | None, str | None]:
    """How the decode step is captured, and why it is not one graph, else None.

    Raises Unsupported if capture was requested and the device has no CUDA graphs.
    """
    if graph is False:
        return None, "graph=False"
    if session.facts.hybrid:
        why = "the model has recurrent layers, whose state the captured step does not hold"
        if graph:
            raise Unsupported(f"graph={graph!r}: {why}; leave graph out")
        return None, why
    device = session.model.device.type
    if device != "cuda":
        why = f"the model is on the {device}, which has no CUDA graphs"
        if graph:
            raise Unsupported(f"graph={graph!r}: {why}; leave graph out")
        return None, why
    if graph == "piecewise":
        return "piecewise", "graph='piecewise'"
    if session.decode.capture != "full":
        name, declared = session.decode.name, session.decode.capture
        return "piecewise", f"{name} works on the host between layers (capture = {declared!r})"
    if session.on_layer is not None:
        return "piecewise", "session.on_layer is set, and runs on the host in every layer"
    return "full", None


def decoder_for(
    session: Session, cache: LongreachCache, room: int, *, sampled: bool, compile: str, capture: Capture | None
) -> Decoder:
    """The step for this cache and method, for `room` tokens more: that of an earlier run where its buffers fit."""
    config, need = cache.kv.config, max(cache.kv.lengths) + room
    name = (session.decode, sampled, compile, capture, cache.kv.attend.by)
    found: Decoder | None = cache.decoders.get(name)
    if found is not None and found.usable and found.steps.capacity >= need:
        return found
    cache.decoders.pop(name, None)
    width = 1
    if config.kind == "paged":
        width = -(-(config.capacity or need) // config.page)
        width = width if config.capacity else 1 << (width - 1).bit_length()
    made = cache.decoders[name] = Decoder(session, cache, width, sampled=sampled, compile=compile, capture=capture)
    return made


def count_of(name: str, value: object) -> int:
    """`value`, checked to be a count. Raises InvalidInput."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(f"{name}: expected a count >= 1, got {value!r}")
    return value


def now(model: PreTrainedModel) -> float:
    """Wall-clock seconds, after waiting for the model's device."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
