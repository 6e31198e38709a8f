"""MAC in models: rings filled by any way of reading a prompt, answers by either loop, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import longreach
from longreach import MAC, attach
from longreach.adapters.transformers import Answer, BatchReader, Reader
from longreach.cache.ring import SPARE, RowRing
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.mac.diagnostics import AT
from longreach.testing.tiny import random_tokens, tiny_model
from tests.methods.drive import LAYERS
from tests.tiers import families

SMALL = MAC(window=16, band=4, tau=0.0, min_context=0)
NEVER = replace(SMALL, band=1000)  # all is in the band, and read


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.mark.parametrize("family", families(4))
def test_with_reuse_never_every_family_answers_as_it_does_densely(family: str) -> None:
    """Left-padded; partial and interleaved rotations, query norms, sliding windows, soft caps and sinks among them."""
    model, tokens = tiny_model(family), random_tokens(2, 30)
    mask = torch.ones_like(tokens)
    mask[0, :11] = 0
    dense = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    with attach(model, decode=NEVER) as session:
        assert torch.equal(model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False), dense)
    found = [layer.notes for layer in session.report().layers if layer.method == "mac"]
    assert found or family == "mistral", "which attends to windows alone"
    assert all(notes is not None and notes["reuse"][0] == 0.0 for notes in found)


@pytest.mark.parametrize("family", families(4))
def test_what_is_matched_is_the_query_before_rotation(family: str) -> None:
    """Queries of the first layer are those of their tokens: a row is found where its token was read before."""
    model, tokens = tiny_model(family), random_tokens(1, 12).repeat(1, 2)[:, :20]
    seen: list[Tensor] = []

    def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
        if phase == "decode" and call.layer == 0 and outcome.notes is not None:
            seen.append(outcome.notes.tensors[0][0])

    with attach(model, decode=replace(SMALL, tau=0.999)) as session:
        session.on_layer = observe
        read = model.generate(tokens, max_new_tokens=9, do_sample=False)[0].tolist()
    if not seen:  # it attends to a window there
        return
    assert len(seen) == 8
    for pos, notes in enumerate(seen, 20):
        before = [p for p in range(4, pos) if p >= pos - 16 and read[p] == read[pos]]
        assert notes[:, AT["accepted"]].tolist() == [float(bool(before))] * 4
        assert {pos - int(gap) for gap in notes[:, AT["gap"]]} <= set(before or [pos])


@pytest.mark.parametrize("chunk", [50, 9])
def test_what_is_read_to_fill_a_ring_is_in_the_report(model: Any, chunk: int) -> None:
    """Beside the prompt's own reads, and for each of several methods its own alone."""
    wide = replace(SMALL, window=20, band=7, sinks=3)
    tokens = random_tokens(1, 50)[0].tolist()
    with attach(model) as session:
        session.prepare(SMALL, wide, longreach.Quest(page=4))
        Reader(session, chunk).read(tokens, then=1)
        plain = session.report().layers
        assert [layer.method for layer in plain] == ["dense"] * LAYERS and all(x.fraction == 1 for x in plain)
        vector = plain[0].dense_bytes // (2 * sum(range(1, 51)))  # bytes of a key in all heads
        for method, sinks, band, size in ((SMALL, 0, 4, 16 + SPARE), (wide, 3, 7, 20 + SPARE)):
            more = sum(max(0, pos + 1 - band - sinks) for pos in range(50 - size, 50))
            for layer, without in zip(session.report(method).layers, plain, strict=True):
                assert layer.method == "dense+mac" and layer.rows == 50 and layer.steps == without.steps
                assert layer.key_bytes == layer.value_bytes == without.key_bytes + more * vector
        late = replace(wide, band=8)
        session.prepare(late)
        for stranger in (late, "mac"):
            with pytest.raises(InvalidInput, match=r"did not observe all prompts that were read.*session\.prepare"):
                session.report(stranger)
        assert session.report("dense").layers == plain
        session.switch(wide)
        assert not session.report().layers


def test_however_a_prompt_is_read_the_answer_is_the_same(model: Any) -> None:
    """Passes of any size, whose end is known or not; transformers' loop and longreach's; the question apart."""
    tokens = random_tokens(1, 50)
    with attach(model, decode=SMALL) as session:
        want = model.generate(tokens, max_new_tokens=12, do_sample=False)
        notes = session.report().layers[-1].notes
        assert notes is not None and min(notes["reuse"]) > 0.3
        for chunk in (1, 7, 49):
            assert torch.equal(
                model.generate(tokens, max_new_tokens=12, do_sample=False, prefill_chunk_size=chunk), want
            )
            made = longreach.generate(session, tokens, max_new_tokens=12, prefill_chunk_size=chunk)
            assert torch.equal(made.sequences, want)
        reader = Reader(session, 9)
        reader.read(tokens[0, :44].tolist())
        asked = list(reader.ask(tokens[0, 44:].tolist(), 12, (), Answer()))
        assert asked == want[0, 50:].tolist()
    assert not torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), want), "reuse changes something"


