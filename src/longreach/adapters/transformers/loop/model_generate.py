"""model.generate of an attached model by the decode loop's captured steps.

transformers prepares the prompt, the logits processors and the stopping criteria, and reads the prompt. Only its loop
over tokens is replaced, so that tokens are chosen as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as criteria

from longreach.adapters.transformers.cache_name import CACHE
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop import run as running
from longreach.adapters.transformers.loop.sampling import Ends

if TYPE_CHECKING:
    from longreach.adapters.transformers.attach import Session

OUTPUTS = ("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits")
LEFT_TO_TRANSFORMERS = ("stop_strings", "synced_gpus", *OUTPUTS)  # settings that transformers' own loop serves


def why_not_captured(session: Session, setting: Callable[[str], Any], cache: LongreachCache | None) -> str | None:
    """Why transformers' own loop runs a call of generate; None where the captured steps do.

    setting: the value of one of generate's settings, None if it is not set. cache: as passed to generate.
    """
    capture, why = running.capture_for(session, None)
    if capture is None:
        return why
    if session.on_layer is not None:
        return "session.on_layer is set: it may keep tensors that the next captured step overwrites"
    for name in LEFT_TO_TRANSFORMERS:
        if setting(name):
            return f"{name} is set"
    if setting("guidance_scale") not in (None, 1):
        return "guidance_scale is set, and runs the model twice for a token"
    if setting("use_cache") is False:
        return "use_cache is off"
    config = session.cache_config if cache is None else cache.kv.config
    if config.host:
        return "keys and values lie in host memory (longreach.generate captures such steps)"
    return None


class _Chooser:
    """Tokens from logits as transformers chooses them, by its processors and criteria; all on the device.

    ids: the tokens so far, in a buffer [B, most]. finished: bool [B], sequences that have ended.
    """

    def __init__(
        self, ids: Tensor, most: int, processors: Any, stopping: Any, config: Any, generator: torch.Generator | None
    ):
        self._ids = torch.cat([ids, ids.new_zeros(len(ids), most - ids.shape[1])], 1)
        self._count, self._stopping, self._processors = ids.shape[1], stopping, processors
        self._draw, self._generator = bool(config.do_sample), generator
        self._pad = None
        if any(hasattr(each, "eos_token_id") for each in stopping):
            self._pad = config._pad_token_tensor.to(ids.device)
        self.finished = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def __call__(self, logits: Tensor) -> Tensor:
        ids = self._ids[:, : self._count]
        scores = self._processors(ids, logits.to(device=ids.device, dtype=torch.float32, copy=True))
        if self._draw:
            chosen = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[:, 0]
        else:
            chosen = scores.argmax(-1)
        if self._pad is not None:
            chosen = torch.where(self.finished, self._pad, chosen)
        self._ids[:, self._count] = chosen
        self._count += 1
        self.finished = self.finished | self._stopping(self._ids[:, : self._count], None)
        return chosen.to(logits.device)

    def sequences(self, columns: int) -> Tensor:
        """int64 [B, columns]: prompts and answers."""
        return self._ids[:, :columns].clone()


class StepLoop:
    """What transformers' generate takes as `custom_generate`: the loop over the tokens of an answer. For one call.

    streamer: as generate takes it. generator: of draws, default torch's own.
    graph, compile: as in `longreach.generate`.
    Afterwards: run, and the seconds that reading the prompt took.
    """

    def __init__(
        self, session: Session, streamer: Any = None, generator: torch.Generator | None = None,
        graph: running.GraphOption = None, compile: str = "auto",
    ):  # fmt: skip
        self.session, self.streamer, self.generator, self.graph, self.compile = (
            session,
            streamer,
            generator,
            graph,
            compile,
        )
        self.run: running.DecodeRun | None = None
        self.prefill_seconds = 0.0

    def __call__(
        self, model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """int64 [B, T + new]: prompts and answers."""
        columns, most = input_ids.shape[1], stopping_criteria.max_length
        passed = isinstance(model_kwargs.get(CACHE), LongreachCache)
        if not passed:
            prompts = (input_ids, model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask"))
            room = max(x.shape[1] for x in prompts if x is not None) + most - columns
            model_kwargs[CACHE] = self.session.static_cache(len(input_ids), room)
        cache: LongreachCache = model_kwargs[CACHE]
        choose = _Chooser(input_ids, most, logits_processor, stopping_criteria, generation_config, self.generator)
        run = self.run = running.DecodeRun(
            self.session, most - columns, Ends((), 0), choose, graph=self.graph, compile=self.compile,
            exactly=passed or not _known(logits_processor, stopping_criteria), finished=lambda: choose.finished,
        )  # fmt: skip
        with cache.restored_on_error(states=True):
            started = running.now(model)
            prompt = model._prefill(input_ids, generation_config, model_kwargs)
            self.prefill_seconds = running.now(model) - started
            read, made = cache.columns, 0
            with closing(run.tokens(cache, prompt.logits[:, -1])) as tokens:
                del prompt  # logits of a whole prompt may be large
                for token in tokens:
                    made += 1
                    if self.streamer is not None:
                        self.streamer.put(token)
            if self.streamer is not None:
                self.streamer.end()
            cache.drop_columns(cache.columns - (read + made - 1))
        return choose.sequences(columns + made)


def _known(*parts: Sequence[Any]) -> bool:
    """Whether all processors and criteria are transformers' own or longreach's: these may run some steps too many."""
    of = {type(each).__module__.partition(".")[0] for part in parts for each in part}
    return of <= {criteria.__name__.partition(".")[0], __name__.partition(".")[0]}
