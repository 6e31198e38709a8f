"""What users do with an engine: short prompts, several answers, requests that end early, a cache that is emptied."""

from __future__ import annotations

import pytest

import longreach
from tests.adapters.vllm.engines import answers, engine, expected, prompts

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("decode", ["kascade", "quest dense_layers=[0]"])
def test_one_engine_used_in_many_ways(decode: str) -> None:
    from vllm import SamplingParams

    long, short = prompts(1500, 700)
    one = [long[:1], short[:1]]
    with engine(decode, enable_prefix_caching=True) as llm:
        assert answers(llm, one, 40) == expected(decode, one, 40)  # prompts of one token; answers cross a page
        assert answers(llm, [long], 8) == expected(decode, [long], 8)
        again = answers(llm, [long, long + short[:31]], 8)  # the first is cached whole
        assert again == expected(decode, [long, long + short[:31]], 8)
        several = SamplingParams(top_k=1, max_tokens=8, ignore_eos=True, n=3)
        (found,) = llm.generate([{"prompt_token_ids": short}], several, use_tqdm=False)
        assert [list(each.token_ids) for each in found.outputs] == expected(decode, [short], 8) * 3
        core, greedy = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        core.add_request("gone", {"prompt_token_ids": long}, greedy)
        for _step in range(4):
            core.step()
        core.abort_request(["gone"])
        assert answers(llm, [short, long], 8) == expected(decode, [short, long], 8)
        assert llm.reset_prefix_cache()
        assert answers(llm, [long], 8) == expected(decode, [long], 8)
        share = longreach.vllm.report(llm).fraction("decode")
        assert share is not None and 0 < share < 1


@pytest.mark.parametrize("decode", ["kascade", "loki"])
def test_one_request_at_a_time(decode: str) -> None:
    ids = prompts(900, 300, 600)
    with engine(decode, max_num_seqs=1) as llm:
        assert answers(llm, ids, 8) == expected(decode, ids, 8)
