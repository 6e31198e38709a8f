"""A model's step counts beside right logits only; the baseline keeps to its time and says why it was left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.adapters.transformers import synthetic
from longreach.adapters.transformers.loop.decoder import Decoder
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.check_method import LayerErrors
from longreach.bench.check_step import Steps, Verdict
from longreach.bench.clock import Clock
from longreach.bench.decoding import BANDWIDTH, Decoding, Stepped, entry_of
from longreach.bench.targets import judge
from longreach.bench.timing import Timing
from longreach.cache import Append, DecodeBuffers, KVCache
from longreach.errors import InvalidInput
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.kascade import Kascade
from longreach.methods.kascade.state import KascadeState
from longreach.ops import quantise_keys
from tests.tiers import swept

CASE = tiny(CASES["8b-8k-b1"])


def bench(*without: str, steps: int = 6) -> Decoding:
    made = Decoding(torch.device("cpu"), without=without, quick=True, seed=0, say=lambda line: None)
    made.steps = steps
    return made


def test_the_input_embedding_is_not_among_the_bytes() -> None:
    model, _ = bench().model(CASE)
    whole = sum(p.numel() for p in model.parameters())
    assert synthetic.weight_bytes(model) == 4 * (whole - 264 * 64)


def test_the_model_is_made_once_and_is_the_same_again() -> None:
    one = bench()
    assert one.model(CASE)[0] is one.model(tiny(CASES["8b-32k-b1"]))[0]
    assert torch.equal(one.model(CASE)[0].lm_head.weight, bench().model(CASE)[0].lm_head.weight)
    assert one.model(CASE)[0] is not one.model(CASE.but(dtype="bfloat16"))[0]


def test_a_loop_that_reads_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Decoder.take
    monkeypatch.setattr(Decoder, "take", lambda self, chosen: take(self, chosen ^ 1))
    with pytest.raises(WrongResult, match="did not read the token chosen before"):
        bench("transformers_static").run(CASE)


def test_a_step_that_is_wrong_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = DecodeBuffers.advance

    def stays(self: DecodeBuffers) -> None:
        if self.cache.lengths[0] < 260:  # beyond, tokens overwrite each other
            advance(self)

    monkeypatch.setattr(DecodeBuffers, "advance", stays)
    with pytest.raises(WrongResult, match="logits differ"):
        bench("transformers_static").run(CASE)


def test_other_keys_than_transformers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = synthetic.fill

    def shorter(cache: synthetic.LongreachCache, model: object, tokens: int, seed: int) -> None:
        fill(cache, model, tokens, seed)  # type: ignore[arg-type]
        for k, _ in cache.kv.memory:  # type: ignore[misc]
            k[:, :, 5] *= -1

    monkeypatch.setattr(synthetic, "fill", shorter)
    with pytest.raises(WrongResult, match="logits differ"):
        bench().run(CASE)


def test_a_method_has_noted_the_keys_that_no_prompt_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its anchors would choose by what the memory of their 8-bit copies happened to hold."""
    case, seen = CASES["8b-kascade-128k-b1"], list[int]()
    assert case.stack is not None
    replays = Decoding.replays

    def look(self: Decoding, decoder: Decoder, capture: bool, steps: int) -> list[float]:
        kv = decoder.cache.kv
        for layer, (k, _) in enumerate(kv.memory):  # type: ignore[misc]
            for state in decoder.cache.states.states(layer=layer):
                if isinstance(state, KascadeState) and state.copy is not None:
                    codes, scale = quantise_keys(k[:, :, :256])
                    assert torch.equal(state.copy["keys"][:, :, :256], codes)
                    assert torch.equal(state.copy["scale"][:, :, :256], scale)
                    seen.append(layer)
        return replays(self, decoder, capture, steps)

    monkeypatch.setattr(Decoding, "replays", look)
    eight_bit = tiny(replace(case, stack=replace(case.stack, options=(("scoring", "int8"),))))
    exact, chosen = (bench("transformers_static").run(c)["entries"] for c in (tiny(case), eight_bit))
    assert seen == [2]
    assert chosen[2]["left_out"] == pytest.approx(exact[2]["left_out"], rel=0.1)


def test_the_baseline_keeps_to_its_time() -> None:
    one = bench()
    one.spent, one.last = 145.0, 20.0
    result = one.run(CASE)
    assert result["baselines"]["left_out"] == ["transformers_static"]
    assert "145 s" in result["baselines"]["why"]["transformers_static"]
    assert {entry["who"] for entry in result["entries"]} == {"longreach"}


def test_shapes_of_no_model_are_refused() -> None:
    with pytest.raises(InvalidInput, match="--rows 2"):
        bench().run(CASE.but(rows=2))
    with pytest.raises(InvalidInput, match="heads: expected a divisor of the hidden size 64, got 6"):
        bench().run(CASE.but(heads=6))
    with pytest.raises(InvalidInput, match="heads: expected 1 to 16 times the 3 KV heads, got 4"):
        bench().run(CASE.but(kv_heads=3))


def test_the_clock_wants_all_its_tokens() -> None:
    clock = Clock()
    clock.times = [0.0, 1.0, 3.0, 6.0]
    assert clock.steps(2) == [2.0, 3.0]
    with pytest.raises(InvalidInput, match="4 came"):
        clock.steps(4)


