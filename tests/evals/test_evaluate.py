"""Evaluation: the same answers alone and in batches, once and twice; crashes, interrupts, journals, scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from longreach import Dense
from longreach.adapters.transformers import BatchReader, Precompute
from longreach.errors import InvalidInput, MeasurementFailed, UnknownName
from longreach.evals import evaluate
from longreach.evals.evaluate import Evaluation, Settings, failed
from longreach.evals.fusion import BEHIND, CONTROLS
from longreach.evals.methods import specs
from longreach.evals.prompting import fitted, prompt_tokens
from longreach.evals.scores import diverges_at, result, tasks_entry
from longreach.records import Journal
from longreach.records.record import wilson
from longreach.tasks.base import Count, Sample, all_of
from longreach.testing.tiny import tiny_model, tiny_tokenizer
from tests.evals.test_compare import slow_at_first
from tests.tiers import swept

METHODS = ["streaming_llm sinks=2 window=12", "streaming_llm/streaming_llm sinks=2 window=12", "oracle_top_k k=1.0"]


@dataclass(frozen=True)
class Letters:
    """Answers that are letters, which a random model gets right now and then; prompts of different lengths."""

    name: str = "letters"
    source: str = "made for a test"
    max_new_tokens: int = 10
    spare: int = 7

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        if room < 30:
            raise InvalidInput(f"letters: {room} tokens are too few; it takes 30")
        text = "".join(random.choice("abcdefgh ") for _ in range(room))
        while count(text) > room - 20 - random.randrange(self.spare):
            text = text[:-1]
        return Sample(text, "Which?", "It is", (random.choice("abcdefgh"),), {"first": text[0]})

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", eos_token_id=258)


def evaluation(model: Any, *, methods: list[str] = METHODS, **settings: Any) -> Evaluation:
    made = Evaluation(
        model, tiny_tokenizer(), [Letters(), Letters("more", max_new_tokens=3)], specs(methods),
        Settings(**{"lengths": (120,), "samples": 4, **settings}),
    )  # fmt: skip
    made.build()
    return made


def timeless(entry: Any) -> Any:
    """Without times."""
    if isinstance(entry, Mapping):
        return {k: timeless(v) for k, v in entry.items() if k != "seconds"}
    return [timeless(x) for x in entry] if isinstance(entry, list) else entry


def run(made: Evaluation) -> dict[str, Any]:
    return tasks_entry(made, made.run({}, lambda key, part: json.dumps(part)))


@pytest.fixture(scope="module")
def once(model: Any) -> dict[str, Any]:
    return run(evaluation(model))


@pytest.mark.parametrize("settings", swept([{"chunk": 17, "batch": 3}, {}, {"batch": 2}, {"batch": 8}], 1), ids=str)
def test_the_same_whatever_the_batch_and_chunk(model: Any, once: dict[str, Any], settings: dict[str, Any]) -> None:
    again = run(evaluation(model, **settings))
    for name, task in once.items():
        for label, expected in task["results"].items():
            got = again[name]["results"][label]
            assert timeless(got["answers"]) == timeless(expected["answers"])
            if "window" not in label or settings.get("chunk") is None:
                assert got["prefill_reads"] == expected["prefill_reads"]
            assert got["decode_reads"] == pytest.approx(expected["decode_reads"])


def test_answers_are_those_of_generate(model: Any, once: dict[str, Any]) -> None:
    made, tokenizer = evaluation(model), tiny_tokenizer()
    for name, task in once.items():
        for asked, answer in zip(made.asked[name], task["results"]["dense"]["answers"], strict=True):
            ids = torch.tensor([asked.prompt])
            most = made.tasks[name].task.max_new_tokens
            out = model.generate(ids, max_new_tokens=most, do_sample=False, pad_token_id=256)
            new = out[0, ids.shape[1] :].tolist()
            new = new[: new.index(258)] if 258 in new else new
            assert answer["text"] == tokenizer.decode(new, skip_special_tokens=True).strip()
            assert answer["tokens"] == len(new) and answer["error"] is None and answer["diverges_at"] is None


def test_what_a_record_says(once: dict[str, Any]) -> None:
    task = once["letters"]
    assert [s["number"] for s in task["samples"]] == list(range(4)) and task["max_new_tokens"] == 10
    assert all(90 < s["tokens"] <= 110 and s["facts"]["first"] for s in task["samples"])
    dense, recent, whole, everything = task["results"].values()
    assert dense["length_over_dense"] is None and everything["length_over_dense"] == 1.0
    assert everything["answers"] == [{**a, "diverges_at": None} for a in dense["answers"]]
    assert any(a["diverges_at"] is not None for a in recent["answers"])
    assert dense["decode_reads"]["total"] == 1 == recent["prefill_reads"]["total"]
    assert recent["decode_reads"]["total"] < 0.2 and whole["prefill_reads"]["total"] < 0.4
    low, high = dense["interval_95"]
    assert 0 <= low <= dense["score"] <= high <= 1 and dense["failed"] == 0
    assert dense["seconds"]["read"] > 0 and dense["seconds"]["per_token"] > 0
    json.dumps(once)


def test_what_happens_once_is_in_no_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = slow_at_first(monkeypatch, 2.0)
    made = run(evaluation(model, methods=["streaming_llm sinks=2 window=12"]))
    times = [one["seconds"]["per_token"] for task in made.values() for one in task["results"].values()]
    assert set(stepped) == {"dense", "streaming_llm"} and len(times) == 4
    assert max(times) < 2.0 / len(stepped), "the mean over all steps, had the slow one been one of them"


def test_prompts_fit_and_differ_by_seed(model: Any) -> None:
    one, other = evaluation(model), evaluation(model, seed=1)
    for made in (one, other):
        for name, asked in made.asked.items():
            assert max(len(a.prompt) for a in asked) + made.tasks[name].task.max_new_tokens <= 120
    assert one.asked["letters"] == evaluation(model).asked["letters"] != other.asked["letters"]
    assert one.asked["letters"][0].sample != one.asked["letters"][1].sample


def test_several_lengths_are_what_each_is_alone(model: Any) -> None:
    few: dict[str, Any] = {"methods": METHODS[:1], "samples": 2}
    both = run(evaluation(model, lengths=(150, 120), **few))
    assert list(both) == ["letters@150", "more@150", "letters@120", "more@120"]
    for length in (120, 150):
        for name, task in run(evaluation(model, lengths=(length,), **few)).items():
            assert (task["task"], task["length"]) == (name, length)
            assert timeless(both[f"{name}@{length}"]) == timeless(task)


def test_a_chat_template_and_the_beginning_of_the_answer() -> None:
    tokenizer = tiny_tokenizer()
    sample = Sample("Text.", "Which?", "It is", ("a",))
    plain = tokenizer.decode(prompt_tokens(tokenizer, sample), skip_special_tokens=True)
    assert plain == "Text.\n\nWhich? It is"
    tokenizer.chat_template = "<u>{{ messages[0].content }}</u><a>"
    assert tokenizer.decode(prompt_tokens(tokenizer, sample)) == "<u>Text.\n\nWhich?</u><a>It is"
    _, prompt = fitted(Letters(), tokenizer, 120, 0, 0, 1)
    assert 90 < len(prompt) <= 110


def test_draws_are_seeded_and_their_mean_counts(model: Any) -> None:
    drawn: dict[str, Any] = {"draws": 3, "temperature": 5.0, "samples": 2, "methods": METHODS[:1]}
    first, second = run(evaluation(model, **drawn)), run(evaluation(model, **drawn))
    assert timeless(first) == timeless(second)
    answers = first["letters"]["results"]["dense"]["answers"]
    assert [(a["number"], a["draw"]) for a in answers] == [(n, d) for n in range(2) for d in range(3)]
    assert len({a["text"] for a in answers}) > 1
    other = run(evaluation(model, **drawn, seed=0, batch=2))
    assert other["letters"]["samples"] == first["letters"]["samples"]
    entry = {"label": "dense", "prefill_bytes": None, "decode_bytes": None, "seconds": None, "answers": [
        {"number": n, "draw": d, "score": s, "tokens": 1, "ids": [1], "error": None}
        for n, d, s in [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 1.0), (1, 1, 1.0)]
    ]}  # fmt: skip
    found = result([entry], None)
    assert found["score"] == 0.75 and found["decode_reads"] is None and found["seconds"]["per_token"] is None
    assert found["interval_95"] == list(wilson(1.5, 2))  # of two prompts, not of four answers
    few = [a for a in entry["answers"] if (a["number"], a["draw"]) != (1, 1)]
    assert result([{**entry, "answers": few}], None)["score"] == 0.75  # each prompt counts once, however many its draws


def test_a_crash_is_that_samples_failure(model: Any, monkeypatch: pytest.MonkeyPatch, once: dict[str, Any]) -> None:
    made = evaluation(model, batch=3)
    victim = str(list(made.asked["letters"][1].prompt[3:40]))[1:-1]
    forward = modeling_llama.LlamaModel.forward

    def crash(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(victim in str(row.tolist()) for row in input_ids):
            raise RuntimeError("a kernel\nfailed")
        return forward(self, input_ids, *args, **kwargs)

    kept: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaModel, "forward", crash)
        broken = tasks_entry(made, made.run({}, kept.__setitem__))
    for label, expected in once["letters"]["results"].items():
        got = broken["letters"]["results"][label]
        bad = [a for a in got["answers"] if a["error"]]
        assert [a["number"] for a in bad] == [1] and got["failed"] == 1
        assert all(a["score"] == 0 and a["error"] == "RuntimeError: a kernel failed" for a in bad)
        good = [a for a in got["answers"] if not a["error"]]
        same = {a["number"]: a for a in expected["answers"]}
        assert all(a["text"] == same[a["number"]]["text"] for a in good)
        assert got["alone"] == 3 and broken["more"]["results"][label]["alone"] == 0
    fresh: dict[str, Any] = {}
    again = tasks_entry(made, made.run(kept, fresh.__setitem__))  # asks anew what failed, and nothing else
    assert len(fresh) == 2 and all("|letters|0" in key for key in fresh)
    whole = run(evaluation(model, batch=3))
    assert timeless(again["letters"]["results"]) == timeless(whole["letters"]["results"])
    assert timeless(whole["more"]) == timeless(once["more"])  # the model is as it was


def test_a_lost_device_ends_the_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept, read = evaluation(model), dict[str, Any](), BatchReader.read

    def lost(error: Exception, device: torch.device) -> str:
        raise MeasurementFailed("the GPU failed")

    def broken(self: Any, prompts: Any) -> Any:
        if len(kept) == 2:
            raise RuntimeError("device-side assert")
        return read(self, prompts)

    monkeypatch.setattr(evaluate, "failure", lost)
    monkeypatch.setattr(BatchReader, "read", broken)
    with pytest.raises(MeasurementFailed):
        made.run({}, kept.__setitem__)
    assert [failed(part) for part in kept.values()] == [0, 0]  # what was answered before


def test_an_interrupted_run_goes_on(model: Any, tmp_path: Path, once: dict[str, Any]) -> None:
    record, about = tmp_path / "out" / "r.json", {"config": {"length": 120}, "commit": "c"}
    made, journal = evaluation(model), Journal(record, about)

    def keep(key: str, part: Any) -> None:
        if len(journal.done) == 7:
            raise KeyboardInterrupt
        journal.add(key, part)

    with pytest.raises(KeyboardInterrupt):
        made.run({}, keep)
    with journal.path.open("a") as stream:
        stream.write('["cut off in the mid')
    again = Journal(record, about)
    assert len(again.done) == 7
    fresh: list[str] = []
    parts = evaluation(model).run(again.done, lambda key, part: (fresh.append(key), again.add(key, part)))
    assert len(fresh) == len(parts) - 7 and not set(fresh) & set(journal.done)
    assert timeless(tasks_entry(made, parts)) == timeless(once)
    assert timeless(tasks_entry(made, Journal(record, about).done)) == timeless(once)
    with pytest.raises(InvalidInput, match=r"differs in commit, config\.length; .*remove the file"):
        Journal(record, {"config": {"length": 121}, "commit": "d"})
    again.remove()
    assert Journal(record, {"other": 1}).done == {}


def test_what_is_asked_wrongly_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"length 5000 exceeds the model's context of 4096"):
        evaluation(model, lengths=(120, 5000))
    with pytest.raises(InvalidInput, match=r"letters: .* it takes 30"):
        evaluation(model, lengths=(40,))
    with pytest.raises(InvalidInput, match="temperature: expected a number >= 0"):
        Settings((100,), temperature=-1)
    with pytest.raises(InvalidInput, match="give a temperature above 0"):
        Settings((100,), draws=2)
    for lengths in ((), (100, 100)):
        with pytest.raises(InvalidInput, match="lengths: expected some, each once"):
            Settings(lengths)
    (tmp_path / "r.json.journal").write_text("no json\n")
    with pytest.raises(InvalidInput, match=r"r\.json\.journal is not the journal"):
        Journal(tmp_path / "r.json", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot write"):
        Journal(tmp_path / "file" / "r.json", {})


def test_divergence() -> None:
    assert diverges_at([1, 2, 3], [1, 2, 3]) is None
    assert diverges_at([1, 2, 3], [1, 4, 3]) == 1
    assert diverges_at([1, 2], [1, 2, 3]) == 2 and diverges_at([], [1]) == 0
    assert Dense() in {s.decode for s in specs([])}


FUSED = [
    "dense fuse=a3 fuse.ratio=1.0", "dense fuse=pie", "quest k=4 dense_layers=[] fuse=a3 fuse.ratio=1.0",
    "quest k=4 dense_layers=[]",
    "dense fuse=pie evict=snapkv evict.capacity=60", "dense evict=snapkv evict.capacity=60",
    "dense evict=snapkv evict.capacity=999", "dense fuse=oracle", "dense fuse=random", "dense fuse=row_order",
]  # fmt: skip


@pytest.fixture(scope="module")
def fused(model: Any) -> dict[str, Any]:
    made = Evaluation(
        model, tiny_tokenizer(), [Letters()], specs(FUSED, controls=CONTROLS),
        Settings((120,), samples=3, batch=2, chunk=16, chunk_tokens=20, chunks="alone"),
    )  # fmt: skip
    made.build()
    assert all(len(asked.chunks) > 2 and len(asked.prompt) <= 110 for asked in made.asked["letters"])
    assert made.config()["chunk_tokens"] == 20 and made.config()["chunks"] == "alone"
    parts = dict[str, Any]()
    found = tasks_entry(made, made.run({}, parts.__setitem__))
    groups = ("dense", FUSED[0], FUSED[5], FUSED[6])
    assert {*parts} == {f"{group}|letters|{n}" for group in groups for n in (0, 2)}

    def never(*more: Any) -> None:
        raise AssertionError("all was done")

    again = tasks_entry(made, made.run(json.loads(json.dumps(parts)), never))
    assert timeless(json.loads(json.dumps(again))) == timeless(json.loads(json.dumps(found)))
    return found


def test_chunks_that_end_anywhere_are_full(model: Any) -> None:
    def sizes(**more: Any) -> list[int]:
        settings = Settings((120,), samples=1, chunk_tokens=20, **more)
        made = Evaluation(model, tiny_tokenizer(), [Letters()], specs(["dense fuse=pie"]), settings)
        made.build()
        assert made.config()["chunk_ends"] == settings.chunk_ends
        (sample,) = made.asked["letters"]
        return [stop - start for start, stop in sample.chunks]

    assert set(sizes(chunk_ends="tokens")[:-1]) == {20} != set(sizes()[:-1])
    with pytest.raises(UnknownName, match="end of chunks"):
        Settings((120,), chunk_ends="lines")


def test_fused_answers_stand_beside_dense_ones_of_the_same_tokens(fused: dict[str, Any]) -> None:
    results = fused["letters"]["results"]
    assert list(results) == ["dense", *FUSED] and all(r["failed"] == 0 == r["alone"] for r in results.values())
    texts = {label: [a["text"] for a in r["answers"]] for label, r in results.items()}
    assert texts[FUSED[0]] == texts["dense"] == texts[FUSED[6]]
    assert texts[FUSED[2]] == texts["quest k=4 dense_layers=[]"] != texts["dense"]
    assert texts["dense fuse=pie"] != texts["dense"] and texts[FUSED[5]] != texts["dense"]
    assert all(len(r["answers"]) == 3 for r in results.values())


def test_what_a_record_says_of_fusion(fused: dict[str, Any]) -> None:
    results, samples = fused["letters"]["results"], fused["letters"]["samples"]
    tokens = sum(s["tokens"] for s in samples) / 3
    stored = sum(stop - start for s in samples for start, stop in s["chunks"]) / 3
    pie, whole = results["dense fuse=pie"]["fusion"], results[FUSED[0]]["fusion"]
    assert "fusion" not in results["dense"] and "fusion" not in results[FUSED[5]]
    assert (pie["tokens"], pie["recomputed"], pie["reused"]) == (tokens, 0, stored)
    assert pie["computed"] == pytest.approx(tokens - stored) and pie["key_error"] == [None] * len(pie["key_error"])
    assert whole["recomputed"] == stored and whole["key_error"][0] is None
    for label in ("dense fuse=oracle", "dense fuse=random"):
        became = results[label]["fusion"]
        assert became["recomputed"] == pytest.approx(0.15 * tokens, abs=1) and became["value_error"][-1] > 0.01
    assert results["dense fuse=pie"]["prefill_reads"]["total"] == 1.0
    assert (
        results[FUSED[4]]["seconds"]["read"] > 0 and results["quest k=4 dense_layers=[]"]["decode_reads"]["total"] < 1
    )


def test_a_fused_prompt_that_fails_is_a_failure_of_its_methods(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Evaluation(
        model, tiny_tokenizer(), [Letters()], specs(["dense fuse=pie", "dense fuse=a3"]),
        Settings((120,), samples=3, chunk_tokens=20),
    )  # fmt: skip
    made.build()
    read, calls = BatchReader.read_fused, list[int]()

    def crashing(self: Any, prompt: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a kernel failed")
        return read(self, prompt)

    kept = dict[str, Any]()
    monkeypatch.setattr(BatchReader, "read_fused", crashing)
    found = tasks_entry(made, made.run({}, kept.__setitem__))["letters"]["results"]
    assert [a["error"] for a in found["dense fuse=pie"]["answers"]] == [None, "RuntimeError: a kernel failed", None]
    assert found["dense fuse=a3"]["failed"] == 0 and "dense fuse=pie|letters|1" not in kept

    def broken(self: Any, tokens: Any) -> Any:
        raise RuntimeError("no chunk")

    monkeypatch.setattr(Precompute, "compute", broken)
    found = tasks_entry(made, made.run({}, lambda key, part: None))["letters"]["results"]
    assert [found[label]["failed"] for label in found] == [0, 3, 3]


@pytest.mark.parametrize("chunks", BEHIND)
def test_prompts_of_one_chunk(model: Any, chunks: Any) -> None:
    labels = ["dense fuse=dependence", "dense fuse=dependence fuse.ratio=1.0"]
    made = Evaluation(
        model, tiny_tokenizer(), [Letters()], specs(labels),
        Settings((120,), samples=2, chunk_tokens=200, chunks=chunks),
    )  # fmt: skip
    made.build()
    assert all(len(asked.chunks) == 1 for asked in made.asked["letters"])
    found = tasks_entry(made, made.run({}, lambda key, part: None))["letters"]["results"]
    assert [found[label]["failed"] for label in labels] == [0, 0]
    texts = [[a["text"] for a in found[label]["answers"]] for label in ("dense", labels[1])]
    assert texts[0] == texts[1]
    exact = chunks != "alone"  # nothing but BOS stands before the chunk
    assert (found[labels[0]]["fusion"]["recomputed"] == 0) == exact


def test_a_method_that_refuses_a_prompt_fails_in_it_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ["dense fuse=pie", "dense fuse=pie evict=snapkv evict.capacity=60"]
    made = Evaluation(
        model, tiny_tokenizer(), [Letters()], specs(labels), Settings((120,), samples=3, chunk_tokens=20)
    )  # fmt: skip
    made.build()
    read, calls = BatchReader.read_fused, list[int]()

    def refusing(self: Any, prompt: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the second method, at the second prompt
            raise InvalidInput("the question is too long")
        return read(self, prompt)

    kept = dict[str, Any]()
    monkeypatch.setattr(BatchReader, "read_fused", refusing)
    found = tasks_entry(made, made.run({}, kept.__setitem__))["letters"]["results"]
    want = [None, "InvalidInput: the question is too long", None]
    assert [a["error"] for a in found[labels[1]]["answers"]] == want and found[labels[0]]["failed"] == 0
    assert f"{labels[0]}|letters|1" not in kept and f"{labels[0]}|letters|2" in kept

    def unmeasured(self: Precompute, tokens: Any) -> Any:
        raise InvalidInput("no room")

    monkeypatch.setattr(Precompute, "compute", unmeasured)
    found = tasks_entry(made, made.run({}, lambda key, part: None))["letters"]["results"]
    assert [found[label]["failed"] for label in ("dense", *labels)] == [0, 3, 3]


def test_what_fusion_cannot_be_asked(model: Any) -> None:
    def evaluated(*texts: str, **settings: Any) -> Evaluation:
        return Evaluation(model, tiny_tokenizer(), [Letters()], specs(texts), Settings((120,), **settings))

    with pytest.raises(InvalidInput, match="give chunk_tokens"):
        evaluated("dense fuse=pie")
    with pytest.raises(InvalidInput, match="layer: expected a layer of the model"):
        evaluated("dense fuse=a3_deep fuse.layer=9", chunk_tokens=20)
    with pytest.raises(UnknownName, match="known: alone, bos, system"):
        evaluated("dense fuse=pie", chunk_tokens=20, chunks="bso")
    assert "chunk_tokens" not in evaluated("dense").config()
    assert "chunks" not in evaluated("dense", chunk_tokens=9).config()


def test_questions_that_decode_steps_are_fed(model: Any, once: dict[str, Any]) -> None:
    made = evaluation(model, methods=METHODS[:1], question="decode", batch=3)
    assert made.config()["question"] == "decode"
    counts = {name: [a.question_tokens for a in asked] for name, asked in made.asked.items()}
    for name, asked in made.asked.items():
        for one, count in zip(asked, counts[name], strict=True):
            tail = tiny_tokenizer().decode(list(one.prompt[-count:]))
            assert tail == f"\n\n{one.sample.question} {one.sample.begun}"
    found = run(made)
    for name, task in found.items():
        dense, recent = task["results"].values()
        assert [a["text"] for a in dense["answers"]] == [a["text"] for a in once[name]["results"]["dense"]["answers"]]
        assert [s["question_tokens"] for s in task["samples"]] == counts[name]
        assert recent["decode_reads"]["total"] < 0.2
    recent = [a["text"] for a in found["letters"]["results"][METHODS[0]]["answers"]]
    assert recent != [a["text"] for a in once["letters"]["results"][METHODS[0]]["answers"]]


def test_what_questions_cannot_be_fed(model: Any) -> None:
    with pytest.raises(UnknownName, match=r"way to read questions.*known: prefill, decode"):
        Settings((120,), question="later")
    with pytest.raises(InvalidInput, match="take question prefill"):
        Evaluation(
            model, tiny_tokenizer(), [Letters()], specs(["dense evict=snapkv evict.capacity=60"]),
            Settings((120,), question="decode"),
        )  # fmt: skip

    @dataclass(frozen=True)
    class Asking(Letters):
        def sample(self, random: Random, room: int, count: Count) -> Sample:
            return replace(super().sample(random, room, count), question="")

    made = Evaluation(model, tiny_tokenizer(), [Asking()], specs([]), Settings((120,), samples=1, question="decode"))
    with pytest.raises(InvalidInput, match="cannot be read apart"):
        made.build()
