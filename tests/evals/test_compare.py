"""KL, divergence and reads beside dense, against what a plain loop over the attached model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from longreach import StreamingLLM, attach
from longreach.errors import InvalidInput, UnknownName
from longreach.evals.compare import Compare, _divergence
from longreach.testing.tiny import random_tokens, tiny_model, tiny_tokenizer

STEPS, WINDOW = 6, 12
OPTIONS = {"streaming_llm": {"window": WINDOW}}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_tokens(1, 48)[0].tolist()


def compare(model: Any, prompt: list[int], **more: Any) -> list[Any]:
    return list(Compare(model, tiny_tokenizer(), prompt, **{"steps": STEPS, "options": OPTIONS, **more}).run(chunk=16))


@torch.no_grad()
def distributions(model: Any, prompt: list[int], answer: list[int], prefill: Any, decode: Any) -> torch.Tensor:
    """log-probabilities [steps + 1, V]: after the prompt, then after each token of `answer`."""
    rows = []
    with attach(model, prefill=prefill, decode=decode) as session:
        cache = session.new_cache()
        for tokens in (prompt, *([t] for t in answer)):
            logits = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
            rows.append(logits[0, -1].double().log_softmax(-1))
    return torch.stack(rows)


def test_divergence_from_dense_is_that_of_a_plain_loop(model: Any, prompt: list[int]) -> None:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    answer = out[0, len(prompt) :].tolist()
    dense = distributions(model, prompt, answer, None, None)
    methods = {"dense": None, "streaming_llm": StreamingLLM(window=WINDOW)}
    found = compare(model, prompt, methods=["streaming_llm"])
    assert len(found) == 3
    for c in found:
        rows = distributions(model, prompt, answer, methods[c.prefill["name"]], methods[c.decode["name"]])
        expected = kl_div(rows, dense, log_target=True, reduction="none").sum(-1)
        assert torch.tensor(c.kl_steps) == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert c.kl == pytest.approx(float(expected[1:].mean()), rel=1e-3, abs=1e-5) and c.steps == STEPS
        differs = (rows.argmax(-1) != dense.argmax(-1)).nonzero().flatten().tolist()
        assert c.first_divergence == (differs[0] if differs else None)
    exact, decoded, throughout = found
    assert exact.kl == 0.0 and exact.first_divergence is None
    assert decoded.kl > 0.01 and decoded.kl_steps[0] < 1e-5  # after the prompt, decoding has not begun
    assert throughout.kl > 0.01 and throughout.kl_steps[0] > 0.01
    assert decoded.first_divergence is not None


def test_a_budget_of_everything_diverges_nowhere(model: Any, prompt: list[int]) -> None:
    options = {"streaming_llm": {"window": 1.0}, "oracle_top_k": {"k": 1.0}}
    for c in compare(model, prompt, options=options):
        assert c.kl < 1e-9 and c.first_divergence is None


def test_methods_do_not_affect_each_other(model: Any, prompt: list[int]) -> None:
    together = {(c.prefill["name"], c.decode["name"]): c for c in compare(model, prompt)}
    for c in compare(model, prompt, methods=["streaming_llm"]):
        other = together[c.prefill["name"], c.decode["name"]]
        assert c.kl_steps == other.kl_steps and c.decode_reads == other.decode_reads


def test_reads_are_those_of_the_decode_steps(model: Any, prompt: list[int]) -> None:
    dense, decoded, throughout = compare(model, prompt, methods=["streaming_llm"])
    seen = [len(prompt) + i + 1 for i in range(STEPS)]
    assert dense.decode_reads.total == dense.prefill_reads.total == 1.0
    assert decoded.decode_reads.total == pytest.approx((4 + WINDOW) * STEPS / sum(seen))
    assert decoded.decode_reads == throughout.decode_reads
    rows = range(1, len(prompt) + 1)
    assert throughout.prefill_reads.total == pytest.approx(sum(min(n, 4 + WINDOW) for n in rows) / sum(rows))


def test_it_ends_where_the_answer_of_dense_attention_ends(model: Any, prompt: list[int]) -> None:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    answer = out[0, len(prompt) :].tolist()
    end = next(i for i in range(1, STEPS) if answer[i] not in answer[:i])
    stopping = tiny_model("llama", eos_token_id=answer[end])
    assert {c.steps for c in compare(stopping, prompt)} == {end}


def test_tokens_that_dense_excludes_add_nothing() -> None:
    a = torch.tensor([0.5, 0.5, 0.0]).double().log()
    b = torch.tensor([0.25, 0.5, 0.25]).double().log()
    assert _divergence(a, b) == pytest.approx(0.5 * torch.tensor(2.0).log().item())
    assert _divergence(a, a) == 0.0


def test_bad_input(model: Any, prompt: list[int]) -> None:
    with pytest.raises(InvalidInput, match="steps: expected at least 1, got 0"):
        compare(model, prompt, steps=0)
    with pytest.raises(InvalidInput, match="shorten the document by 1 tokens"):
        compare(model, [1] * 4091)
    with pytest.raises(UnknownName, match="option of streaming_llm 'k'"):
        compare(model, prompt, options={"streaming_llm": {"k": 3}})
    with pytest.raises(InvalidInput, match="quest, which is not compared"):
        compare(model, prompt, options={"quest": {}})
