"""longreach.generate: transformers' generate, greedy or sampling, with a decode loop that can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StopStringCriteria

from longreach.adapters.transformers.attach import MARK, Session, attach
from longreach.adapters.transformers.generate import PADDED_END
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.decoder import Capture, vocabulary_of
from longreach.adapters.transformers.loop.model_generate import StepLoop
from longreach.adapters.transformers.loop.prefill import prefill
from longreach.adapters.transformers.loop.run import DecodeRun, GraphOption, count_of, now
from longreach.adapters.transformers.loop.sampling import Sampler, ends_of, greedy
from longreach.adapters.transformers.loop.settings import HANDED_ON, by_transformers
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.options import ATTACHING, refuse_options
from longreach.errors import InvalidInput
from longreach.ops.types import describe


@dataclass(frozen=True)
class Generated:
    """Tokens that `generate` made, and how it made them.

    sequences: int64 [B, T + new] on the model's device, prompts and answers, padding after an end. prompt: T.
    captured: "full" (the decode step was one CUDA graph), "piecewise" (one graph for each stretch between two
    attentions) or None. not_captured_reason: why it was not one graph, else None. compile: one of `loop.compile.MODES`.
    prefill_seconds: of the prompt. setup_seconds: of the first steps, which may load or compile code, and of
    capturing; 0 if an earlier call's step was reused. evict_seconds: of eviction, between the first token and the
    first step. decode_seconds: of the other `steps` steps. All wall-clock, after waiting for the device.
    """

    sequences: Tensor
    prompt: int
    captured: Capture | None
    not_captured_reason: str | None
    compile: str
    prefill_seconds: float
    setup_seconds: float
    decode_seconds: float
    steps: int
    evict_seconds: float = 0.0

    @property
    def tokens(self) -> Tensor:
        """int64 [B, new]: the answers."""
        return self.sequences[:, self.prompt :]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a decode step past the first ones; None where there was none."""
        return self.decode_seconds / self.steps if self.steps else None


