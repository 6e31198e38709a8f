"""What the harness asks of its models, and models to ask."""

from __future__ import annotations

from functools import cache
from typing import Any

from longreach.testing.tiny import tiny_model, tiny_tokenizer

STREAMING = "streaming_llm sinks=2 window=4"
MOST = 96  # tokens that the models are said to hold; one context is longer
CHOICES = [  # contexts that are shared and not, empty and too long; continuations of one token and of many
    ("the quick brown fox", " A"),
    ("the quick brown fox", " B jumps"),
    ("the quick brown fox", " C"),
    ("x", "yz"),
    ("", "nothing before"),
    ("", "n"),
    ("over the lazy dog and on and on " * 4, " it ran"),
]
TEXTS = ["hello world, " * 12, "short", "a"]


def attended(family: str) -> bool:
    """Whether some layer of the family attends without a window of its own: in the others, methods leave that be."""
    return family != "mistral"


@cache
def model_of(family: str) -> Any:
    return tiny_model(family)


def plain(family: str = "llama", **options: Any) -> Any:
    """The harness's own model."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(model_of(family), tokenizer=tiny_tokenizer(), **{"batch_size": 3, "max_length": MOST, **options})


def ours(family: str = "llama", **options: Any) -> Any:
    """The same with longreach."""
    from longreach.adapters.lm_eval import LongreachLM

    given = {"batch_size": 3, "max_length": MOST, "prefill_chunk_size": 13, **options}
    return LongreachLM(model_of(family), tokenizer=tiny_tokenizer(), **given)


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, n) for n, given in enumerate(arguments)]


def loglikelihoods(lm: Any) -> list[tuple[float, bool]]:
    return lm.loglikelihood(instances("loglikelihood", CHOICES), disable_tqdm=True)


def rolling(lm: Any) -> list[float]:
    return lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True)


def answers(lm: Any, **options: Any) -> list[str]:
    asked = [(context, {"until": ["zz"], "max_gen_toks": 12, **options}) for context, _ in CHOICES if context]
    return lm.generate_until(instances("generate_until", asked), disable_tqdm=True)
