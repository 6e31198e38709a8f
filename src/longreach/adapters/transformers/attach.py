"""attach: put methods in the place of a model's attention, and take them out again without a trace."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from longreach.adapters.transformers import step as steps
from longreach.adapters.transformers.attention import NAME, longreach_attention
from longreach.adapters.transformers.checks import check_model, decoder_of, text_config
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.mask import no_mask
from longreach.adapters.transformers.padding import real_tokens
from longreach.adapters.transformers.shard import out_of_memory
from longreach.cache import CacheConfig
from longreach.errors import ConcurrentUse, InvalidInput, OutOfMemory, UnknownName, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.ledger import Ledger, Report
from longreach.methods.registry import NONE, choose
from longreach.ops.attend import implementations

MARK = "_longreach_session"


def attach(
    model: PreTrainedModel,
    *,
    prefill: str | AttentionMethod | None = None,
    decode: str | AttentionMethod | None = None,
    evict: str | None = None,
    cache: CacheConfig | None = None,
    impl: str = "auto",
) -> Session:
    """Put methods in the place of `model`'s attention until the session is closed (use it with `with`).

    prefill, decode: a configured method, its name, or None for dense. A pass of one token per sequence over a
        cache that holds some is decoding; inside generate, whatever belongs to the prompt is prefill.
    evict: None or "none"; no eviction method exists yet.
    cache: layout and growth of the KV cache. impl: who computes attention ("auto" or an implementation's name).

    The model may be used as before: forward, generate (greedy, sampling, padding, prefill_chunk_size).
    Raises UnknownName, InvalidInput, Unsupported (what the model needs and longreach lacks, by name) and
    ConcurrentUse (already attached); the model is then untouched.
    """
    if evict is not None and evict not in NONE:
        raise UnknownName("evict method", evict, NONE)
    return Session(model, choose("prefill", prefill), choose("decode", decode), cache or CacheConfig(), impl)


class Session:
    """A model with methods attached. Made by `attach`; `close` (or leaving `with`) restores the model."""

    def __init__(
        self, model: PreTrainedModel, prefill: AttentionMethod, decode: AttentionMethod, cache: CacheConfig, impl: str
    ):
        decoder = decoder_of(model)
        check_model(model)
        if MARK in decoder.__dict__:
            raise ConcurrentUse(f"{type(model).__name__} has longreach attached already; close that session first")
        self.model, self.prefill, self.decode, self.cache_config = model, prefill, decode, cache
        self.impl = implementations.resolve(impl, model.device)
        self.ledger = Ledger()
        self.observe: Callable[..., None] | None = None
        self._layers = text_config(model).num_hidden_layers
        self._busy, self._generating = threading.Lock(), threading.Lock()
        self._prompt_end: int | None = None
        AttentionInterface.register(NAME, longreach_attention)
        AttentionMaskInterface.register(NAME, no_mask)
        self._undo: list[Callable[[], Any]] = []
        try:
            self._put_in(decoder)
        except BaseException:
            self.close()
            raise

    def _put_in(self, decoder: PreTrainedModel) -> None:
        model = self.model
        configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
        for config in configs.values():
            self._undo.append(functools.partial(setattr, config, "_attn_implementation", config._attn_implementation))
        model.set_attn_implementation(NAME)
        decoder.__dict__[MARK] = self
        self._undo.append(lambda: decoder.__dict__.pop(MARK))
        self._hook(decoder.register_forward_pre_hook(self._before, with_kwargs=True))
        self._hook(decoder.register_forward_hook(self._after, always_call=True))
        if self.prefill.needs_pre_rope or self.decode.needs_pre_rope:
            self._note_rotary(decoder)
        if hasattr(model, "generate"):
            model.__dict__["generate"] = self._wrap_generate(getattr(model, "generate"))  # noqa: B009
            self._undo.append(lambda: model.__dict__.pop("generate"))

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the model; its outputs are bit-identical to before. The report stays readable."""
        while self._undo:
            self._undo.pop()()

    def report(self) -> Report:
        """What was read so far, per layer and phase, beside what dense attention reads."""
        return self.ledger.report()

    def reset_report(self) -> None:
        """Start counting anew."""
        self.ledger.tallies.clear()

    def switch(self, decode: str | AttentionMethod | None, **options: Any) -> None:
        """Decode with another method from now on and count anew; caches stay valid. Raises as `attach` does."""
        chosen = choose("decode", decode, **options)
        if chosen.needs_pre_rope and not (self.prefill.needs_pre_rope or self.decode.needs_pre_rope):
            raise InvalidInput(f"{chosen.name} needs queries before rotation; attach with it instead of switching")
        self.decode = chosen
        self.reset_report()

    @contextmanager
    def prompt_end(self, columns: int) -> Iterator[None]:
        """Within this block, what lies below `columns` of the cache is prompt (prefill), the rest is decoding."""
        before, self._prompt_end = self._prompt_end, columns
        try:
            yield
        finally:
            self._prompt_end = before

    def new_cache(self, batch: int = 1) -> LongreachCache:
        """An empty cache for `batch` sequences, to be passed as `past_key_values`."""
        return LongreachCache(self._layers, batch, self.cache_config, self.model.device, self)

    # the forward pass

    def _before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUse("two forward passes at once on one attached model; use one model object per thread")
        try:
            kwargs = dict(kwargs)
            if args:
                kwargs["input_ids"] = args[0]
                if len(args) > 1:
                    raise InvalidInput("an attached model's decoder takes keyword arguments only, besides input_ids")
            steps.enter(self._step(kwargs))
            return (), kwargs
        except BaseException as error:
            self._busy.release()
            _raise_if_memory(error)
            raise

    def _after(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        step = steps.leave()
        if step is None:  # the pass never began: the pre-hook raised
            return
        try:
            if output is None:  # an error is on its way up; nothing is committed
                return
            if step.layers_seen != self._layers:
                raise Unsupported(
                    f"{type(self.model).__name__} called longreach's attention {step.layers_seen} times for "
                    f"{self._layers} layers; it does not take all its attention from the attention interface"
                )
            if step.cache is not None:
                step.cache.commit(step)
        finally:
            self._busy.release()

    def _step(self, kwargs: dict[str, Any]) -> steps.Step:
        tokens = kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise InvalidInput("expected input_ids [B, T] or inputs_embeds [B, T, width]")
        batch, length = tokens.shape[:2]
        cache = self._cache(kwargs, batch)
        past = 0 if cache is None else cache.columns
        real, counts = real_tokens(
            kwargs.get("attention_mask"), kwargs.get("position_ids"), batch, length, cache, tokens.device
        )
        append = steps.plain_append(counts, tokens.device) if cache is None else cache.kv.begin(range(batch), counts)
        decoding = length == 1 and past > 0 if self._prompt_end is None else past + length > self._prompt_end
        return steps.Step(
            phase="decode" if decoding else "prefill",
            method=self.decode if decoding else self.prefill,
            impl=self.impl,
            ledger=self.ledger,
            shape=(batch, length),
            real=real,
            append=append,
            cache=cache,
            observe=self.observe,
        )

    def _cache(self, kwargs: dict[str, Any], batch: int) -> LongreachCache | None:
        """The cache of this pass; a fresh one that generate or the model would use is replaced by ours."""
        past = kwargs.get("past_key_values")
        use = kwargs.get("use_cache")
        if past is None and not (text_config(self.model).use_cache if use is None else use):
            return None
        if isinstance(past, LongreachCache):
            if past.owner is not self:
                raise InvalidInput("past_key_values belongs to another session; use session.new_cache()")
            if past.batch != batch:
                raise InvalidInput(f"past_key_values holds {past.batch} sequences, the input has {batch}")
            return past
        if past is not None and not (isinstance(past, DynamicCache) and past.get_seq_length() == 0):
            raise Unsupported(
                f"past_key_values: longreach brings its own cache and cannot take over a {type(past).__name__} "
                f"(cache_implementation=...?); leave it out, or pass session.new_cache()"
            )
        ours = self.new_cache(batch)
        kwargs["past_key_values"] = ours
        return ours

    def _note_rotary(self, decoder: nn.Module) -> None:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            pair = kwargs.get("position_embeddings")
            if pair is not None:
                steps.current().rotary[module.layer_idx] = pair  # type: ignore[index]

        for module in decoder.modules():
            if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention"):
                self._hook(module.register_forward_pre_hook(note, with_kwargs=True))

    # generate

    def _wrap_generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._generating.acquire(blocking=False):
                raise ConcurrentUse("two generate calls at once on one attached model; use one model object per thread")
            try:
                _refuse_search(self.model, kwargs)
                self._prompt_end = _prompt_columns(args, kwargs)
                with memory_errors():
                    return generate(*args, **kwargs)
            finally:
                self._prompt_end = None
                self._generating.release()

        return wrapped


def _refuse_search(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    config = kwargs.get("generation_config") or model.generation_config
    beams = kwargs.get("num_beams", getattr(config, "num_beams", None)) or 1
    if beams > 1:
        raise Unsupported(f"beam search (num_beams={beams}) is not supported on a model with longreach attached")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "constraints", "force_words_ids", "custom_generate"):
        if kwargs.get(name):
            raise Unsupported(f"generate({name}=...) is not supported on a model with longreach attached")


def _prompt_columns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Columns, padding included, that belong to the prompt; None where generate makes its own."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor):
        return mask.shape[-1]
    tokens = next(
        (
            x
            for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            if x is not None
        ),
        None,
    )
    past = kwargs.get("past_key_values")
    columns = past.columns if isinstance(past, LongreachCache) else 0
    if not isinstance(tokens, Tensor):
        return None
    return tokens.shape[1] if tokens.shape[1] > columns else columns + tokens.shape[1]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn torch's out-of-memory errors into one that says what to lower."""
    try:
        yield
    except BaseException as error:
        _raise_if_memory(error)
        raise


def _raise_if_memory(error: BaseException) -> None:
    if not isinstance(error, OutOfMemory) and out_of_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(
            "memory ran out; the cache holds what it held before. Lower prefill_chunk_size (try 2048), the batch, "
            f"or the length of the prompt. torch said: {str(error).splitlines()[0]}"
        ) from error
