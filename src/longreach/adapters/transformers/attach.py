"""attach: replace a model's attention by methods, and restore the model exactly afterwards."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from longreach.adapters.transformers.attention import NAME
from longreach.adapters.transformers.automatic_plans import PlanSession
from longreach.adapters.transformers.cache_name import CACHE, renamed
from longreach.adapters.transformers.checks import (
    cache_windows,
    check_chunks,
    check_host,
    check_host_attend,
    check_levels,
    check_model,
    check_pass,
    decoder_of,
    text_config,
)
from longreach.adapters.transformers.generate import (
    SERVING,
    PhaseTracker,
    check_thread,
    foreign_cache,
    refuse_serving,
    wrap_generate,
)
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.hybrid import facts_of, numbered
from longreach.adapters.transformers.latent import EXPAND, check_kernels, kept_apart
from longreach.adapters.transformers.mask import Mask
from longreach.adapters.transformers.memory_notes import MemoryNotes
from longreach.adapters.transformers.oom import memory_errors, stream_captures
from longreach.adapters.transformers.options import refuse_options
from longreach.adapters.transformers.padding import real_tokens
from longreach.adapters.transformers.recurrent import recurrent_pass
from longreach.adapters.transformers.registration import register, release
from longreach.adapters.transformers.rotary import attention_modules
from longreach.adapters.transformers.rotary_hook import note_rotary
from longreach.adapters.transformers.session_caches import SessionCaches
from longreach.adapters.transformers.step import Step, entered, plain_append
from longreach.cache import CacheConfig
from longreach.errors import ConcurrentUse, InvalidInput, UnknownName, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.model_config import attention_layers
from longreach.methods.registry import choose, choose_eviction, choose_fusion
from longreach.methods.slots import Eviction, Fusion, check_eviction, check_fusion
from longreach.ops.attend import IMPLEMENTATIONS
from longreach.runtime import Ledger, Pass, Report, Segment
from longreach.runtime.forward import LayerHook

MARK = "_longreach_session"
Loop = Literal["auto", "captured", "plain"]
ATTENTION = "_attn_implementation_internal"  # the field of transformers' configurations that names their attention
_ABSENT = object()


def attach(
    model: PreTrainedModel,
    *,
    fuse: str | Fusion | None = None,
    prefill: str | AttentionMethod | None = None,
    decode: str | AttentionMethod | None = None,
    evict: str | Eviction | None = None,
    cache: CacheConfig | None = None,
    impl: str = "auto",
    loop: Loop = "auto",
    **unknown: Any,
) -> Session:
    """A session in which methods compute `model`'s attention until it is closed (use it with `with`).

    fuse: how prompts that are read from stored chunks (`fusing.read`) use them: a method, or None for none.
        Recomputed tokens attend densely, so that prefill must be dense.
    prefill, decode: a method, or None for dense. A pass of one token per sequence over a non-empty cache is decode;
        inside generate, every pass over the prompt is prefill.
        A method is a configured one, `Quest(k=0.2)`, or text as on the command line: "quest k=0.2".
    evict: which keys each layer and KV head keeps once a prompt is read: a method, or None for all. Keys are evicted
        after the first token, before the first decode step. Evicted keys are gone for later questions over the same
        prompt too.
    cache: layout and growth of the KV cache, and with `CacheConfig(host=True)` its place in host memory.
    impl: "auto", or the name of an implementation of `ops.attend`, such as "reference" or "triton". A method's other
        ops use the one of the same name if they have it, else "auto". "numba" is for `ops.attend` only.
        On a GPU, sequences of different lengths share the work evenly up to 1024 sequences x KV heads. A larger batch
        takes as long as its longest sequence.
    loop: who steps through an answer in model.generate. "auto": longreach, by captured steps as in longreach.generate,
        where that gives the tokens of transformers' own loop, else transformers; the report names the reason.
        "captured": the same, but where transformers would have to, Unsupported. "plain": transformers.

    The model is used as before: forward, generate (greedy, sampling, padding, prefill_chunk_size).
    Raises UnknownName, InvalidInput, Unsupported (names the feature of the model that longreach lacks) and
    ConcurrentUse (already attached). After an error the model is unchanged.
    """
    refuse_options("attach", unknown, {"decode": decode, "prefill": prefill, "fuse": fuse, "evict": evict})
    eviction = choose_eviction(evict)
    fusion, method = choose_fusion(fuse), choose("prefill", prefill)
    check_fusion(fusion, method)
    if loop not in get_args(Loop):
        raise UnknownName("loop", str(loop), get_args(Loop))
    return Session(model, method, choose("decode", decode), cache or CacheConfig(), impl, fusion, eviction, loop)


def detach(model: PreTrainedModel) -> None:
    """Close the session that is attached to a model. Without one, nothing happens.

    For a session whose object was lost. Raises InvalidInput for what is no transformers model, ConcurrentUse within a
    forward pass of the model.
    """
    session = decoder_of(model).__dict__.get(MARK)
    if session is not None:
        session.close()


def _needs_rotary(method: AttentionMethod) -> bool:
    """Whether a method needs the rotation of each layer."""
    return method.needs_pre_rope or method.needs_frequencies


def _check_model(model: PreTrainedModel, decoder: PreTrainedModel, *methods: AttentionMethod) -> None:
    """Raise Unsupported where the model is not of a kind that longreach, or one of the methods, can compute."""
    rotary, frequencies = (any(each) for each in zip(*((m.needs_pre_rope, m.needs_frequencies) for m in methods)))
    check_model(model, decoder, rotary=rotary, frequencies=frequencies)


class Session(SessionCaches):
    """A model with methods attached, as `attach` returns it. `close`, or leaving `with`, restores the model."""

    def __init__(
        self, model: PreTrainedModel, prefill: AttentionMethod, decode: AttentionMethod, cache: CacheConfig, impl: str,
        fuse: Fusion | None = None, evict: Eviction | None = None, loop: Loop = "auto",
    ):  # fmt: skip
        decoder = decoder_of(model)
        if MARK in decoder.__dict__ or decoder.config._attn_implementation == NAME:
            raise ConcurrentUse(
                f"{type(model).__name__}, or a model it shares its config with, has longreach attached already; "
                f"close that session first, or call longreach.detach(model)"
            )
        _check_model(model, decoder, prefill, decode)
        check_levels(model, evicts=evict is not None, prefill=prefill.name, decode=decode.name)
        self._plans = PlanSession(model, fused=fuse is not None)
        self._shape = self._plans.shape
        for method in (prefill, decode):
            method.check(self._shape)
        prefill.check_prompts(self._shape)
        if fuse is not None:
            check_chunks(model)
            fuse.check(self._shape)
        check_eviction(evict, decode, fused=fuse is not None)
        check_host(cache, evict, self._shape)
        check_kernels(type(model).__name__, self._shape, model.device, impl)
        check_host_attend(cache, model.device, impl)
        windows = cache_windows(model)
        if evict is not None and len(windows) == self._shape.layers:
            raise Unsupported(
                f"evict={evict.name}: all layers of {type(model).__name__} have a sliding window and keep their keys; "
                f"leave evict out"
            )
        self.model, self.prefill, self.decode, self.cache_config = model, prefill, decode, cache
        self.fuse, self.evict, self.loop = fuse, evict, loop
        self.plain_reason: str | None = None  # why transformers stepped through the last answer of model.generate
        IMPLEMENTATIONS.check(impl, model.device)  # an unknown name is refused now; "auto" is resolved call by call
        self.impl = impl
        self.ledger = Ledger()
        # called after each layer that attends, with (phase, call, outcome); call.layer is its number among these
        self.on_layer: LayerHook | None = None
        self.next_step: Step | None = None  # the next pass, if the decode loop or fusion has made it
        self.next_loop: Any = None  # the loop over tokens of the next generate, if longreach.generate has made it
        self._padding: Any = None  # the attention mask that the model was given, while it runs
        self.static_caches: dict[int, LongreachCache] = {}  # batch -> the cache that the decode loop reuses
        self._decoder, self._layers = decoder, self._shape.layers
        self._axes = "mrope_section" in (getattr(text_config(model), "rope_parameters", None) or {})
        self.facts = facts_of(text_config(model), decoder, self._shape, windows)
        self.observers = (decode,) if decode.observes_prompt else ()
        self._decodes: tuple[AttentionMethod, ...] = (decode,)  # the decode methods that the session was given
        self.memory = MemoryNotes(self)
        self._busy, self._generating = threading.Lock(), threading.Lock()
        self._pass_thread: int | None = None
        self._phases: PhaseTracker | None = None
        self._notes_rotary = False
        register()
        self._undo: list[Callable[[], Any]] = [release, self._plans.close]
        try:
            self._install(decoder)
            for method in (prefill, decode):
                self._plans.add(method)
        except BaseException:
            self.close()
            raise

    # in and out

    def _install(self, decoder: PreTrainedModel) -> None:
        model = self.model
        # the layers read the name in the configuration they hold; set_attn_implementation would change others too
        for config in {id(c): c for m in decoder.modules() if (c := getattr(m, "config", None)) is not None}.values():
            if hasattr(config, ATTENTION):
                self._undo.append(functools.partial(setattr, config, ATTENTION, getattr(config, ATTENTION)))
                setattr(config, ATTENTION, NAME)
        self._override(decoder, MARK, self)
        self._override(decoder, "forward", self._wrap_decoder(decoder.forward))
        if model is not decoder:
            self._override(model, "forward", self._wrap_model(model.forward))
        if self.facts.latent:
            for module in attention_modules(decoder):
                self._override(module, EXPAND, kept_apart)
        if any(_needs_rotary(method) for method in (self.prefill, self.decode)):
            self._note_rotary()
        if hasattr(model, "generate"):
            self._override(model, "generate", wrap_generate(self, getattr(model, "generate")))  # noqa: B009
            for name in SERVING:
                self._override(model, name, refuse_serving(name))

    def _override(self, module: nn.Module, name: str, value: Any) -> None:
        before = module.__dict__.get(name, _ABSENT)

        def restore() -> None:
            if before is _ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before

        module.__dict__[name] = value
        self._undo.append(restore)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise Unsupported("a model cannot be copied while longreach is attached; close the session first")

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a model cannot be pickled while longreach is attached; close the session first")

    def close(self) -> None:
        """Restore the model: its outputs are bit-identical to before. The report stays readable.

        Waits for a pass that another thread runs.
        """
        if self._pass_thread == threading.get_ident():
            raise ConcurrentUse("a session cannot be closed from within a forward pass of its model")
        with self._busy:
            self.static_caches.clear()
            while self._undo:
                self._undo.pop()()

    # public methods

    def report(self, decode: str | AttentionMethod | None = None) -> Report:
        """Bytes read so far, per layer and phase, and the bytes that dense attention reads.

        Every completed pass counts, also those of answers that were rolled back. A pass that fails does not count, nor
        does one that is still running, from whose `on_layer` hook this may be called.
        What was read to choose the tokens of fused prompts and the keys that are evicted is in the prefill phase.
        Bytes that a decode method read while observing the prompt are included, for one method: `decode` (a method or
        its name), or the session's own. Raises InvalidInput for a method that observes prompts and has not observed all
        of this one (see `prepare`).
        """
        method = self.decode if decode is None else choose("decode", decode)
        if method.observes_prompt and not self.ledger.observed_all(method):
            raise InvalidInput(
                f"report: {method!r} did not observe all prompts that were read, so the bytes it would have read are "
                f"unknown; name it before prompts are read (attach, or session.prepare)"
            )
        report, memory = self.ledger.report(method), self.memory.use
        if memory is not None:
            memory = replace(memory, cpu_layers=report.computed_by("cpu", memory.host_layers))
        whole = replace(report, memory=memory, plans=self._plans.reports(), plain_reason=self.plain_reason)
        return numbered(whole, attention_layers(text_config(self.model)))

    def reset_report(self) -> None:
        """Start counting from zero. A pass that is running is counted whole when it ends."""
        self.ledger.reset()

    def switch(self, decode: str | AttentionMethod | None, **options: Any) -> None:
        """Decode with another method from now on, and count from zero. Caches stay valid. Raises as `attach`.

        Methods that observe prompts go on observing, at the cost that `prepare` names, after a switch to another one:
        a switch back to them then needs no prompt to be read again. To end that, close the session and attach again.
        """
        chosen = choose("decode", decode, **options)
        self.prepare(chosen)
        self.decode = chosen
        self.reset_report()

    def prepare(self, *decodes: str | AttentionMethod) -> None:
        """Let these decode methods, or those of these names, observe prompts from now on, for `switch` to name later.

        The state of each costs memory and time. A method without state may be named too. Raises as `switch`.
        """
        chosen = [choose("decode", method) for method in decodes]
        for method in chosen:
            self._check_method(method)
            self._plans.add(method)
        self.observers = tuple(dict.fromkeys(m for m in (*self.observers, *chosen) if m.observes_prompt))
        self._decodes = tuple(dict.fromkeys((*self._decodes, *chosen)))

    def make_plans(self, cache: LongreachCache) -> None:
        """Make the plans that methods of the session wait for, of the prompt that was read into this cache last.

        Called before the first decode step and before keys are evicted; at other times it does nothing.
        """
        self._plans.make(cache, self.ledger)

    def _check_method(self, method: AttentionMethod) -> None:
        """Raise as `switch` if the model does not fit a decode method, and note the method's needs."""
        method.check(self._shape)
        check_levels(self.model, decode=method.name)
        check_eviction(self.evict, method, fused=self.fuse is not None)
        if _needs_rotary(method):
            _check_model(self.model, self._decoder, method)
            if not self._notes_rotary:
                self._note_rotary()

    @contextmanager
    def prompt_end(self, columns: int | None) -> Iterator[PhaseTracker]:
        """Within this block and thread, passes below `columns` of the cache are prefill, later ones decode.

        None: every pass is prefill until `prompt_done` is set on the PhaseTracker that is yielded.
        """
        self.check_open()
        if not self._generating.acquire(blocking=False):
            raise ConcurrentUse(
                "two answers at once on one attached model; finish or close the previous one first, or use one model "
                "object per thread"
            )
        self._phases = PhaseTracker(threading.get_ident(), columns)
        try:
            yield self._phases
        finally:
            self._phases = None
            self._generating.release()

    # the forward pass

    def _wrap_model(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Also roll the cache back if the part after the decoder (logits of a whole prompt) fails."""
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kwargs = renamed(kwargs)
            given = signature.bind(*args, **kwargs).arguments
            cache, before = given.get(CACHE), self._padding
            ours, self._padding = cache if isinstance(cache, LongreachCache) else None, given.get("attention_mask")
            try:
                with memory_errors(), nullcontext() if ours is None else ours.restored_on_error():
                    return forward(*args, **kwargs)
            finally:
                self._padding = before

        return wrapped

    def _wrap_decoder(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        # wrapped rather than hooked: torch calls no hook after Ctrl-C, and the lock would stay closed
        names = list(inspect.signature(forward).parameters)

        @torch.compiler.disable(reason="longreach's attention keeps state between layers")
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **renamed(kwargs)}
            with self._exclusive(), memory_errors():
                check_pass(self._decoder, given)
                step = self._begin(given)
                try:
                    with entered(step), recurrent_pass(step):
                        output = forward(**given)
                    self._commit(step)
                except BaseException:
                    self.ledger.abandon()
                    if step.cache is not None and not stream_captures():
                        step.cache.abandon(step)
                    raise
                return output

        return wrapped

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        check_thread(self._phases, threading.get_ident())
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUse("two forward passes at once on one attached model; use one model object per thread")
        self._pass_thread = threading.get_ident()
        try:
            yield
        finally:
            self._pass_thread = None
            self._busy.release()

    def _begin(self, given: dict[str, Any]) -> Step:
        if self.next_step is not None:
            return self.next_step
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or not tokens.shape[1]:
            raise InvalidInput("expected input_ids [B, T] or inputs_embeds [B, T, width] with at least one token")
        batch, length = tokens.shape[:2]
        cache = self._cache(given, batch)
        past = 0 if cache is None else cache.columns
        phases = self._phases
        decoding = length == 1 and past > 0 if phases is None else phases.decoding(past, length)
        if decoding and cache is not None:
            self.make_plans(cache)
            cache.check_observed(self.decode)
            cache.evict_prompt(room=0 if phases is None else max(0, phases.room - past))
        mask = given.get("attention_mask")
        if isinstance(mask, dict) and all(isinstance(each, Mask) for each in mask.values()):
            mask = self._padding  # the model around the decoder has made masks of it, which mean nothing here
        mask = mask.to(tokens.device) if isinstance(mask, Tensor) else mask
        real, counts = real_tokens(
            mask, given.get("position_ids"), batch, length, cache,
            trusted=phases is not None and phases.prompt_done and past > 0 and length == 1, axes=self._axes,
        )  # fmt: skip
        if phases is not None:
            phases.padded_end = real is not None and not bool(real[:, -1].all())
            if cache is not None and phases.room and not phases.reserved:
                cache.reserve(counts, max(0, phases.room - past - length))
                phases.reserved = True
        left = 0 if phases is None or phases.columns is None else max(0, phases.columns - past - length)
        append = plain_append(counts, tokens.device) if cache is None else cache.kv.begin(range(batch), counts)
        return Step(self.new_pass(cache, decoding, left), self.facts, (batch, length), real, append, cache)

    def new_pass(self, cache: LongreachCache | None, decoding: bool, prompt_tokens_left: int = 0) -> Pass:
        """A pass over the layers with the session's methods: of decoding, or of a prompt."""
        if decoding:
            segment = Segment("decode", self.decode)
        else:
            evicting = () if cache is None or cache.eviction is None else (cache.eviction,)
            segment = Segment("prefill", self.prefill, (*self.observers, *self._plans.observers, *evicting))
        return Pass(
            (segment,),
            self._shape,
            None if cache is None else cache.states,
            self.ledger,
            self.impl,
            self.on_layer,
            prompt_tokens_left,
        )

    def _commit(self, step: Step) -> None:
        called = step.layers.layers
        if called != set(range(self._layers)):
            raise Unsupported(
                f"{type(self.model).__name__} called longreach's attention in layers {sorted(called)} of "
                f"{self._layers}; it does not take all its attention from the attention interface"
            )
        if step.static:
            return
        if step.cache is not None:
            step.cache.commit(step)
            self.memory.note(step.cache, decoding=step.layers.segments[0].phase == "decode")
        self.ledger.commit()

    def _cache(self, given: dict[str, Any], batch: int) -> LongreachCache | None:
        """The cache of this pass; the fresh one that generate or the model would use is replaced by ours."""
        past, use = given.get(CACHE), given.get("use_cache")
        if isinstance(past, LongreachCache):
            if past.owner is not self:
                raise InvalidInput(f"{CACHE} belongs to another session; use session.new_cache()")
            if past.batch != batch:
                raise InvalidInput(f"{CACHE} holds {past.batch} sequences, the input has {batch}")
            if past.invalid:
                raise InvalidInput(f"{CACHE}: {past.invalid}")
            return past
        if past is None and not (text_config(self.model).use_cache if use is None else use):
            return None
        # a user's own cache would stay empty while ours fills, so only the one that generate has just made is replaced
        fresh = self._phases is not None and type(past) is DynamicCache and past.get_seq_length() == 0
        if past is not None and not (fresh and not past.offloading):
            raise Unsupported(foreign_cache(past))
        ours = given[CACHE] = self.new_cache(batch)
        return ours

    def _note_rotary(self) -> None:
        self._notes_rotary = True
        for module in attention_modules(self._decoder):
            self._undo.append(module.register_forward_pre_hook(note_rotary, with_kwargs=True).remove)
