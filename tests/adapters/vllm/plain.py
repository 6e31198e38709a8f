"""Answers and log-probabilities of an engine without longreach, as JSON: `python -m tests.adapters.vllm.plain IDS`."""

from __future__ import annotations

import json
import sys
from typing import Any


def probabilities(llm: Any, ids: list[list[int]]) -> list[list[tuple[int, str]]]:
    """Each token of the answers and its log-probability, to the bit."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    found = llm.generate([{"prompt_token_ids": each} for each in ids], given, use_tqdm=False)
    return [
        [(token, float(each[token].logprob).hex()) for token, each in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in found)
    ]


if __name__ == "__main__":
    from tests.adapters.vllm.engines import engine

    with engine(None) as llm:
        print(json.dumps(probabilities(llm, json.loads(sys.argv[1]))))
