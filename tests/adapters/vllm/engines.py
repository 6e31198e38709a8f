"""Engines on longreach-mini, their answers, and those of longreach.generate."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import longreach

PACKAGE = Path(longreach.__file__).parent
MINI = PACKAGE / "models" / "longreach-mini"
NEW = 24  # tokens of an answer
# every method that runs in vLLM on a CPU, with the options that change how it runs
METHODS = (
    "dense",
    "streaming_llm",
    "streaming_llm window=128",
    "kascade",
    "kascade scoring=int8",
    "kascade heads=all",
    "omnikv",
    "less_is_more",
    "quest dense_layers=[0]",
    "loki",
)


@functools.cache
def _model() -> Any:
    return longreach.load("mini", dtype=torch.float32)


@functools.cache
def prompts(*characters: int) -> list[list[int]]:
    """Token ids of prompts of these lengths, each of another text."""
    text = (PACKAGE / "tasks" / "haystack" / "haystack.txt").read_text()
    _, tokenizer = _model()
    ask = "\n\nQuestion: What is the first word of the text?\nAnswer:"
    return [tokenizer(text[20000 * n : 20000 * n + size] + ask).input_ids for n, size in enumerate(characters)]


def ragged() -> list[list[int]]:
    return prompts(6000, 3000, 1200, 300, 2000, 900, 4500, 150)


def expected(decode: str, ids: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
    """Greedy answers of longreach.generate, prompt by prompt."""
    return [list(_answer(decode, tuple(each), new)) for each in ids]


@functools.cache
def _answer(decode: str, ids: tuple[int, ...], new: int) -> tuple[int, ...]:
    model, _ = _model()
    made = longreach.generate(model, torch.tensor([ids]), max_new_tokens=new, decode=decode, eos_token_id=())
    return tuple(made.tokens[0].tolist())


@contextmanager
def engine(decode: str | None, **options: Any) -> Iterator[Any]:
    """A vllm.LLM of longreach-mini in fp32 that decodes by a method; None: without longreach."""
    from vllm import LLM

    given: dict[str, Any] = {
        "model": str(MINI),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "block_size": 32,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    if decode is not None:
        given["additional_config"] = {"longreach": {"decode": decode}}
    llm = LLM(**{**given, **options})
    try:
        yield llm
    finally:
        core = llm.llm_engine.engine_core
        del llm
        core.shutdown()
        gc.collect()


def answers(llm: Any, ids: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
    """Greedy answers of an engine to all prompts at once."""
    return [list(one.outputs[0].token_ids) for one in outputs(llm, ids, new)]


def outputs(llm: Any, ids: Sequence[Sequence[int]], new: int = NEW) -> list[Any]:
    """vLLM's outputs for all prompts at once."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    found: list[Any] = llm.generate([{"prompt_token_ids": list(each)} for each in ids], greedy, use_tqdm=False)
    return found
