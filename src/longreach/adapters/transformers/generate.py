"""generate on an attached model: tracks the end of the prompt, refuses concurrent calls and unsupported searches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from longreach.adapters.transformers.cache_name import CACHE, renamed
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.oom import memory_errors
from longreach.errors import ConcurrentUse, InvalidInput, Unsupported

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session

OTHER_SEARCHES = (  # settings that choose another search than greedy and sampling
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "custom_generate",
)
PADDED_END = "attention_mask: a prompt ends with padding, which its answer would follow; pad on the left"
DEFAULT_NEW = 20  # tokens, if neither the call nor the model sets a limit
SERVING = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


@dataclass
class PhaseTracker:
    """The end of prefill for the thread that decodes: at `columns` of the cache, or when `prompt_done`.

    padded_end: whether a sequence of the pass under way ends with padding.
    room: columns that prompt and longest answer take, where that is known. reserved: whether the cache has that room;
    it is reserved at the first pass.
    """

    thread: int
    columns: int | None = None
    prompt_done: bool = False
    padded_end: bool = False
    room: int = 0
    reserved: bool = False

    def decoding(self, past: int, length: int) -> bool:
        if self.columns is not None:
            return past + length > self.columns
        return self.prompt_done and past > 0


class _PromptDone(LogitsProcessor):
    """Called before the first token is chosen: all tokens read until then are the prompt."""

    def __init__(self, phases: PhaseTracker):
        self.phases = phases

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.phases.padded_end:  # generate makes its own mask if it finds padding tokens
            raise InvalidInput(PADDED_END)
        self.phases.prompt_done = True
        return scores


def wrap_generate(session: Session, generate: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` of the session's model, for as long as the session lasts."""
    signature = inspect.signature(generate)
    rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")

    @functools.wraps(generate)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.update(renamed(given.pop(rest, {})))
        refuse_search(session.model, given)
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, -1].all()):
            raise InvalidInput(PADDED_END)
        cache = given.get(CACHE)
        if cache is not None and not isinstance(cache, LongreachCache):
            raise Unsupported(foreign_cache(cache))
        captured = _captured_loop(session, given)
        with session.prompt_end(None) as phases:
            phases.room = _room(session.model, given)
            if given.get("use_cache") is False and session.prefill != session.decode:
                raise InvalidInput(
                    "generate(use_cache=False) reads the prompt again for every token, so it has no decode steps to "
                    f"run {session.decode.name} in; leave use_cache on"
                )
            given["logits_processor"] = LogitsProcessorList(
                [*(given.get("logits_processor") or ()), _PromptDone(phases)]
            )
            if captured is not None:
                given["custom_generate"] = captured
            with memory_errors(), nullcontext() if cache is None else cache.restored_on_error(states=True):
                return generate(**given)

    return wrapped


def _captured_loop(session: Session, given: dict[str, Any]) -> Callable[..., Any] | None:
    """The loop over tokens that replaces transformers' own in this call, None where that stays. Notes the reason.

    Raises Unsupported where the session wants captured steps only.
    """
    from longreach.adapters.transformers.loop.model_generate import StepLoop, why_not_captured

    session.plain_reason = None
    if session.next_loop is not None:
        return session.next_loop
    if session.loop == "plain":
        return None
    setting = functools.partial(_first, _settings(session.model, given))
    why = session.plain_reason = why_not_captured(session, setting, given.get(CACHE))
    if why is None:
        return StepLoop(session, given.get("streamer"))
    if session.loop == "captured":
        raise Unsupported(f"loop='captured': transformers' own loop would have to step through this answer: {why}")
    return None


def refuse_serving(name: str) -> Callable[..., Any]:
    """The replacement of continuous batching: it raises."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported(f"{name} (continuous batching) brings its own cache; longreach supports generate")

    return refused


def foreign_cache(cache: Any) -> str:
    """Why another cache than the session's is refused."""
    return (
        f"{CACHE}: longreach brings its own cache and cannot take over a {type(cache).__name__}; "
        f"leave it out, or pass session.new_cache()"
    )


def _settings(model: PreTrainedModel, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The sources of generate's settings: its arguments, the call's configuration, the model's own."""
    passed = given.get("generation_config")
    return [given, vars(passed) if passed else {}, vars(model.generation_config)]


def _first(sources: Sequence[dict[str, Any]], name: str) -> Any:
    return next((found[name] for found in sources if found.get(name) is not None), None)


def _room(model: PreTrainedModel, given: dict[str, Any]) -> int:
    """Columns that prompt and longest answer will take, as generate reckons; 0 where no prompt is given."""
    prompts = (given.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    prompt = next((x.shape[1] for x in prompts if isinstance(x, Tensor) and x.dim() > 1), 0)
    if not prompt:
        return 0
    sources = _settings(model, given)
    new, total = _first(sources, "max_new_tokens"), _first(sources, "max_length")
    if new is None and total is None:
        new = DEFAULT_NEW
    return (total if new is None else prompt + new) - 1  # the last token's keys are not needed


def refuse_search(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """Raise Unsupported for any search but greedy and sampling, and for caches requested by name."""
    *asked, own = sources = _settings(model, given)

    def setting(name: str) -> Any:
        return _first(sources, name)

    beams = setting("num_beams") or 1
    if beams > 1:
        raise Unsupported(f"beam search (num_beams={beams}) is not supported on a model with longreach attached")
    for name in OTHER_SEARCHES:
        if setting(name):
            raise Unsupported(
                f"generate({name}=...) is not supported on a model with longreach attached; "
                f"use greedy search or sampling"
            )
    cache = _first(asked, "cache_implementation")
    if cache not in (None, "dynamic"):
        raise Unsupported(f"cache_implementation={cache!r}: longreach brings its own cache; leave it out")
    if own.get("cache_implementation") is not None:  # set by the checkpoint, not by the caller
        given["cache_implementation"] = "dynamic"


def check_thread(phases: PhaseTracker | None, thread: int) -> None:
    """Raise ConcurrentUse where another thread is generating."""
    if phases is not None and phases.thread != thread:
        raise ConcurrentUse("a forward pass while another thread generates; use one model object per thread")
