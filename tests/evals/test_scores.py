"""From answers to scores: parts told apart by facts, lengths of answers that did not fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longreach.evals.prompting import AtLength
from longreach.evals.scores import by_fact, result, tasks_entry
from longreach.records import wilson
from longreach.tasks.base import Grouped
from longreach.testing.tiny import tiny_model
from tests.evals.test_evaluate import Letters, evaluation


def given(number: int, score: float, tokens: int, draw: int = 0, error: str | None = None) -> dict[str, Any]:
    return {"number": number, "draw": draw, "score": score, "tokens": tokens, "ids": [1] * tokens, "error": error}


def entry(*answers: dict[str, Any]) -> dict[str, Any]:
    return {"label": "x", "prefill_bytes": None, "decode_bytes": None, "seconds": None, "answers": list(answers)}


def test_answers_that_failed_have_no_length() -> None:
    dense = {(a["number"], 0): a for a in (given(0, 1.0, 10), given(1, 1.0, 10), given(2, 0.0, 0, error="OutOfMemory"))}
    found = result([entry(given(0, 1.0, 15), given(1, 0.0, 0, error="RuntimeError"), given(2, 1.0, 40))], dense)
    assert found["length_over_dense"] == 1.5 and found["failed"] == 1
    assert result([entry(given(0, 0.0, 0, error="E"))], {(0, 0): given(0, 1.0, 9)})["length_over_dense"] is None


def test_right_answers_that_are_kept() -> None:
    dense = {(n, 0): given(n, score, 5) for n, score in enumerate((1.0, 1.0, 0.5, 1.0))}
    mine = [given(0, 1.0, 5), given(1, 0.8, 5), given(2, 1.0, 5), given(3, 0.0, 0, error="E")]
    assert result([entry(*mine)], dense)["kept"] == {"right": 3, "kept": 1}
    assert result([entry(*dense.values())], None)["kept"] is None


def test_parts_are_scored_apart() -> None:
    facts = ("easy", "hard", "easy")
    asked = [{"number": n, "facts": {"difficulty": fact}} for n, fact in enumerate(facts)]
    answers = [given(0, 1.0, 1), given(0, 0.0, 1, draw=1), given(1, 0.0, 1), given(1, 0.0, 1, draw=1),
               given(2, 1.0, 1), given(2, 1.0, 1, draw=1)]  # fmt: skip
    assert by_fact("difficulty", asked, answers) == {
        "easy": {"score": 0.75, "interval_95": list(wilson(1.5, 2)), "samples": 2},
        "hard": {"score": 0.0, "interval_95": list(wilson(0, 1)), "samples": 1},
    }


@dataclass(frozen=True)
class Told(Letters):
    by: tuple[str, ...] = ("first",)


def test_a_record_holds_the_parts_of_tasks_that_have_some() -> None:
    assert isinstance(Told(), Grouped) and not isinstance(Letters(), Grouped)
    made = evaluation(tiny_model("llama", eos_token_id=258), methods=["streaming_llm"], samples=3)
    made.tasks["letters"] = AtLength(Told(), 120)
    found = tasks_entry(made, made.run({}, lambda key, part: None))
    for one in found["letters"]["results"].values():
        assert sum(p["samples"] for p in one["by"]["first"].values()) == 3
    assert all("by" not in one for one in found["more"]["results"].values())
