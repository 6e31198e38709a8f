"""KL, divergence and reads beside dense, against what a plain loop over the attached model computes."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from longreach import StreamingLLM, attach
from longreach.adapters.transformers import FusedPrompt, Precompute, read_fused
from longreach.adapters.transformers.loop.decoder import Decoder
from longreach.errors import InvalidInput, UnknownName
from longreach.evals import layers
from longreach.evals.compare import Compare, divergence
from longreach.evals.methods import specs
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
    budgets = ("oracle_top_k", "quest", "omnikv", "less_is_more")
    options = {"streaming_llm": {"window": 1.0}, **{name: {"k": 1.0} for name in budgets}}
    options["oracle_sampling"] = {"k": 1.0, "draw": "systematic"}  # which draws every key then
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


def slow_at_first(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """Each method's first decode step in the process takes so long, as one that compiles kernels does; who stepped."""
    step, stepped = Decoder.step, list[str]()

    def slow(self: Decoder, **options: Any) -> None:
        name = self.method.name
        time.sleep(0.0 if name in stepped else seconds)
        stepped.append(name)
        step(self, **options)

    monkeypatch.setattr(Decoder, "step", slow)
    return stepped


def test_what_happens_once_is_in_no_time(model: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = slow_at_first(monkeypatch, 1.0)
    found = compare(model, prompt, steps=4, methods=("dense", "streaming_llm"))
    assert set(stepped) == {"dense", "streaming_llm"} and {x.steps for x in found} == {4}
    assert len(stepped) == len(found) * (1 + 4), "one step more for each, which is in no report"
    assert max(x.seconds_per_token for x in found) < 1.0 / 4


def test_it_ends_where_the_answer_of_dense_attention_ends(model: Any, prompt: list[int]) -> None:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    answer = out[0, len(prompt) :].tolist()
    end = next(i for i in range(1, STEPS) if answer[i] not in answer[:i])
    stopping = tiny_model("llama", eos_token_id=answer[end])
    assert {c.steps for c in compare(stopping, prompt)} == {end}
    assert {c.steps for c in compare(stopping, prompt, past_end=True)} == {STEPS}


def test_tokens_that_dense_excludes_add_nothing() -> None:
    a = torch.tensor([0.5, 0.5, 0.0]).double().log()
    b = torch.tensor([0.25, 0.5, 0.25]).double().log()
    assert divergence(a, b) == pytest.approx(0.5 * torch.tensor(2.0).log().item())
    assert divergence(a, a) == 0.0


def test_bad_input(model: Any, prompt: list[int]) -> None:
    with pytest.raises(InvalidInput, match="steps: expected at least 1, got 0"):
        compare(model, prompt, steps=0)
    with pytest.raises(InvalidInput, match="shorten the document by 1 tokens"):
        compare(model, [1] * 4091)
    with pytest.raises(UnknownName, match="option of streaming_llm 'k'"):
        compare(model, prompt, options={"streaming_llm": {"k": 3}})
    with pytest.raises(InvalidInput, match="quets, which is not compared"):
        compare(model, prompt, options={"quets": {}})


def errors(model: Any, prompt: list[int], *methods: str, **options: Any) -> dict[str, Any]:
    task = Compare(model, tiny_tokenizer(), prompt, steps=6, specs=specs(methods), layers=True, **options)
    return {c.label: c.layer_error for c in task.run()}


def test_errors_of_layers_are_those_of_a_direct_computation() -> None:
    model, prompt = tiny_model("llama"), random_tokens(1, 60)[0].tolist()
    narrow, wide = "streaming_llm sinks=2 window=6", "streaming_llm sinks=2 window=30"
    found = errors(model, prompt, narrow, wide, "oracle_top_k k=5 dense_layers=[0]")
    assert all(e == 0 for part in ("mean", "max") for row in found["dense"][part] for e in row)
    assert found["oracle_top_k k=5 dense_layers=[0]"]["max"][0] == [0.0] * 4
    for layer in range(2):
        for head in range(4):
            assert 0 < found[wide]["mean"][layer][head] < found[narrow]["mean"][layer][head]
            assert found[narrow]["mean"][layer][head] <= found[narrow]["max"][layer][head]
    # layer 0 sees the same hidden states whatever the method
    task = Compare(model, tiny_tokenizer(), prompt, steps=6, specs=specs([narrow]), layers=True)
    list(task.run())
    expected = layer_zero(model, [*prompt, *task.tokens], sinks=2, window=6)[:, -6:]
    assert found[narrow]["mean"][0] == pytest.approx(expected.mean(1).tolist(), rel=1e-3)
    assert found[narrow]["max"][0] == pytest.approx(expected.amax(1).tolist(), rel=1e-3)


def layer_zero(model: Any, tokens: list[int], sinks: int, window: int) -> torch.Tensor:
    """Errors [heads, tokens] of sinks and window in the first layer, from plain softmax in fp64."""
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0].self_attn
    handles = [getattr(layer, f"{x}_proj").register_forward_hook(
        lambda m, i, o, x=x: seen.__setitem__(x, o.detach().double())) for x in "qkv"]  # fmt: skip
    ids = torch.tensor([tokens])
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(ids.float(), torch.arange(ids.shape[1])[None])
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    n = ids.shape[1]
    q, k, v = (seen[x].view(n, -1, 16).transpose(0, 1) for x in "qkv")
    q, k = (x * cos[0] + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin[0] for x in (q, k))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    logits = q @ k.transpose(1, 2) / 4
    row, slot = torch.arange(n)[:, None], torch.arange(n)[None]
    causal = slot <= row
    kept = causal & ((slot < sinks) | (slot > row - window))
    dense, sparse = (logits.masked_fill(~m, -torch.inf).softmax(-1) @ v for m in (causal, kept))
    return (sparse - dense).norm(dim=-1) / dense.norm(dim=-1)


