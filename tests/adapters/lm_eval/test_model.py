"""The harness's model with longreach answers as the harness's own does where attention is dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, Unsupported
from longreach.methods.oracle_top_k import OracleTopK
from longreach.testing.tiny import FAMILIES, random_tokens, tiny_tokenizer
from tests.adapters.lm_eval.requests import STREAMING, answers, attended, loglikelihoods, model_of, ours, plain, rolling
from tests.tiers import families, swept

pytest.importorskip("lm_eval")


def close(found: Any, expected: Any) -> None:
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-4, abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.covering
@pytest.mark.parametrize("scoring", ["prefill", "decode"])
@pytest.mark.parametrize("family", families(2))
def test_dense_scores_are_those_of_the_harness(family: str, scoring: str) -> None:
    expected, texts = loglikelihoods(plain(family)), rolling(plain(family))
    with ours(family, scoring=scoring) as lm:
        close(loglikelihoods(lm), expected)
        assert rolling(lm) == pytest.approx(texts, rel=1e-4)


@pytest.mark.parametrize("family", families(2))
def test_dense_answers_are_those_of_the_harness(family: str) -> None:
    expected = answers(plain(family))
    assert any(expected)
    with ours(family) as lm:
        assert answers(lm) == expected


@pytest.mark.parametrize("family", swept([f for f in FAMILIES if attended(f)], 1))
def test_a_method_changes_scores_and_answers(family: str) -> None:
    expected, said = loglikelihoods(plain(family)), answers(plain(family))
    with ours(family, decode=STREAMING, scoring="decode") as lm:
        found = loglikelihoods(lm)
        assert any(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(found, expected, strict=True))
        assert lm.about()["reads_over_dense"]["decode"] < 0.6
        assert answers(lm) != said


def test_only_prefill_acts_where_scores_are_made_in_prefill(caplog: pytest.LogCaptureFixture) -> None:
    expected = loglikelihoods(plain())
    with ours(decode=STREAMING) as lm:
        close(loglikelihoods(lm), expected)
        close(loglikelihoods(lm), expected)
        assert lm.about()["reads_over_dense"] == {"prefill": 1.0, "decode": None}
    said = [r.getMessage() for r in caplog.records if "does not act" in r.getMessage()]
    assert len(said) == 1 and "streaming_llm" in said[0] and "scoring='decode'" in said[0]
    with ours(prefill=STREAMING) as lm:
        found = loglikelihoods(lm)
        assert any(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(found, expected, strict=True))
        assert lm.about()["reads_over_dense"]["prefill"] < 0.6


@pytest.mark.covering
@pytest.mark.parametrize("scoring", ["prefill", "decode"])
@pytest.mark.parametrize("options", swept([{"batch_size": 16}, {"prefill_chunk_size": 512}, {"batch_size": 1}], 2))
def test_batches_and_chunks_change_no_score(scoring: str, options: dict[str, Any]) -> None:
    methods = {"prefill": STREAMING, "decode": OracleTopK(k=3), "scoring": scoring}
    with ours(**methods) as lm:
        expected, texts = loglikelihoods(lm), rolling(lm)
    with ours(**methods, **options) as lm:
        close(loglikelihoods(lm), expected)
        assert rolling(lm) == pytest.approx(texts, rel=1e-4)


@pytest.mark.parametrize("scoring", ["prefill", "decode"])
def test_tokens_are_read_once_and_in_their_phase(scoring: str) -> None:
    """A context serves all its continuations; its last token is read with each, and the last of each never."""
    context, other, choices = list(range(10)), list(range(50, 54)), [[1, 2, 3], [4], [5, 6]]
    requests = [(None, context, tokens) for tokens in choices] + [(None, other, [7])]
    with ours(scoring=scoring) as lm:
        lm._loglikelihood_tokens(requests, disable_tqdm=True)
        rows = {(layer.phase, layer.layer): layer.rows for layer in lm.session.report().layers}
    read, scored = 9 + 3, 3 + 1 + 2 + 1
    if scoring == "decode":
        assert rows == {("prefill", 0): read, ("prefill", 1): read, ("decode", 0): scored, ("decode", 1): scored}
    else:
        assert rows == {("prefill", 0): read + scored, ("prefill", 1): read + scored}


@pytest.mark.parametrize("scoring", ["prefill", "decode"])
def test_what_greedy_search_chooses_is_said_to_be_greedy(scoring: str) -> None:
    model, context = model_of("llama"), random_tokens(1, 30)
    chosen = model.generate(context, max_new_tokens=5, do_sample=False)[0, 30:].tolist()
    other = [*chosen[:2], (chosen[2] + 1) % 256, *chosen[3:]]
    with ours(scoring=scoring) as lm:
        requests = [(None, context[0].tolist(), tokens) for tokens in (chosen, other, chosen[:1])]
        assert [greedy for _, greedy in lm._loglikelihood_tokens(requests, disable_tqdm=True)] == [True, False, True]


def test_methods_are_attached_until_it_is_closed() -> None:
    model, tokens = model_of("llama"), random_tokens(1, 40)
    with torch.no_grad():
        before = model(tokens).logits
    lm = ours(prefill=STREAMING)
    with torch.no_grad():
        assert not torch.equal(model(tokens).logits, before)
    lm.close()
    lm.close()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)
    for ask in (loglikelihoods, rolling, answers):
        with pytest.raises(InvalidInput, match="was closed"):
            ask(lm)


def test_a_failed_start_leaves_the_model_alone() -> None:
    from longreach.adapters.lm_eval import LongreachLM

    with pytest.raises(AssertionError):  # the harness's own check
        LongreachLM(model_of("llama"), tokenizer=object())
    with ours() as lm:
        assert loglikelihoods(lm)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_beams": 3}, r"beam search \(num_beams=3\)"),
        ({"num_return_sequences": 2, "do_sample": True, "temperature": 1.0}, "num_return_sequences=2"),
        ({"penalty_alpha": 0.5}, "penalty_alpha"),
    ],
)
def test_other_searches_are_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    with ours() as lm, pytest.raises(Unsupported, match=complaint):
        answers(lm, **options)


def test_a_continuation_beyond_the_model_is_refused() -> None:
    with ours(max_length=8) as lm, pytest.raises(InvalidInput, match=r"a continuation of 9 tokens exceeds .* 8"):
        lm._loglikelihood_tokens([(None, [1], list(range(9)))], disable_tqdm=True)


def test_a_cut_context_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with ours() as lm:
        loglikelihoods(lm)
    said = [r.getMessage() for r in caplog.records if "cut on the left" in r.getMessage()]
    # 128 tokens with the first, 8 of the continuation, whose last is not read
    assert said == ["1 of 7 contexts are cut on the left, by up to 39 tokens, to fit the model's 96"]


def test_the_tokenizer_goes_with_the_model() -> None:
    from longreach.adapters.lm_eval import LongreachLM

    with pytest.raises(InvalidInput, match="give its loaded tokenizer too"):
        LongreachLM(model_of("llama"))
    with pytest.raises(InvalidInput, match="device and dtype"):
        LongreachLM(model_of("llama"), tokenizer=tiny_tokenizer(), dtype="bfloat16")
