"""Plans that a session makes of its first prompt: the same as calibration's, kept, found again, and told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longreach
from longreach import Kascade, Loki, attach
from longreach.adapters.transformers import Reader, automatic_plans, planned_shape, shape_of
from longreach.errors import InvalidInput, Unsupported
from longreach.evals.calibration.gather import gather
from longreach.evals.calibration.kascade import KascadeGather, calibrated
from longreach.evals.calibration.loki import LokiGather
from longreach.evals.calibration.loki import calibrated as loki_calibrated
from longreach.evals.calibration.prompts import Prompt
from longreach.methods.kascade import automatic as kascade_automatic
from longreach.methods.kascade.automatic import KascadeMaker
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.methods.loki.automatic import LokiMaker
from longreach.methods.loki.plan import LokiPlan
from longreach.plans import Plan, load
from longreach.runtime import PlanReport
from longreach.testing.tiny import random_tokens, tiny_model

TOKENS, K, TILE = 64, 8, 16  # tiles of 8 tokens: the tiny model has two query heads for each KV head
SPARSE = {"k": 8, "min_keys": 8}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makers that are content with prompts of a few tokens, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kascade_automatic, "NEEDED", 40)
    monkeypatch.setattr(LokiMaker, "needed", 40)
    plan_maker = Kascade.plan_maker

    def small(self: Kascade, model: Any) -> KascadeMaker | None:
        return plan_maker(self, model) and KascadeMaker(2, tiles=6, every=1, k=K, tile=TILE)

    monkeypatch.setattr(Kascade, "plan_maker", small)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture
def prompt() -> Tensor:
    return random_tokens(1, TOKENS)


def kept(kind: str, folder: Path) -> list[Path]:
    return sorted((folder / "longreach" / "plans").glob(f"{kind}-*.json"))


def plan_of(session: longreach.adapters.transformers.Session) -> PlanReport:
    (found,) = session.report().plans
    return found


def tokens(model: Any, prompt: Tensor, method: Any, **options: Any) -> tuple[list[int], PlanReport | None]:
    with attach(model, decode=method, **{k: v for k, v in options.items() if k == "evict"}) as session:
        chunk = options.get("chunk")
        out = longreach.generate(session, prompt, max_new_tokens=8, prefill_chunk_size=chunk)
        plans = session.report().plans
    return out.tokens[0].tolist(), plans[0] if plans else None


def test_kascade_plan_has_the_similarities_of_calibration(model: Any, prompt: Tensor, tmp_path: Path) -> None:
    tokens(model, prompt, Kascade(**SPARSE))
    (file,) = kept("kascade", tmp_path)
    made = CalibrationResult.of(load(file, "kascade"))
    part = gather(model, [Prompt("one", tuple(prompt[0].tolist()))], KascadeGather(shape_of(model), k=K, tile=TILE))
    expected = calibrated(part)
    assert torch.allclose(made.heads, expected.heads, atol=1e-5)
    assert not made.weighted


def test_importance_is_that_of_the_last_rows(model: Any, prompt: Tensor, tmp_path: Path) -> None:
    """Of a prompt that is no longer than these rows, it is calibration's."""
    short = prompt[:, : 6 * 8 + K + 1]
    tokens(model, short, Kascade(**SPARSE))
    made = load(kept("kascade", tmp_path)[0], "kascade").arrays["importance"]
    seen: list[Tensor] = []
    from longreach.adapters.transformers import residuals
    from longreach.methods.kascade.calibrate import change

    with residuals(model, lambda layer, x, out: seen.append(change(x[0, -48:], out[0, -48:]).mean())), torch.no_grad():
        model(short)
    assert torch.allclose(made, torch.stack(seen).to(made), atol=1e-5)


def test_loki_plan_is_that_of_calibration(model: Any, prompt: Tensor, tmp_path: Path) -> None:
    tokens(model, prompt, Loki())
    made = LokiPlan.of(load(kept("loki", tmp_path)[0], "loki"))
    part = gather(model, [Prompt("one", tuple(prompt[0].tolist()))], LokiGather(shape_of(model)))
    assert torch.allclose(made.variance, loki_calibrated(part).variance, rtol=1e-3, atol=1e-6)


