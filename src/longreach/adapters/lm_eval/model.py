"""The harness's model: HFLM, with attention by longreach's methods."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any, get_args

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from longreach.adapters.lm_eval.options import batch_of, check_options, check_processes, dtype_of
from longreach.adapters.lm_eval.scoring import Score, Scorer, Scoring
from longreach.adapters.transformers import CHUNK, attach, load, model_path
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.registry import choose

log = logging.getLogger(__name__)
Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (its texts, context, continuation)


@register_model("longreach")
class LongreachLM(HFLM):
    """A transformers model in lm-evaluation-harness, any of longreach's methods in the place of its attention.

    pretrained: a model directory, "mini", or a loaded model (then with its tokenizer).
    prefill, decode: a configured method or its text, "oracle_top_k k=0.1 dense_layers=[0]"; None for dense.
    scoring: how log-likelihoods are computed. "prefill": context and continuation are read in passes of many tokens,
        so only the prefill method acts, and decode has no effect. "decode": continuations are read token by token, and
        the decode method makes every score. Text that is generated is always decoded.
    cache: layout of the KV cache, or its kind ("contiguous", "paged"). impl: who computes attention.
    prefill_chunk_size: prompt tokens per pass. device: "auto" takes the GPU where there is one.
    dtype: "auto" is float32 on the CPU, the checkpoint's own elsewhere. batch_size: a count.
    hf: further options of HFLM, those in `options.PASSED_ON`.

    Methods stay attached until `close` (or the end of `with`, or of this object); then the model is as before, and
    evaluates no more.
    Results list under "longreach" in their config the methods and their bytes read over dense attention's.
    Raises Unsupported for what HFLM can and this cannot, by name; InvalidInput, UnknownName, ModelFileError.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        prefill: str | AttentionMethod | None = None,
        decode: str | AttentionMethod | None = None,
        scoring: Scoring = "prefill",
        cache: CacheConfig | str | None = None,
        impl: str = "auto",
        prefill_chunk_size: int = CHUNK,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        batch_size: int | str = 1,
        **hf: Any,
    ) -> None:
        check_options(hf)
        check_processes()
        if scoring not in get_args(Scoring):
            raise UnknownName("scoring", scoring, get_args(Scoring))
        if not isinstance(prefill_chunk_size, int) or prefill_chunk_size < 1:
            raise InvalidInput(f"prefill_chunk_size: expected a count >= 1, got {prefill_chunk_size!r}")
        methods = {"prefill": choose("prefill", prefill), "decode": choose("decode", decode)}
        layout = CacheConfig(cache) if isinstance(cache, str) else cache  # type: ignore[arg-type]
        size = batch_of(batch_size)
        model, tokenizer, name = _loaded(pretrained, tokenizer, device, dtype)
        self.session = attach(model, **methods, cache=layout, impl=impl)  # type: ignore[arg-type]
        self._closed, self._told = False, False
        self._leave = weakref.finalize(self, self.session.close)  # the harness closes no model that it made
        self._leave.atexit = False
        try:
            _init(super().__init__, pretrained=model, tokenizer=tokenizer, batch_size=size, **hf)
        except BaseException:
            self._leave()
            raise
        self.pretrained = name
        self.scoring, self.chunk = scoring, prefill_chunk_size
        self._scorer = Scorer(self.session, prefill_chunk_size, scoring)

    def __enter__(self) -> LongreachLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the methods out of the model. The session's report stays readable."""
        self._closed = True
        self._leave()

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        """In place of HFLM's: a context is read once for all its continuations, in chunks, and no logits are kept."""
        self._check_open()
        self._say_what_acts()
        groups = self._groups(requests)
        scores: dict[int, Score] = {}
        size = override_bs or self.batch_size
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood requests") as bar:
            for first in range(0, len(groups), size):
                batch = groups[first : first + size]
                wanted = [[requests[n][2] for n in numbers] for _, numbers in batch]
                found = self._scorer.score([context for context, _ in batch], wanted)
                for (_, numbers), row in zip(batch, found, strict=True):
                    for number, score in zip(numbers, row, strict=True):
                        scores[number] = score
                        texts = requests[number][0]
                        if texts is not None:
                            self.cache_hook.add_partial("loglikelihood", texts, score)
                        bar.update(1)
        return [scores[number] for number in range(len(requests))]

    def _groups(self, requests: list[Request]) -> list[tuple[tuple[int, ...], list[int]]]:
        """(context, numbers of the requests with it), longest first. Unshared contexts form groups of one."""
        groups: dict[Any, tuple[tuple[int, ...], list[int]]] = {}
        over: list[int] = []
        for number, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # the last token is never read
            if room < 1:
                raise InvalidInput(
                    f"a continuation of {len(continuation)} tokens exceeds the model's {self.max_length}; "
                    f"raise max_length or leave the task out"
                )
            over.append(len(context) - room)
            kept = tuple(context[-room:])
            groups.setdefault(kept if len(kept) > 1 else number, (kept, []))[1].append(number)
        if cut := [tokens for tokens in over if tokens > 0]:
            what = "%d of %d contexts are cut on the left, by up to %d tokens, to fit the model's %d"
            log.warning(what, len(cut), len(over), max(cut), self.max_length)
        return sorted(groups.values(), key=lambda group: -len(group[0]))

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        raise Unsupported(
            "this part of HFLM keeps the logits of whole prompts; longreach's loglikelihood does not use it"
        )

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation: Any) -> Tensor:
        self._check_open()
        answers = generation.get("num_return_sequences") or 1
        if answers > 1:
            raise Unsupported(f"num_return_sequences={answers}: one answer to each request; use the task's repeats")
        generation.setdefault("prefill_chunk_size", self.chunk)
        return super()._model_generate(context, max_length, stop, **generation)

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's information and longreach's: methods, scoring, bytes read over dense attention's so far."""
        return {**super().get_model_info(), "longreach": self.about()}

    def about(self) -> dict[str, Any]:
        """Methods with their options, scoring, and reads of both phases over dense attention's, None before a step."""
        session, report = self.session, self.session.report()
        return {
            "prefill": session.prefill.to_json(),
            "decode": session.decode.to_json(),
            "scoring": self.scoring,
            "prefill_chunk_size": self.chunk,
            "reads_over_dense": {"prefill": report.fraction("prefill"), "decode": report.fraction("decode")},
        }

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("this model was closed, so no method is attached; make another LongreachLM")

    def _say_what_acts(self) -> None:
        decode = self.session.decode
        if self.scoring == "prefill" and decode.name != "dense" and not self._told:
            self._told = True
            log.warning(
                "log-likelihoods are scored in prefill passes, where decode method %s does not act; "
                "give scoring='decode' to measure it", decode.name,
            )  # fmt: skip


def _loaded(pretrained: Any, tokenizer: Any, device: Any, dtype: Any) -> tuple[Any, Any, str]:
    """(model, tokenizer, name) of a directory, or as given."""
    if isinstance(pretrained, (str, Path)):
        model, own = load(pretrained, device="auto" if device is None else str(device), dtype=dtype_of(dtype))
        return model, own if tokenizer is None else tokenizer, str(model_path(pretrained).resolve())
    if tokenizer is None or isinstance(tokenizer, str):
        raise InvalidInput("pretrained is a loaded model; give its loaded tokenizer too")
    if device is not None or dtype is not None:
        raise InvalidInput("pretrained is a loaded model: leave device and dtype out")
    return pretrained, tokenizer, str(getattr(pretrained, "name_or_path", ""))


def _init(init: Any, **options: Any) -> None:
    """HFLM's __init__, without its warnings that a loaded model leaves options unused: they were looked at here."""
    logger = logging.getLogger(HFLM.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        init(**options)
    finally:
        logger.setLevel(level)
