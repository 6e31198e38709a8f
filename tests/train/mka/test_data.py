"""Training sequences: none twice, the same for the same number, with the right kinds of tokens."""

from __future__ import annotations

import json
import pickle
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers import swept
from tests.train.mka.conftest import text
from transformers import AutoTokenizer

from longreach.errors import InvalidInput
from longreach.evals.calibration.prompts import Prompt
from longreach.tasks import registry
from longreach.testing.tiny import BOS_ID, EOS_ID
from longreach.train.mini.page import ANSWER, CONTEXT, PADDING, TEXT
from longreach.train.mka.data import Batch, Cycle, RecipeSource, Source, TaskSource, TextSource, batches_of, stream


def test_a_cycle_gives_each_length_and_source_its_turn_and_counts_what_was_given() -> None:
    cycle = Cycle((8, 4, 8), tokens=16, sources=2)
    given: dict[tuple[int, int], int] = {}
    places = [cycle.place(n) for n in range(24)]
    for place in places:
        key = place.source, place.length
        assert place.first == given.get(key, 0) and place.sequences == 16 // place.length
        given[key] = place.first + place.sequences
    assert [p.length for p in places[:4]] == [8, 4, 8, 8] and [p.source for p in places[:7]] == [0, 0, 0, 1, 1, 1, 0]
    assert set(given) == {(s, n) for s in (0, 1) for n in (8, 4)}
    assert Cycle((100,), tokens=16).place(3)[:2] == (100, 1)
    for lengths, tokens in (((), 8), ((1,), 8), ((8,), 0)):
        with pytest.raises(InvalidInput, match="expected at least"):
            Cycle(lengths, tokens)


def test_windows_of_texts_never_come_twice_and_leave_the_held_out_end_alone(tokenizer: Any) -> None:
    long, short = text(400), text(90, "short", seed=1)
    source = TextSource([long, short], tokenizer, (16,))
    found = [tuple(source.sequences(16, n, 1).tokens[0]) for n in range(300)]
    assert len(set(found)) == 300 and all(row[0] == BOS_ID and len(row) == 17 for row in found)
    assert source.passes(16, 1) == 1 and source.passes(16, 300) > 5
    held = source.held_out(16, 8)
    assert len(held.tokens) == 1 and tuple(held.tokens[0, 1:]) == long.tokens[-25:][:16]  # 5% of 490 tokens
    bigrams = {(a, b) for row in found for a, b in pairwise(row[1:])}
    inside = {(a, b) for one in (long.tokens[:-25], short.tokens) for a, b in pairwise(one)}
    assert bigrams <= inside  # no window reaches from one text into another, or into the held-out end
    assert np.array_equal(
        source.sequences(16, 7, 3).tokens, TextSource([long, short], tokenizer, (16,)).sequences(16, 7, 3).tokens
    )
    assert not np.array_equal(
        source.sequences(16, 0, 3).tokens, TextSource([long, short], tokenizer, (16,), 1).sequences(16, 0, 3).tokens
    )
    assert source.describe()["held_out_tokens"] == 25
    with pytest.raises(InvalidInput, match=r"the texts hold \d+ different sequences of 16 tokens"):
        source.sequences(16, 10_000, 1)


def test_texts_that_are_too_short_are_refused(tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match="has 40 tokens, and sequences of 32 need 64"):
        TextSource([text(40)], tokenizer, (8, 32))


def test_prompts_of_tasks_end_with_their_answers(tokenizer: Any) -> None:
    tasks = registry.choose("niah_single_2,vt")
    source = TaskSource(tasks, tokenizer, (1600,))
    batch = source.sequences(1600, 0, 4)
    for tokens, kinds, name in zip(batch.tokens, batch.kinds, ("niah", "vt", "niah", "vt"), strict=True):
        real = int((kinds != PADDING).sum())
        answer = np.flatnonzero(kinds == ANSWER)
        assert answer[-1] == real - 1 and tokens[real] == EOS_ID and set(kinds[: answer[0]]) == {CONTEXT}
        words = tokenizer.decode(tokens[answer[:-1] + 1])
        assert words.strip().isdigit() if name == "niah" else words.count(",") == 4
        assert words.strip().split(", ")[0] in tokenizer.decode(tokens[: answer[0] + 1])
    assert len({tuple(row) for row in np.concatenate([batch.tokens, source.held_out(1600, 4).tokens])}) == 8
    assert np.array_equal(source.sequences(1600, 2, 2).tokens, batch.tokens[2:])
    assert source.describe() == {"kind": "tasks", "tasks": ["niah_single_2", "vt"]}