METHODS = {
    "kascade": lambda plan: Kascade(plan=plan, **SPARSE),
    "kascade int8": lambda plan: Kascade(plan=plan, scoring="int8", **SPARSE),
    "loki": lambda plan: Loki(plan=plan, k=8),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_first_answer_uses_the_plan(name: str, model: Any, prompt: Tensor, tmp_path: Path) -> None:
    """So does a later session, which finds it. Both decode as with the file."""
    make, kind = METHODS[name], name.partition(" ")[0]
    first, made = tokens(model, prompt, make("auto"))
    assert made is not None and made.source == "prompt" and made.tokens == TOKENS
    (file,) = kept(kind, tmp_path)
    assert made.file == str(file)
    again, found = tokens(model, prompt, make(None))
    assert found is not None and found.source == "cache" and found.file == str(file)
    assert first == again == tokens(model, prompt, make(str(file)))[0]
    assert tokens(model, prompt, make(str(file)))[1] is None


@pytest.mark.parametrize("name", ["kascade", "loki"])
def test_plans_do_not_depend_on_chunks_or_padding(name: str, model: Any, prompt: Tensor, tmp_path: Path) -> None:
    whole, _ = tokens(model, prompt, METHODS[name]("auto"))
    (file,) = kept(name, tmp_path)
    one = load(file, name)
    file.unlink()
    assert tokens(model, prompt, METHODS[name]("auto"), chunk=13)[0] == whole
    other = load(file, name)
    file.unlink()
    batch = torch.cat([torch.zeros(1, TOKENS, dtype=torch.int64), prompt])
    batch[0, -20:], mask = random_tokens(1, 20, seed=3)[0], torch.ones_like(batch)
    mask[0, :-20] = 0
    with attach(model, decode=METHODS[name]("auto")) as session:
        longreach.generate(session, batch, mask, max_new_tokens=4)
    third = load(file, name)
    for key, value in one.arrays.items():
        assert torch.allclose(other.arrays[key].float(), value.float(), atol=2e-2)
        assert torch.allclose(third.arrays[key].float(), value.float(), atol=2e-2)


@pytest.mark.parametrize("name", METHODS)
def test_model_generate_makes_the_plan_too(name: str, model: Any, prompt: Tensor) -> None:
    with attach(model, decode=METHODS[name]("auto")) as session:
        out = model.generate(prompt, max_new_tokens=8, do_sample=False)
        assert plan_of(session).source == "prompt"
    assert out[0, TOKENS:].tolist() == tokens(model, prompt, METHODS[name]("auto"))[0]


def test_questions_over_one_document(model: Any, prompt: Tensor) -> None:
    """The plan is made of document and question; the rolled back question leaves it in place."""
    from longreach.adapters.transformers import Answer

    with attach(model, decode=Loki(k=8)) as session:
        reader = Reader(session)
        reader.read(prompt[0].tolist())
        asked = [list(reader.ask([5, 6, 7], 6, (), Answer())) for _ in range(2)]
        assert plan_of(session).tokens == TOKENS + 3
    assert asked[0] == asked[1]


def test_prefill_is_dense_until_the_plan_is_made(model: Any, prompt: Tensor) -> None:
    method = Kascade(plan="auto", **SPARSE)

    def reasons() -> set[str]:
        layers = session.report().layers
        return {reason for layer in layers if layer.phase == "prefill" for reason in layer.dense_reasons}

    with attach(model, prefill=method, decode=method) as session:
        longreach.generate(session, prompt, max_new_tokens=2)
        assert reasons() == {"no kascade plan yet: it is calibrated on this prompt"}
        session.reset_report()
        longreach.generate(session, prompt, max_new_tokens=2)
        assert reasons() == {"first anchor"}


def test_reads_of_the_calibration_are_counted(model: Any, prompt: Tensor) -> None:
    with attach(model, decode=Kascade(**SPARSE)) as session:
        longreach.generate(session, prompt, max_new_tokens=2)
        share = session.report().fraction("prefill")
    assert share is not None and 1 < share < 2.1


def test_a_short_prompt_is_decoded_densely_and_a_longer_one_is_calibrated_on(model: Any, prompt: Tensor) -> None:
    with attach(model, decode=Kascade(**SPARSE)) as session:
        out = longreach.generate(session, prompt[:, :30], max_new_tokens=8)
        told = plan_of(session)
        assert told.source is None and "has 30 tokens, and 57 are needed" in told.about
        report = session.report()
        assert report.fraction("decode") == 1.0 and told.about in str(report)
        assert {r for layer in report.layers if layer.phase == "decode" for r in layer.dense_reasons} == {told.about}
        longreach.generate(session, prompt, max_new_tokens=8)
        assert plan_of(session).source == "prompt"
    assert out.tokens[0].tolist() == tokens(model, prompt[:, :30], "dense")[0]


def test_tokens_that_were_decoded_are_no_prompt(model: Any, prompt: Tensor) -> None:
    """A dialogue whose tokens are partly the model's own is not calibrated on."""
    with attach(model, decode=Kascade(**SPARSE)) as session:
        cache = session.new_cache()
        first = longreach.generate(session, prompt[:, :30], max_new_tokens=20, past_key_values=cache)
        longer = torch.cat([first.sequences, random_tokens(1, 20, seed=2)], 1)
        longreach.generate(session, longer, max_new_tokens=4, past_key_values=cache)
        told = plan_of(session)
    assert told.source is None and "of the last 48 tokens in the cache are a prompt's" in told.about


def test_an_unwritable_folder(model: Any, prompt: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    answer, made = tokens(model, prompt, Kascade(**SPARSE))
    assert made is not None and made.source == "prompt" and made.file is None
    assert made.not_kept is not None and "cannot be written" in made.not_kept and "for this session only" in str(made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert answer == tokens(model, prompt, Kascade(**SPARSE))[0]


def test_a_user_without_a_home_folder(model: Any, prompt: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container HOME may be unset, and the user's number unknown."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987654)
    for _ in range(2):
        _, made = tokens(model, prompt, Kascade(**SPARSE))
        assert made is not None and made.source == "prompt" and made.file is None and made.ignored == ()
        assert made.not_kept is not None and "no home folder" in made.not_kept and made.not_kept in str(made)


def test_plans_of_other_weights_are_not_used(model: Any, prompt: Tensor, tmp_path: Path) -> None:
    other = tiny_model("llama", num_hidden_layers=4, seed=1)
    tokens(other, prompt, Kascade(**SPARSE))
    (theirs,) = kept("kascade", tmp_path)
    _, made = tokens(model, prompt, Kascade(**SPARSE))
    assert made is not None and made.source == "prompt" and made.ignored == (), "a plan of other weights is no damage"
    (mine,) = set(kept("kascade", tmp_path)) - {theirs}
    mine.write_bytes(theirs.read_bytes())  # under this model's name
    _, again = tokens(model, prompt, Kascade(**SPARSE))
    assert again is not None and again.source == "prompt" and "its fingerprint is another" in again.ignored[-1]
    mine.write_text("{")
    _, third = tokens(model, prompt, Kascade(**SPARSE))
    assert third is not None and third.source == "prompt" and "is no plan" in third.ignored[-1]
    _, last = tokens(model, prompt, Kascade(**SPARSE))
    assert last is not None and last.source == "cache"


def damaged_anchors(plan: Plan) -> Plan:
    return replace(plan, values={**plan.values, "anchors": [1, 3]})


def without_anchors(plan: Plan) -> Plan:
    return replace(plan, values={name: x for name, x in plan.values.items() if name != "anchors"})


def without_a_tile(plan: Plan) -> Plan:
    return replace(plan, values={**plan.values, "tile": 0})


def fewer_heads(plan: Plan) -> Plan:
    return replace(plan, arrays={name: x[:, :1] for name, x in plan.arrays.items()})


def without_variance(plan: Plan) -> Plan:
    return replace(plan, arrays={"basis": plan.arrays["basis"]})


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("kascade", damaged_anchors, "anchors: expected the first to be 0"),
        ("kascade", without_anchors, "the plan lacks the value 'anchors'"),
        ("kascade", without_a_tile, "tile: expected a count"),
        ("loki", fewer_heads, "basis: expected"),
        ("loki", without_variance, "variance"),
    ],
)
def test_a_damaged_kept_plan_is_named_and_made_again(
    name: str, damage: Callable[[Plan], Plan], fault: str, model: Any, prompt: Tensor, tmp_path: Path
) -> None:
    """A plan of this model's weights whose values or arrays are wrong: no error, and no use of it."""
    answer, _ = tokens(model, prompt, METHODS[name]("auto"))
    (file,) = kept(name, tmp_path)
    damage(load(file, name)).save(file)
    again, made = tokens(model, prompt, METHODS[name]("auto"))
    assert made is not None and made.source == "prompt" and again == answer
    (told,) = made.ignored
    assert told.startswith(f"{file.name}: ") and fault in told
    _, last = tokens(model, prompt, METHODS[name]("auto"))
    assert last is not None and last.source == "cache" and last.ignored == ()


def test_the_report_names_the_time_of_hashing_once(model: Any, prompt: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = automatic_plans.fingerprint, list[int]()

    def slow(*given: Any, **options: Any) -> Any:
        times.append(1)
        time.sleep(0.05)
        return real(*given, **options)

    monkeypatch.setattr(automatic_plans, "fingerprint", slow)
    for source in ("prompt", "cache"):
        with attach(model, prefill=METHODS["kascade"]("auto"), decode=METHODS["loki"]("auto")) as session:
            assert "hashing the weights took 0." in str(session.report().plans[0])
            longreach.generate(session, prompt, max_new_tokens=4)
            first, second = session.report().plans
        assert first.source == second.source == source
        assert first.hash_seconds is not None and first.hash_seconds >= 0.05 and second.hash_seconds is None
        assert "hashing the weights took 0." in str(first) and "hashing" not in str(second)
    assert len(times) == 2, "once a session"


def test_weights_without_a_fingerprint(model: Any, prompt: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, **options: Any) -> None:
        raise Unsupported("an adapter that is not merged")

    monkeypatch.setattr(automatic_plans, "fingerprint", refuse)
    _, made = tokens(model, prompt, Kascade(**SPARSE))
    assert made is not None and made.source == "prompt" and made.not_kept == "an adapter that is not merged"


@pytest.mark.parametrize("method", ["kascade plan=none", "loki plan=none"])
def test_plan_none_refuses(method: str, model: Any) -> None:
    with pytest.raises(InvalidInput, match="plan is shipped for this model"):
        attach(model, decode=method)


@pytest.mark.parametrize("method", [Kascade(plan="auto"), Loki(plan="auto")])
def test_plans_are_made_in_sessions_only(method: Any, model: Any) -> None:
    method.check(planned_shape(model))
    with pytest.raises(InvalidInput, match="made of a prompt, by sessions"):
        method.check(shape_of(model))


def test_tensor_parallelism_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_plans, "ranks_of", lambda decoder: object())
    with pytest.raises(Unsupported, match="no plan is made of a prompt under tensor parallelism"):
        attach(model, decode="kascade")
    with attach(model):  # nothing is left behind
        pass


def test_sessions_of_stored_chunks_make_no_plan(model: Any) -> None:
    with attach(model, fuse="full_reuse", decode="loki") as session:
        told = plan_of(session)
    assert told.source is None and "stored chunks" in told.about


def test_eviction_comes_after_the_plan(model: Any, prompt: Tensor, tmp_path: Path) -> None:
    method = Loki(k=8)
    first, made = tokens(model, prompt, method, evict="snapkv capacity=32 window=8")
    assert made is not None and made.source == "prompt"
    (file,) = kept("loki", tmp_path)
    assert first == tokens(model, prompt, Loki(k=8, plan=str(file)), evict="snapkv capacity=32 window=8")[0]


def test_a_method_named_later_waits_for_the_next_prompt(model: Any, prompt: Tensor) -> None:
    with attach(model) as session:
        longreach.generate(session, prompt, max_new_tokens=2)
        session.switch(Kascade(**SPARSE))
        longreach.generate(session, prompt, max_new_tokens=2)
        assert plan_of(session).source == "prompt"


@pytest.fixture
def _hooks(model: Any) -> Iterator[None]:
    def count() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = count()
    yield
    assert count() == before


def test_hooks_end_with_the_plan_and_the_session(model: Any, prompt: Tensor, _hooks: None) -> None:
    with torch.no_grad():
        expected = model(prompt).logits
    with attach(model, decode=Kascade(**SPARSE)):  # closed while it waits
        pass
    tokens(model, prompt, Kascade(**SPARSE))
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, expected)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3"])
def test_windows_sinks_and_norms(family: str, prompt: Tensor, tmp_path: Path) -> None:
    """Layers with a sliding window take no part in Kascade's plan; Loki's has directions for all layers."""
    layer_types = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gpt_oss" else {}
    other = tiny_model(family, num_hidden_layers=4, **layer_types)
    for name in ("kascade", "loki"):
        first, made = tokens(other, prompt, METHODS[name]("auto"))
        assert made is not None and made.source == "prompt"
        (file,) = kept(name, tmp_path)
        assert first == tokens(other, prompt, METHODS[name](str(file)))[0]
    layers = load(kept("kascade", tmp_path)[0], "kascade").values["layers"]
    assert layers == ([0, 1, 2, 3] if family == "qwen3" else [1, 3])