def test_errors_of_the_prompts_rows_where_prefill_is_not_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny_model("llama"), random_tokens(1, 60)[0].tolist()
    narrow = "streaming_llm/dense prefill.sinks=2 prefill.window=6"
    wide = "streaming_llm/dense prefill.sinks=2 prefill.window=30"
    task = Compare(model, tiny_tokenizer(), prompt, steps=2, specs=specs([narrow, wide]), layers=True)
    found = {c.label: c for c in task.run(chunk=16)}
    assert found["dense"].prefill_layer_error is None and found["dense"].layer_error is not None
    assert all(e == 0 for row in found[narrow].layer_error["max"] for e in row)  # decoding is dense there
    # layer 0 sees the same hidden states whatever the method
    expected = layer_zero(model, prompt, sinks=2, window=6)
    error = found[narrow].prefill_layer_error
    assert error["rows"] == len(prompt)
    assert error["mean"][0] == pytest.approx(expected.mean(1).tolist(), rel=1e-3)
    assert error["max"][0] == pytest.approx(expected.amax(1).tolist(), rel=1e-3)
    assert 0 < found[wide].prefill_layer_error["mean"][1][0] < error["mean"][1][0]
    monkeypatch.setattr(layers, "SAMPLED", 7)  # rows evenly spaced, the last of them the prompt's last
    (sampled,) = [c for c in task.run(chunk=16) if c.label == narrow]
    some = expected[:, [math.ceil(60 * (n + 1) / 7) - 1 for n in range(7)]]
    assert sampled.prefill_layer_error["rows"] == 7
    assert sampled.prefill_layer_error["mean"][0] == pytest.approx(some.mean(1).tolist(), rel=1e-3)


def test_layers_with_a_window_of_their_own_have_no_error() -> None:
    found = errors(tiny_model("mistral"), random_tokens(1, 60)[0].tolist(), "streaming_llm sinks=2 window=6")
    assert all(e == 0 for row in found["streaming_llm sinks=2 window=6"]["max"] for e in row)


def test_evicted_keys_are_gone_and_the_report_says_of_what(model: Any, prompt: list[int]) -> None:
    texts = ["dense evict=snapkv evict.capacity=12 evict.window=8", "dense evict=snapkv evict.capacity=99"]
    dense, few, all_kept = compare(model, prompt, options=None, specs=specs(texts))
    assert dense.evict is None and few.evict["capacity"] == 12
    assert few.kl_steps[0] == 0.0 and few.kl > 1e-4  # the first token comes before eviction
    assert all_kept.kl == pytest.approx(0.0, abs=1e-6)


def test_fusion_takes_documents(model: Any, prompt: list[int]) -> None:
    with pytest.raises(InvalidInput, match="fuse=a3: a --document is read whole; give --documents"):
        Compare(model, tiny_tokenizer(), prompt, specs=specs(["dense fuse=a3"]))


def chunked(model: Any, prompt: list[int]) -> FusedPrompt:
    with attach(model) as session:
        work = Precompute(session, prompt[:5])
        chunks = [work.compute(prompt[a:b]) for a, b in ((5, 20), (20, 40))]
    return FusedPrompt.of([prompt[:5], *chunks, prompt[40:]])


def test_fused_prompts_beside_an_exact_prefill_of_the_same_tokens(model: Any, prompt: list[int]) -> None:
    fused = chunked(model, prompt)
    texts = ["dense fuse=a3 fuse.ratio=1.0", "dense fuse=pie", "dense fuse=pie evict=snapkv evict.capacity=20"]
    dense, exact, pie, evicted = compare(model, prompt, options=None, specs=specs(texts), fused=fused)
    assert dense.fusion is None and dense.fuse is None and exact.fuse["ratio"] == 1.0
    assert max(exact.kl_steps) < 1e-6 and exact.first_divergence is None
    assert pie.kl_steps[0] > 1e-4 and pie.fusion.reused == 20 and exact.fusion.recomputed == 20
    assert evicted.kl_steps[0] == pytest.approx(pie.kl_steps[0]) and evicted.kl != pytest.approx(pie.kl)
    answer = [int(token) for token in distributions_of(model, prompt)]
    with attach(model, fuse="pie") as session:
        cache = session.new_cache()
        logits, _ = read_fused(session, cache, fused)
        rows = [logits.double().log_softmax(-1)]
        with torch.no_grad():
            for token in answer:
                out = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
                rows.append(out[0, -1].double().log_softmax(-1))
    want = distributions(model, prompt, answer, None, None)
    got = [float(kl_div(a, b, log_target=True, reduction="sum")) for a, b in zip(rows, want, strict=True)]
    assert list(pie.kl_steps) == pytest.approx(got, rel=1e-3, abs=1e-7)


def distributions_of(model: Any, prompt: list[int]) -> list[int]:
    """Dense attention's own answer."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, pad_token_id=256)
    return out[0, len(prompt) :].tolist()


def test_a_fused_prompt_must_be_the_prompt(model: Any, prompt: list[int]) -> None:
    with pytest.raises(InvalidInput, match="expected the prompt's own tokens"):
        Compare(model, tiny_tokenizer(), prompt[1:], specs=specs(["dense fuse=pie"]), fused=chunked(model, prompt))
