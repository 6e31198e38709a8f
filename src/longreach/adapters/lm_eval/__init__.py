"""lm-evaluation-harness: a transformers model with longreach's methods as a model of the harness, "longreach".

    from longreach.adapters.lm_eval import LongreachLM

    with LongreachLM("./model", decode="oracle_top_k k=0.1", scoring="decode") as lm:
        results = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])

`python -m longreach.adapters.lm_eval run --model longreach ...` is the harness's own command with that model in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longreach.errors import Unsupported

if TYPE_CHECKING:
    from longreach.adapters.lm_eval.model import LongreachLM as LongreachLM

__all__ = ["LongreachLM"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    try:
        from longreach.adapters.lm_eval.model import LongreachLM
    except ImportError as error:
        raise Unsupported(
            f"lm-evaluation-harness cannot be loaded ({error}); pip install 'longreach[lm-eval]'"
        ) from error
    return LongreachLM