def test_how_much_is_attended_to_for_the_ring(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the prompt's end is known, as many rows as the ring holds, once; else so many in every pass."""
    rows: list[int] = []
    plain = LayerCall.attend

    def attend(self: LayerCall, *given: Any, **named: Any) -> Any:
        if self.layer == 0 and self.phase == "prefill" and not named.get("sink", True):
            rows.append(self.rows.q.shape[0])
        return plain(self, *given, **named)

    monkeypatch.setattr(LayerCall, "attend", attend)
    tokens, size = random_tokens(1, 100), SMALL.window + 8  # type: ignore[operator]
    with attach(model, decode=SMALL) as session:
        longreach.generate(session, tokens, max_new_tokens=2, prefill_chunk_size=40)
        assert rows == [4, 20]  # of [40, 80), the rows that the last 20 leave room for, and these
        rows.clear()
        model.generate(tokens, max_new_tokens=2, do_sample=False, prefill_chunk_size=40)
        assert rows == [size, size, 20]


def rows_held(cache: Any) -> list[Tensor]:
    """Positions in each layer's ring, and the queries and entries there."""
    held = [state for state in cache.kv.state.states() if isinstance(state, RowRing)]
    assert len(held) == LAYERS
    return [x.nan_to_num().clone() for s in held for x in (s.ring.stamp, s.ring.query, s.entries.lse)]


@pytest.mark.parametrize("most", [30, pytest.param(5, marks=pytest.mark.sweep)])
def test_an_answer_forgotten_is_answered_anew(model: Any, most: int) -> None:
    """However many tokens it took, and whatever was asked in between: the ring is as it was."""
    document, questions = random_tokens(1, 40)[0].tolist(), random_tokens(2, 11, seed=1).tolist()
    with attach(model, decode=SMALL) as session:
        reader = Reader(session)
        reader.read(document)
        before = rows_held(reader.cache)
        first, other = (list(reader.ask(q, most, (), Answer())) for q in questions)
        assert all(map(torch.equal, rows_held(reader.cache), before))
        for question, want in zip([*questions, questions[0]], [first, other, first], strict=True):
            assert list(reader.ask(question, most, (), Answer())) == want
        reader.cache.empty()
        reader.read(document)
        assert list(reader.ask(questions[1], most, (), Answer())) == other


def test_an_aside_that_is_cut_within_keeps_what_is_left(model: Any) -> None:
    with attach(model, decode=SMALL) as session:
        reader = Reader(session)
        reader.read(random_tokens(1, 40)[0].tolist())
        states = [state for state in reader.cache.kv.state.states() if isinstance(state, RowRing)]
        with pytest.raises(ValueError, match="mine"), reader.rollback():
            reader.cache.drop_columns(5)
            raise ValueError("mine")
        assert reader.cache.columns == 35 and all(int(state.ring.stamp.max()) == 34 for state in states)
        copies = [state.ring.stamp.data_ptr() for state in states]
        with reader.rollback(longreach.Quest()), reader.rollback(SMALL):
            reader.read(random_tokens(1, 9, seed=2)[0].tolist())
        assert [state.ring.stamp.data_ptr() for state in states] == copies
        assert all(int((state.ring.stamp >= 0).sum()) == 19 for state in states)  # 24 rows of 40 tokens, less 5


@pytest.mark.parametrize("place", ["mlp", "lm_head"])
def test_a_generate_that_fails_leaves_what_a_method_remembers(
    model: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    tokens = random_tokens(1, 90)

    def answer(cache: Any) -> Tensor:
        return longreach.generate(session, tokens, max_new_tokens=9, past_key_values=cache).sequences

    def fail(*given: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    with attach(model, decode=SMALL) as session:
        caches = [session.new_cache() for _ in range(2)]
        for cache in caches:
            longreach.generate(session, tokens[:, :50], max_new_tokens=1, past_key_values=cache)
        want, before = answer(caches[0]), rows_held(caches[1])
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[-1].mlp if place == "mlp" else model.lm_head, "forward", fail)
            for call in (lambda: answer(caches[1]), lambda: model.generate(
                tokens, past_key_values=caches[1], max_new_tokens=9, do_sample=False)):  # fmt: skip
                with pytest.raises(KeyboardInterrupt):
                    call()
                assert caches[1].columns == 50 and all(map(torch.equal, rows_held(caches[1]), before))
        assert torch.equal(answer(caches[1]), want)


def test_reports_of_methods_that_note_different_things(model: Any) -> None:
    """Probed rows have columns of their own."""
    tokens, probed = random_tokens(1, 40), replace(SMALL, probe_every=2)
    with attach(model, decode=SMALL) as session:
        for method in (SMALL, probed, SMALL, probed):
            session.switch(method)
            model.generate(tokens, max_new_tokens=8, do_sample=False)
            notes = [layer.notes for layer in session.report().layers if layer.phase == "decode"]
            assert len(notes) == LAYERS
            assert all(n is not None and (n["error"][0] is None) == (method is SMALL) for n in notes)


def test_answers_to_a_batch_are_answered_anew(model: Any) -> None:
    with attach(model, decode=SMALL) as session:
        reader = BatchReader(session)
        logits = reader.read([random_tokens(1, n, seed=n)[0].tolist() for n in (40, 25)])
        found = [reader.answer(logits, 30, ()).tokens for _ in range(3)]
    assert found[0] == found[1] == found[2]


def test_calibration_means_the_same_under_another_scale_of_queries(model: Any) -> None:
    """Wq times c and Wk over c leave a model as it is: logits are the same. The paper's threshold sees another model,
    the calibrated one, with the energies of its keys, the same rows at the same distances."""
    scaled = tiny_model("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for layer in scaled.model.layers:
            layer.self_attn.q_proj.weight *= 4.0
            layer.self_attn.k_proj.weight /= 4.0
    tokens = random_tokens(1, 60)

    def reuse(of: Any, method: MAC, energy: float) -> list[Any]:
        found: list[Tensor] = []

        def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
            if phase == "decode":
                assert outcome.notes is not None
                found.append(outcome.notes.tensors[0])

        with attach(of, decode=method) as session:
            session.on_layer = observe
            weigh(session, energy)
            of.generate(tokens, max_new_tokens=8, do_sample=False)
        return torch.stack(found).tolist()

    def weigh(session: Any, energy: float) -> None:
        """The plan's energies are those of this model's keys."""
        plain = MAC.new_state

        def new_state(self: MAC, call: LayerCall, slots: int) -> Any:
            state = plain(self, call, slots)
            state.weight = state.weight * energy**0.5 if state.weight is not None else None
            return state

        patch.setattr(MAC, "new_state", new_state)

    calibrated = MAC(window=16, band=4, tau=None, scale="calibrated", min_context=0)
    with pytest.MonkeyPatch.context() as patch:
        one = reuse(model, calibrated, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        other = reuse(scaled, calibrated, 1 / 16)
    assert one == other
    with pytest.MonkeyPatch.context() as patch:
        papers = [reuse(of, replace(SMALL, tau=0.3), 1.0) for of in (model, scaled)]
    assert papers[0] != papers[1]


def test_a_plan_for_another_model_is_refused(model: Any, tmp_path: Any) -> None:
    other = tiny_model("llama", num_hidden_layers=2)
    with pytest.raises(InvalidInput, match="no mac plan is shipped for this model"):
        attach(other, decode=MAC(tau=None))
    with pytest.raises(InvalidInput, match="the plan mac-tiny is for of the tests, and this is another model"):
        attach(other, decode=MAC(tau=None, plan="mac-tiny"))
    with pytest.raises(InvalidInput, match=r"no plan 'nowhere\.json'"):
        attach(model, decode=MAC(band=None, plan="nowhere.json"))
    with attach(model, decode=MAC(tau=None, plan="mac-tiny")):
        pass


@pytest.mark.parametrize("evicted", [True, False])
def test_a_refused_answer_leaves_no_ring_behind(model: Any, evicted: bool) -> None:
    """A cache that another method filled: after the refusal it is as it was, and keys can be evicted from it."""
    tokens = random_tokens(1, 24)
    with attach(model) as session, torch.no_grad():
        cache = session.new_cache()
        model(tokens[:, :20], past_key_values=cache)
        some = torch.arange(9).expand(model.config.num_key_value_heads, -1)
        if evicted:
            cache.kv.keep(1, [0], [some])
        session.switch(SMALL)
        passes = list[str]()
        session.on_layer = lambda phase, call, outcome: passes.append(phase)
        with pytest.raises(InvalidInput, match="holds 20 tokens of which it observed the first 0 only"):
            longreach.generate(session, tokens, max_new_tokens=3, past_key_values=cache)
        assert not passes, "refused before the prompt is read"
        with pytest.raises(
            Unsupported if evicted else InvalidInput, match=r"keys that were dropped|observed the first 0"
        ):
            model.generate(tokens, max_new_tokens=3, past_key_values=cache, do_sample=False)
        assert cache.columns == 20 and cache.states.nbytes == 0
        session.switch("dense")
        for layer in range(LAYERS):
            cache.kv.keep(layer, [0], [some[:, :7]])
        assert cache.kv.slots_in_use(1) == [7]


def test_a_failed_answer_takes_the_step_of_its_rings_along(model: Any) -> None:
    """Rings made within a call that failed are gone; the next call makes others, and no step reads the old ones."""
    tokens = random_tokens(1, 24)
    with attach(model, decode=SMALL) as session:
        want = longreach.generate(session, tokens, max_new_tokens=6).tokens
    with attach(model, decode=SMALL) as session:
        cache, fails = session.new_cache(), [False]

        def fail(phase: str, call: LayerCall, outcome: Outcome) -> None:
            if phase == "decode" and fails[0] and call.context[0] == 27:
                raise RuntimeError("the hook fails")

        session.on_layer = fail
        fails[0] = True
        with pytest.raises(RuntimeError, match="the hook fails"):
            longreach.generate(session, tokens, max_new_tokens=6, past_key_values=cache)
        assert cache.states.nbytes == 0
        fails[0] = False
        again = longreach.generate(session, tokens, max_new_tokens=6, past_key_values=cache)
        assert torch.equal(again.tokens, want) and cache.states.nbytes > 0