def test_tasks_that_do_not_fit_are_left_out_by_name_or_refused(tokenizer: Any) -> None:
    source, left_out = TaskSource.fitting(registry.choose("niah_single_1,cwe"), tokenizer, (700,))
    assert source.describe()["tasks"] == ["niah_single_1"] and "cwe takes at least" in left_out["cwe"]
    with pytest.raises(InvalidInput, match=r"none of cwe, vt fits \[300\] tokens: cwe takes at least"):
        TaskSource.fitting(registry.choose("cwe,vt"), tokenizer, (300,))
    with pytest.raises(InvalidInput, match="cwe takes at least"):
        TaskSource(registry.choose("cwe"), tokenizer, (300,))


def test_data_sets_for_evaluation_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "qasper.jsonl"
    line = {"input": "Who?", "context": "Ann.", "answers": ["Ann"], "dataset": "qasper", "length": 1}
    path.write_text(json.dumps({**line, "language": "en", "all_classes": None, "_id": "1"}) + "\n")
    with pytest.raises(InvalidInput, match="is a data set for evaluation"):
        TaskSource(registry.choose(f"longbench={path}"), tokenizer, (512,))


def test_the_recipe_fits_its_own_tokenizer_alone(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has no tokenizer.json.*train mini --prepare"):
        RecipeSource(tmp_path, tokenizer)


def test_the_recipe_gives_its_sequences(data: Path, tokenizer: Any) -> None:
    with pytest.raises(InvalidInput, match="the model has another one; use --text or --tasks"):
        RecipeSource(data, tokenizer)
    own = AutoTokenizer.from_pretrained(data)
    source = RecipeSource(data, own)
    first, second, held = source.sequences(512, 0, 3), source.sequences(512, 3, 3), source.held_out(512, 3)
    assert first.tokens.shape == (3, 513) and first.tokens.dtype == np.int64 and (first.kinds == ANSWER).any()
    assert len({tuple(row) for batch in (first, second, held) for row in batch.tokens}) == 9
    assert np.array_equal(RecipeSource(data, own).sequences(512, 3, 3).tokens, second.tokens)
    assert not np.array_equal(RecipeSource(data, own, seed=1).sequences(512, 3, 3).tokens, second.tokens)
    assert source.describe()["kind"] == "recipe" and len(source.describe()["manifest_sha256"]) == 64


def test_sources_are_sent_to_processes(tokenizer: Any) -> None:
    tasks = TaskSource(registry.choose("niah_single_1"), tokenizer, (600,))
    for source, length in ((TextSource([text(400)], tokenizer, (16,)), 16), (tasks, 600)):
        again = pickle.loads(pickle.dumps(source))
        assert np.array_equal(again.sequences(length, 3, 2).tokens, source.sequences(length, 3, 2).tokens)


class Counting(Source):
    """Sequences that hold their own number."""

    def sequences(self, length: int, first: int, count: int) -> Batch:
        if first + count > 20:
            raise InvalidInput("no more")
        tokens = np.arange(first, first + count)[:, None].repeat(length + 1, 1)
        return Batch(tokens, np.full((count, length), TEXT, dtype=np.uint8))

    def held_out(self, length: int, count: int) -> Batch:
        return self.sequences(length, 0, count)

    def describe(self) -> dict[str, Any]:
        return {"kind": "counting"}


@pytest.mark.parametrize("workers", swept([0, 1], 1))  # a process takes seconds to import torch
def test_a_stream_continues_at_any_batch_and_raises_where_it_ends(workers: int) -> None:
    cycle = Cycle((4, 2), tokens=8)
    with stream([Counting()], cycle, 0, workers) as batches:
        whole = [batch.tokens[:, 0].tolist() for batch in islice(batches, 8)]
    assert whole[0] == [0, 1] and whole[2] == [2, 3] and whole[1] == [0, 1, 2, 3]
    with stream([Counting()], cycle, 5, workers) as batches:
        assert [batch.tokens[:, 0].tolist() for batch in islice(batches, 3)] == whole[5:]
        with pytest.raises(InvalidInput, match="no more"):
            list(islice(batches, 30))


def test_prompts_become_batches() -> None:
    task, words = batches_of([Prompt("a", (5, 6, 7, 8), answer=2), Prompt("b", (1, 2, 3))])
    assert task.kinds.tolist() == [[CONTEXT, ANSWER, ANSWER]] and words.kinds.tolist() == [[TEXT, TEXT]]
    assert task.real == 3