def test_tokens_that_are_profiled_are_not_timed() -> None:
    clock = Clock(profiled=(2, 1))
    clock.times = [0.0, 1.0, 3.0, 60.0]
    assert clock.steps(2) == [1.0, 2.0]


def test_a_step_that_appends_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values stay zeros: memory that nobody wrote may hold those of an earlier run."""
    append = KVCache.append

    def skips(self: KVCache, layer: int, step: Append, k: torch.Tensor, v: torch.Tensor) -> None:
        prompt = k.shape[0] > 1 or self.lengths[0] < 256
        append(self, layer, step, k if prompt else torch.zeros_like(k), v if prompt else torch.zeros_like(v))

    monkeypatch.setattr(KVCache, "append", skips)
    with pytest.raises(WrongResult, match="logits differ"):
        bench("transformers_static").run(CASE)


def test_a_method_whose_layers_are_right_is_kept_with_its_bound() -> None:
    result = bench("transformers_static").run(tiny(CASES["8b-kascade-128k-b1"]))
    check, entry = result["check_method"], result["entries"][2]
    assert check["layers"] == 4 and 0 < check["error"] <= check["error_bound"] <= 1e-4
    assert (entry["error"], entry["error_bound"]) == (check["error"], check["error_bound"])
    assert check["of_captured"] <= check["of_captured_bound"] == 2 * result["error_bound"]
    assert entry["left_out"] > 100 * entry["error"]  # a tenth of the keys is no exact attention


def test_what_attention_takes_of_a_step_is_judged() -> None:
    """Of what whole steps take more than one whose attention reads nothing."""
    case = tiny(CASES["8b-kascade-128k-b1"])
    result = bench("transformers_static").run(case)
    times = {e["name"]: e["microseconds"]["median"] for e in result["entries"]}
    rest = times.pop("without attention")
    (target,) = judge(CASES["8b-kascade-128k-b1"], result["entries"])
    assert target["got"] == pytest.approx((times["captured step"] - rest) / (times["kascade: captured step"] - rest))
    entry = next(e for e in result["entries"] if e["name"] == "without attention")
    assert entry["settings"]["keys_and_values_read"] == 0 and entry["error"] is None
    assert (
        judge(CASES["8b-kascade-128k-b1"], [e for e in result["entries"] if e["name"] != "without attention"])[0]["got"]
        is None
    )


@pytest.mark.parametrize(("layer", "factor"), swept([(1, 1.001), (3, 0.999)], 1))
def test_a_layer_that_is_off_makes_no_record(layer: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Kascade.run

    def off(self: Kascade, call: LayerCall, state: object) -> Outcome:
        outcome = run(self, call, state)  # type: ignore[arg-type]
        if call.layer != layer:
            return outcome
        return outcome._replace(partial=replace(outcome.partial, out=outcome.partial.out * factor))

    monkeypatch.setattr(Kascade, "run", off)
    with pytest.raises(WrongResult, match=f"attention of layer {layer} is off by 1.00e-03"):
        bench("transformers_static").run(tiny(CASES["8b-kascade-128k-b1"]))


def test_a_step_says_what_it_launches_and_how_often() -> None:
    """On a CPU attention is the reference's, so there is nothing to name; every replay is kept all the same."""
    step, loop, theirs = bench(steps=16).run(CASE)["entries"]
    assert step["launched"] == loop["launched"] == {"kernels": None, "triton": [], "device": None}
    assert all(len(e["microseconds"]["replays"]) == 16 for e in (step, loop, theirs))
    assert step["memory"] == {"before": None, "decode_peak": None}


def test_the_timed_step_is_judged_by_the_one_without_capture() -> None:
    made, case = bench(), tiny(CASES["8b-kascade-128k-b1"])
    layers = LayerErrors()
    layers.worst, layers.bound = dict.fromkeys(range(4), 1e-6), 1e-4
    captured, eager = torch.full((2, 1, 5), 1.01), torch.ones(2, 5)
    stepped = Stepped([], Steps(torch.empty(0), torch.empty(0), captured), {}, eager, layers)
    dense = Verdict(1, 0, 0.0, 0.0, 0.0, 0.006, 0.0)
    assert made.judge_method("a: kascade", case, stepped, dense).of_captured == pytest.approx(0.01, rel=1e-4)
    twice = replace(stepped, done=replace(stepped.done, logits=2 * captured))
    with pytest.raises(
        WrongResult, match=r"the captured step's logits differ from the uncaptured step's by 1\.02e\+00"
    ):
        made.judge_method("a: kascade", case, twice, dense)
    assert made.judge_method("a: loki", case, twice, dense).of_captured_bound is None  # rounding changes its keys


def test_a_rate_counts_the_keys_that_are_read() -> None:
    timing = Timing.of([2e-12] * 3, 1, "by hand")
    given = {"name": "it", "who": "longreach", "timing": timing, "error": 0.0, "error_bound": 0.0}
    dense = entry_of(100, 300, settings={}, **given)
    sparse = entry_of(100, 300, settings={"keys_and_values_read": 0.5}, **given)
    assert (dense["tb_per_s"], sparse["tb_per_s"]) == (200, 125)
    assert dense["share_of_limit"] == pytest.approx(200e12 / BANDWIDTH) and "share_of_limit" not in sparse
