"""The decode step of one batch over buffers that stay in place: run as it is, or captured in one CUDA graph."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.choosing import Ends, greedy
from longreach.adapters.transformers.loop.fuse import experts_on_device, fused
from longreach.adapters.transformers.step import Step
from longreach.cache import DecodeBuffers
from longreach.errors import LongreachError, Unsupported
from longreach.runtime.ledger import HostCount

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session

WARM = 2  # steps run as they are before one is captured: what is compiled or made at first use must be there by then


class Decoder:
    """One token for every sequence of a batch, again and again. Made once for a cache and a method, used by many calls.

    `start` begins a run after a prompt, `step` runs the model on the tokens chosen last and (greedily) chooses the
    next, `take` takes tokens chosen outside. All of it works on fixed buffers and reads no length from the host, so
    that the captured step is the step.
    """

    def __init__(self, session: Session, cache: LongreachCache, width: int, *, sampled: bool, fuse: str):
        self.session, self.cache, self.sampled, self.fuse = session, cache, sampled, fuse
        self.method, device = session.decode, session.model.device
        self.steps = DecodeBuffers(cache.kv, range(cache.batch), width)
        vocabulary = vocabulary_of(session.model)
        with torch.inference_mode(False):
            self.token = torch.zeros(cache.batch, dtype=torch.int64, device=device)
            self.done = torch.zeros(cache.batch, dtype=torch.bool, device=device)
            self.pad = torch.zeros((), dtype=torch.int64, device=device)
            self.ends = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.counted: tuple[HostCount, ...] = ()
        self.warm = 0
        self.capture_seconds = 0.0
        self.weights = weights_of(session.model)

    @property
    def usable(self) -> bool:
        """Whether memory and weights are where they were when the step was made."""
        return self.steps.valid and self.weights == weights_of(self.session.model)

    @contextlib.contextmanager
    def run(self, ends: Ends, room: int) -> Iterator[None]:
        """Within this block up to `room` steps may be run. Raises CapacityError."""
        self.cache.check_observed(self.method)
        before = list(self.cache.kv.lengths)
        with torch.inference_mode(False), torch.no_grad():
            self.steps.open(room)
            self.pad.fill_(ends.pad)
            self.ends.zero_()
            if ends.eos:
                self.ends[torch.tensor(ends.eos, device=self.ends.device)] = True
            self.done.zero_()
        yield
        self.steps.close()
        self.cache.mark_observed((self.method,), before)

    def take(self, chosen: Tensor) -> None:
        """These are the next tokens [B]; a sequence that has ended gets padding."""
        self.token.copy_(torch.where(self.done, self.pad, chosen))
        self.done.logical_or_(self.ends[self.token])

    def step(self, *, capture: bool) -> None:
        """One pass of the model; `logits` [B, V] then say what may come next, and (greedy) `token` what comes."""
        if self.graph is None and capture and self.warm >= WARM:
            self._capture()
        if self.graph is not None and capture:
            self.graph.replay()
        else:
            with self._made_ready(capture):
                self._pass()
            self.warm += 1
        self.session.ledger.commit_on_host(self.counted)
        self.steps.count()
        self.cache.grow(1)

    def _pass(self) -> None:
        """What is captured."""
        session, cache = self.session, self.cache
        cache.as_if = self.steps.capacity - 1  # masks found for a full cache hold for any length
        session.static_step = self._step()
        try:
            session.ledger.mask_rows(self.done)  # of who has ended a row goes through the model, and nobody needs it
            out = session.model(
                input_ids=self.token[:, None],
                position_ids=self.steps.append.pos[:, None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        except BaseException:
            session.ledger.abandon()
            raise
        finally:
            session.static_step = cache.as_if = None
        self.counted = session.ledger.commit_on_device()
        self.steps.advance()
        self.logits = out.logits[:, -1]
        if not self.sampled:
            self.take(greedy(self.logits))

    def _step(self) -> Step:
        layers = self.session.new_pass(self.cache, decoding=True)
        shape = (self.cache.batch, 1)
        return Step(layers, self.session.facts, shape, None, self.steps.append, self.cache, static=True)

    def _capture(self) -> None:
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        try:
            with self._made_ready(True), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._pass()
        except BaseException as error:
            self.cache.abandon(self._step())  # the pass could not: nothing reaches the device while a stream captures
            if isinstance(error, LongreachError) or not isinstance(error, RuntimeError):
                raise
            cause: BaseException = error
            while cause.__context__ is not None:  # ending the capture fails too, and says less
                cause = cause.__context__
            raise Unsupported(
                f"the decode step of {type(self.session.model).__name__} with {self.method.name} cannot be captured in "
                f"a CUDA graph: {_first_line(cause)} ({_where(cause)}); use graph=False"
            ) from error
        self.graph = graph
        self.capture_seconds = time.perf_counter() - started

    @contextlib.contextmanager
    def _made_ready(self, capture: bool) -> Iterator[None]:
        """Within this block the model is as it is captured; the steps before that are to compile what it needs."""
        model = self.session.model
        with contextlib.ExitStack() as changes:
            if capture:
                changes.enter_context(experts_on_device(model))
                changes.enter_context(fused(model, self.fuse))
            yield


def vocabulary_of(model: Any) -> int:
    """Entries of the model's logits."""
    return model.get_output_embeddings().weight.shape[0]


def weights_of(model: Any) -> int:
    """Changes when a parameter moves: a captured step has read where it lay."""
    return hash((model.training, *(p.data_ptr() for p in model.parameters())))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _where(error: BaseException) -> str:
    """The innermost line of the model's or a method's code on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "transformers/models" in f.filename or "longreach/" in f.filename]
    frame = (ours or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}"
