"""The decode step of one batch over buffers at fixed addresses, run directly or captured in CUDA graphs."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.compile import compiled_parts, experts_on_device
from longreach.adapters.transformers.loop.model_state import model_state
from longreach.adapters.transformers.loop.pieces import Pieces, cuda_graphs
from longreach.adapters.transformers.loop.sampling import Ends, greedy
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.step import Step
from longreach.cache import DecodeBuffers
from longreach.errors import LongreachError, Unsupported
from longreach.runtime.collector import collector_off
from longreach.runtime.ledger import HostCount

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session

Capture = Literal["full", "piecewise"]
WARM = 2  # uncaptured warm-up steps: compilation and allocations at first use must precede capture


class Decoder:
    """A step that decodes one token for every sequence of a batch. Made once for a cache and a method, then reused.

    `start` begins a run after a prompt, `step` runs the model on the tokens chosen last and (greedily) chooses the
    next, `take` takes tokens chosen outside. All of it works on fixed buffers and reads no length from the host, so
    that the captured step is the step.

    capture: how `step` is captured on request: "full", one CUDA graph; "piecewise", a graph for each
    stretch between two attentions, with attention itself launched by the host at every step; None: it is not.
    """

    def __init__(
        self, session: Session, cache: LongreachCache, width: int, *, sampled: bool, compile: str,
        capture: Capture | None,
    ):  # fmt: skip
        self.session, self.cache, self.sampled, self.compile, self.capture = session, cache, sampled, compile, capture
        self.method, device = session.decode, session.model.device
        self.steps = DecodeBuffers(cache.kv, range(cache.batch), width)
        vocabulary = vocabulary_of(session.model)
        with torch.inference_mode(False):
            self.token = torch.zeros(cache.batch, dtype=torch.int64, device=device)
            self.done = torch.zeros(cache.batch, dtype=torch.bool, device=device)
            self.pad = torch.zeros((), dtype=torch.int64, device=device)
            self.columns = torch.zeros((), dtype=torch.int64, device=device)
            self.ends = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | Pieces | None = None
        self.counted: tuple[HostCount, ...] = ()
        self.warm = 0
        self.capture_seconds = 0.0
        self.state = model_state(session.model)
        self._recorded: Step | None = None  # the step that the pieces' host work belongs to

    @property
    def usable(self) -> bool:
        """Whether memory is where it was, and the model as it was but for values of weights, when the step was made."""
        return self.steps.valid and self.state == model_state(self.session.model)

    @property
    def set_up(self) -> bool:
        """Whether code is loaded and compiled, and the step captured if it is to be: later steps repeat it."""
        if self.capture is None:
            return self.warm > 0
        return self.graph is not None

    @contextlib.contextmanager
    def run(self, ends: Ends, room: int) -> Iterator[None]:
        """Within this block up to `room` steps may be run. Raises CapacityError.

        At its end raises HostCallFailed if the CPU failed in a step, also if the reader of the tokens stops early. An
        error within the block, Ctrl-C included, is raised in its place.
        """
        self.cache.check_observed(self.method)
        self._clear_calls()
        self.session.memory.note(self.cache, decoding=True)
        before = list(self.cache.kv.lengths)
        with torch.inference_mode(False), torch.no_grad():
            self.steps.open(room)
            self.pad.fill_(ends.pad)
            self.columns.fill_(self.cache.columns)
            self.ends.zero_()
            if ends.eos:
                self.ends[torch.tensor(ends.eos, device=self.ends.device)] = True
            self.done.zero_()
        try:
            yield
        except GeneratorExit as stop:
            cause: BaseException | None = stop
            while isinstance(cause, GeneratorExit):  # one for each generator around this one
                cause = cause.__context__
            if cause is None:
                self._check_calls(wait=True)
                self.session.memory.note_calls(self.cache)
            else:  # an error of the reader, which closes the answer
                self._clear_calls(wait=True)
            raise
        except BaseException:
            self._clear_calls(wait=True)
            raise
        self._check_calls(wait=True)
        self.session.memory.note_calls(self.cache)
        self.steps.close()
        self.cache.mark_observed((self.method,), before)

    def take(self, chosen: Tensor) -> None:
        """These are the next tokens [B]; a sequence that has ended gets padding."""
        self.token.copy_(torch.where(self.done, self.pad, chosen))
        self.done.logical_or_(self.ends[self.token])

    def step(self, *, capture: bool) -> None:
        """One pass of the model: sets `logits` [B, V] of the next token and, if greedy, `token`.

        Raises Unsupported for a step that cannot be captured. After any error the step was not made. Raises
        HostCallFailed if the CPU failed in an earlier step: the tokens since then are not right.
        """
        self._check_calls()
        assert self.capture is not None or not capture
        if not capture or (self.graph is None and self.warm < WARM):
            with self._made_ready(capture):
                self._pass(self._step())
            self.warm += 1
        elif self.graph is None and self.capture == "piecewise":
            self._record()
        else:
            if self.graph is None:
                self._capture()
            self._replay()
        self.session.ledger.commit_on_host(self.counted)
        self.steps.count()
        self.cache.grow(1)

    def _check_calls(self, *, wait: bool = False) -> None:
        """Raise HostCallFailed if attention on the CPU failed. wait: until the steps so far are done."""
        if self.cache.kv.attend.by == "cpu":
            if wait and self.token.is_cuda:
                torch.cuda.synchronize(self.token.device)
            self.cache.kv.calls.check()

    def _clear_calls(self, *, wait: bool = False) -> None:
        """Drop errors of attention on the CPU: the answer that they belong to is over. wait: as in `_check_calls`."""
        if self.cache.kv.attend.by == "cpu":
            if wait and self.token.is_cuda:
                with contextlib.suppress(RuntimeError):  # of a lost device: another error is being raised
                    torch.cuda.synchronize(self.token.device)
            self.cache.kv.calls.clear()

    def _pass(self, step: Step, pieces: Pieces | None = None) -> None:
        """Run the step. pieces: records it while it runs; None: all of it may be captured."""
        session, cache = self.session, self.cache
        cache.as_if = self.steps.capacity - 1  # masks found for a full cache hold for any length
        cache.device_columns = self.columns
        session.next_step = step
        try:
            if pieces is None:
                self._begin(step)
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
            session.next_step = cache.as_if = cache.device_columns = None
        if pieces is None:
            self._settle()
        else:
            pieces.host(self._settle)
        self.steps.advance()
        if cache.layers_asked:
            self.columns.add_(1)
        self.logits = out.logits[:, -1]
        if not self.sampled:
            self.take(greedy(self.logits))

    def _begin(self, step: Step) -> None:
        """Before the layers, at every step that the host takes part in."""
        step.layers.restart()
        step.layers.on_layer = self.session.on_layer
        self.session.ledger.mask_rows(self.done)  # a sequence that has ended still goes through the model, uncounted

    def _settle(self) -> None:
        """After the layers: their counts go to the ledger, with `done` as it was when they ran."""
        self.counted = self.session.ledger.commit_on_device()

    def _step(self) -> Step:
        layers = self.session.new_pass(self.cache, decoding=True)
        shape = (self.cache.batch, 1)
        return Step(layers, self.session.facts, shape, None, self.steps.append, self.cache, static=True)

    def _capture(self) -> None:
        """Record the step in one graph; nothing runs."""
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        try:
            with self._made_ready(True), collector_off(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._pass(self._step())
        except BaseException as error:
            self.cache.abandon(self._step())  # the pass could not: nothing reaches the device while a stream captures
            cause: BaseException = error
            while cause.__context__ is not None:  # ending the capture fails too, with a less useful error
                cause = cause.__context__
            self._refuse(error, cause)
            raise
        self.graph = graph
        self.capture_seconds = time.perf_counter() - started

    def _record(self) -> None:
        """Record the step in pieces, and run it."""
        started = time.perf_counter()
        pieces, step = Pieces(cuda_graphs(self.token.device)), self._step()
        step.cut = pieces.cut
        self._begin(step)
        try:
            with self._made_ready(True), pieces.recording():
                self._pass(step, pieces)
        except BaseException as error:
            self._undo()
            if pieces.failed_in_graph:  # else the host work failed, as it would have in an uncaptured step
                self._refuse(error, error)
            raise
        self.graph, self._recorded = pieces, step
        self.capture_seconds = time.perf_counter() - started

    def _replay(self) -> None:
        assert self.graph is not None
        if self._recorded is None:
            self.graph.replay()
            return
        with self.session._exclusive(), memory_errors():
            try:
                self._begin(self._recorded)
                self.graph.replay()
            except BaseException:
                self._undo()
                raise

    def _undo(self) -> None:
        """The step failed on its way: nothing of it counts."""
        self.session.ledger.abandon()
        self.cache.abandon(self._step())

    def _refuse(self, error: BaseException, cause: BaseException) -> None:
        """Raise Unsupported if `error` means that the step cannot be captured; it was caused by `cause`."""
        if isinstance(error, RuntimeError) and not isinstance(error, LongreachError):
            raise Unsupported(
                f"the decode step of {type(self.session.model).__name__} with {self.method.name} cannot be captured in "
                f"a CUDA graph: {_first_line(cause)} ({_where(cause)}); use graph=False"
            ) from error

    @contextlib.contextmanager
    def _made_ready(self, capture: bool) -> Iterator[None]:
        """Within this block the model is as it is captured; the steps before that are to compile what it needs."""
        model = self.session.model
        with contextlib.ExitStack() as changes:
            if capture:
                changes.enter_context(experts_on_device(model))
                changes.enter_context(compiled_parts(model, self.compile))
            yield


def vocabulary_of(model: Any) -> int:
    """Entries of the model's logits."""
    return model.get_output_embeddings().weight.shape[0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _where(error: BaseException) -> str:
    """The innermost line of the model's or a method's code on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "transformers/models" in f.filename or "longreach/" in f.filename]
    frame = (ours or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}"