@torch.no_grad()
def generate(
    session: Session | PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    prefill_chunk_size: int | None = None,
    past_key_values: LongreachCache | None = None,
    streamer: Any = None,
    graph: GraphOption = None,
    compile: str = "auto",
    **more: Any,
) -> Generated:
    """Continue input_ids [B, T] (padded on the left where attention_mask [B, T] is 0) by up to max_new_tokens.

    The tokens are those of `model.generate` with the same options. KV memory for prompt and answer is reserved first.
    On a GPU the decode step (the model, and the choice of a greedy token) is captured at a session's first call of a
    shape and reused by later calls. Tokens are read back a few steps late, so the GPU never waits. Steps that ran past
    an end are rolled back, but the report counts what they read.

    session: the session of `attach`, or a model. To a model longreach is attached for this call, with the keywords of
        `attach` among the remaining ones (prefill=, decode=, cache=, impl=).
    more: the keywords of attach, and of transformers' generate: repetition_penalty, min_p, no_repeat_ngram_size,
        suppress_tokens, min_new_tokens, stop_strings with tokenizer, num_return_sequences, logits_processor,
        stopping_criteria and others. transformers then chooses the tokens, at the cost of its own launches for each
        step; so it does if the model's generation config has such a setting.
    do_sample: sample, else greedy. temperature, top_k, top_p: as in transformers, default the model's generation
        config. generator: default torch's own.
    eos_token_id: tokens that end an answer, () for none. pad_token_id: after an end. Default: the generation config's.
    prefill_chunk_size: prompt tokens per pass, None for all at once.
    past_key_values: a cache of session.new_cache() that holds the beginning of input_ids; the call continues it.
        None: a cache that the session keeps, one for each batch size.
    streamer: as in transformers: put(prompt), put(tokens [B]) for every step, end().
    graph: None: capture if the device can, in one CUDA graph if the method allows that and no session.on_layer is set,
        else piecewise. True: the same, or Unsupported. False: do not capture. "piecewise": one graph for each stretch
        between two attentions, with attention launched by the host; works with any method. The next step overwrites
        tensors that session.on_layer gets from a captured step.
    compile: parts of the captured step to compile, one of `loop.compile.MODES`; "auto": the fastest.

    Raises InvalidInput, CapacityError, OutOfMemory, ConcurrentUse (another generate runs on the session),
    UnknownName (an option, method or compile mode), Unsupported (graph or compile="compile" on a device without them; a
    model whose step cannot be captured; beam search; guidance_scale). After any error, Ctrl-C included, session and
    cache are as before the call.
    """
    handed_on = {name: more[name] for name in HANDED_ON if name in more}
    attaching = {name: value for name, value in more.items() if name not in HANDED_ON}
    unknown = {name: value for name, value in attaching.items() if name not in ATTACHING}
    refuse_options("generate", unknown, attaching, OPTIONS)
    if attaching.get("fuse") not in (None, "none"):
        raise InvalidInput("fuse: prompts of stored chunks are read by longreach.Documents; generate reads token ids")
    if not isinstance(session, Session):
        with attach(session, **attaching) as made:
            return generate(
                made, input_ids, attention_mask, max_new_tokens=max_new_tokens, do_sample=do_sample,
                temperature=temperature, top_k=top_k, top_p=top_p, generator=generator, eos_token_id=eos_token_id,
                pad_token_id=pad_token_id, prefill_chunk_size=prefill_chunk_size, past_key_values=past_key_values,
                streamer=streamer, graph=graph, compile=compile, **handed_on,
            )  # fmt: skip
    if attaching:
        raise InvalidInput(f"{', '.join(attaching)}: the session was attached already; give them to attach")
    model = session.model
    if session._decoder.__dict__.get(MARK) is not session:
        raise InvalidInput("the session is closed; attach to the model again, or call generate within the with block")
    if not isinstance(do_sample, bool):
        raise InvalidInput(f"do_sample: expected True or False, got {do_sample!r}")
    if not isinstance(graph, bool) and graph not in (None, "piecewise"):
        raise InvalidInput(f"graph: expected True, False, None or 'piecewise', got {graph!r}")
    shaped = by_transformers(model, sampled=do_sample, given=handed_on) or bool(handed_on)
    ids, mask = _prompt(session, input_ids, attention_mask, past_key_values)
    count_of("max_new_tokens", max_new_tokens)
    if prefill_chunk_size is not None:
        count_of("prefill_chunk_size", prefill_chunk_size)
    ends = ends_of(model, eos_token_id, pad_token_id, vocabulary_of(model))
    if not do_sample and any(x is not None for x in (temperature, top_k, top_p, generator)):
        raise InvalidInput("temperature, top_k, top_p and generator are for sampling; give do_sample=True too")
    choose = Sampler(model, temperature, top_k, top_p, generator) if do_sample else greedy
    if shaped:
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, **handed_on}
        given = {name: value for name, value in given.items() if value is not None}
        if ends.eos or model.generation_config.eos_token_id is not None:  # with ends transformers pads behind all stops
            given["eos_token_id"] = list(ends.eos)
        loop = StepLoop(session, streamer, generator, graph, compile)
        sequences = _shaped(
            loop, ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=do_sample, streamer=streamer,
            pad_token_id=ends.pad, prefill_chunk_size=prefill_chunk_size, past_key_values=past_key_values, **given,
        )  # fmt: skip
        assert loop.run is not None
        return _made(sequences, ids.shape[1], loop.run, loop.prefill_seconds)
    run = DecodeRun(
        session, max_new_tokens, ends, choose, graph=graph, compile=compile, exactly=past_key_values is not None
    )

    with session.prompt_end(ids.shape[1]), memory_errors():
        cache = past_key_values or session.static_cache(ids.shape[0], ids.shape[1] + max_new_tokens)
        cache.check_observed(session.decode)
        with cache.restored_on_error(states=True):
            started = now(model)
            first = mask[:, cache.columns :].sum(1).tolist()
            cache.kv.reserve(range(cache.batch), [n + max_new_tokens - 1 for n in first])
            logits = prefill(session, cache, ids, mask, prefill_chunk_size)
            prefill_seconds = now(model) - started
            if streamer is not None:
                streamer.put(ids.cpu())
            kept: list[Tensor] = []
            with closing(run.tokens(cache, logits)) as tokens:
                for token in tokens:
                    kept.append(token)
                    if streamer is not None:
                        streamer.put(token)
            if streamer is not None:
                streamer.end()
            cache.drop_columns(cache.columns - (ids.shape[1] + len(kept) - 1))
    return _made(torch.cat([ids, torch.stack(kept, 1).to(ids.device)], 1), ids.shape[1], run, prefill_seconds)


def _made(sequences: Tensor, prompt: int, run: DecodeRun, prefill_seconds: float) -> Generated:
    return Generated(
        sequences, prompt, run.captured, run.not_captured_reason, run.compile, prefill_seconds, run.setup_seconds,
        run.decode_seconds, run.steps, run.evict_seconds,
    )  # fmt: skip


def _shaped(loop: StepLoop, ids: Tensor, *, tokenizer: Any = None, **options: Any) -> Tensor:
    """int64 [B, T + new]: prompts and answers, by transformers' generate with this loop over the tokens."""
    session = loop.session
    if strings := options.pop("stop_strings", None):
        if tokenizer is None:
            raise InvalidInput("stop_strings: give tokenizer= too, which says how tokens spell them")
        criteria = [*(options.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        options["stopping_criteria"] = criteria
    session.next_loop = loop
    try:
        found: Tensor = session.model.generate(  # type: ignore[operator]
            ids, use_cache=True, return_dict_in_generate=False, **options
        )
    finally:
        session.next_loop = None
    return found


OPTIONS = (*(name for name in signature(generate).parameters if name not in ("session", "more")), *HANDED_ON)


def _prompt(session: Session, ids: Any, mask: Any, past: LongreachCache | None) -> tuple[Tensor, Tensor]:
    """input_ids [B, T] and their padding mask [B, T], checked."""
    model, columns = session.model, 0
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.numel():
        raise InvalidInput(f"input_ids: expected int64 [B, T] with at least one token, got {describe(ids)}")
    embedding = model.get_input_embeddings()
    known = max(getattr(embedding, "num_embeddings", 0), vocabulary_of(model))
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= known:
        raise InvalidInput(f"input_ids: expected tokens in [0, {known}), got {low} to {high}")
    ids = ids.to(model.device, torch.int64)
    if past is not None:
        if not isinstance(past, LongreachCache) or past.owner is not session:
            raise InvalidInput(f"past_key_values: expected a cache of session.new_cache(), got {describe(past)}")
        columns = past.columns
        if past.batch != ids.shape[0]:
            raise InvalidInput(f"past_key_values holds {past.batch} sequences, the input has {ids.shape[0]}")
        if past.invalid:
            raise InvalidInput(f"past_key_values: {past.invalid}")
        if columns >= ids.shape[1]:
            raise InvalidInput(
                f"input_ids: expected the cache's {columns} columns and at least one more, got {ids.shape[1]} columns"
            )
    if mask is None:
        mask = torch.ones_like(ids)
        if past is not None:
            mask[:, :columns] = past.column_mask().to(ids)
    elif not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise InvalidInput(f"attention_mask: expected [B, T] {list(ids.shape)} like input_ids, got {describe(mask)}")
    mask = mask.to(ids.device)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidInput("attention_mask: expected 0 and 1 only, 0 where a prompt is padded")
    if not bool(mask[:, -1].all()):
        raise InvalidInput(PADDED_END)
    return ids, mask
