"""Which evaluations stand together, and means over tasks with their intervals."""

from __future__ import annotations

import pytest

from longreach.records import wilson
from longreach.records.report.rows import groups, paired, summary
from tests.records.report import factory
from tests.records.report.factory import answer, evaluation, record_of, result, scored, task

ALL = {"dense": 4, "streaming_llm window=0.1": 1, "oracle_top_k k=0.025": 4}


def test_lengths_of_one_model_stand_together_and_other_seeds_and_methods_apart() -> None:
    short, long = record_of(factory.sweep(1024), "a"), record_of(factory.sweep(4096), "b")
    seed, other = factory.sweep(1024), factory.sweep(1024)
    seed["config"]["seed"] = 1
    other["methods"]["streaming_llm window=0.1"]["decode"]["sinks"] = 9
    ppl = record_of(factory.perplexity(), "e")
    found = groups([long, short, record_of(seed, "c"), record_of(other, "d"), ppl])
    assert [[r.name for r in g.records] for g in found] == [["b", "a"], ["c"], ["d"]]
    assert found[0].lengths == [1024, 4096] and [row.length for row in found[0].rows] == [1024, 4096]


def test_fused_prompts_of_other_chunks_stand_apart() -> None:
    records = [factory.fused(), factory.fused(8192), factory.fused(chunks="alone"), factory.fused(chunk_tokens=256)]
    found = groups([record_of(content, str(n)) for n, content in enumerate(records)])
    assert [[r.name for r in g.records] for g in found] == [["0", "1"], ["2"], ["3"]]
    assert {g.dense for g in found} == {"dense"}


def test_the_mean_weighs_tasks_alike_and_its_interval_counts_all_samples() -> None:
    (group,) = groups([record_of(evaluation({
        "a": scored({**ALL, "streaming_llm window=0.1": 5}, of=10), "b": scored({**ALL, "dense": 0}, of=10),
    }))])  # fmt: skip
    found = summary(group.rows, "streaming_llm window=0.1", "dense")
    assert found.score == pytest.approx((0.5 + 0.1) / 2)
    assert found.interval == pytest.approx(wilson(6, 20))
    few = groups([record_of(evaluation({"a": scored(ALL, of=40), "b": scored(ALL, of=10)}))])[0]
    # the variance of the mean of two: (p q / 40 + p q / 10) / 4 = p q / 32
    assert summary(few.rows, "dense", "dense").interval == pytest.approx(wilson((0.1 + 0.4) / 2 * 32, 32))


def test_sums_and_means_leave_out_what_is_not_there() -> None:
    label = "streaming_llm window=0.1"
    failed = [answer(n, 0.0, error="RuntimeError: no", diverges_at=None) for n in range(2)]
    nothing = {"length_over_dense": None, "prefill_reads": None, "decode_reads": None,
               "seconds": {"read": None, "per_token": None}}  # fmt: skip
    good = [answer(0, 1.0), answer(1, 1.0, diverges_at=3)]
    tasks = {
        "a": task({"dense": result("dense", good), label: result(label, failed, **nothing)}),
        "b": task({"dense": result("dense", good), label: result(label, good)}),
    }
    methods = {k: factory.METHODS[k] for k in ("dense", label)}
    (group,) = groups([record_of(evaluation(tasks, methods=methods))])
    found = summary(group.rows, label, "dense")
    assert (found.score, found.failed, found.answers) == (0.5, 2, 4)
    assert found.decode is not None and found.decode["total"] == pytest.approx(0.104)
    assert (found.read, found.per_token, found.length) == (2.5, 0.0125, 1.5)
    assert found.same == 0.5  # of the answers that did not fail
    assert summary(group.rows[:1], label, "dense").decode is None and summary(group.rows, "dense", "dense").same is None


def test_answers_that_dense_failed_are_neither_the_same_nor_apart() -> None:
    label = "streaming_llm window=0.1"
    failed = answer(0, 0.0, error="OutOfMemory: no room")
    results = {"dense": result("dense", [failed, answer(1, 1.0), answer(2, 1.0)]),
               label: result(label, [answer(0, 1.0), answer(1, 1.0, diverges_at=3), answer(2, 1.0)])}  # fmt: skip
    content = evaluation({"vt": task(results)}, methods={k: factory.METHODS[k] for k in results})
    (group,) = groups([record_of(content)])
    assert [a["number"] for a in group.rows[0].beside(label, "dense")] == [1, 2]
    assert summary(group.rows, label, "dense").same == 0.5


def pairs(losses: int, wins: int, same: int = 0) -> list[tuple[float, float]]:
    return [(0.0, 1.0)] * losses + [(1.0, 0.0)] * wins + [(1.0, 1.0)] * same


def test_differences_are_marked_by_pairs() -> None:
    # two-sided binomial: 2 / 2**5 = 0.0625, 2 / 2**6 = 0.031, 2 * (1 + 8) / 2**8 = 0.070, 2 * (1 + 9) / 2**9 = 0.039
    for losses, wins, marked in (
        (5, 0, False),
        (6, 0, True),
        (7, 1, False),
        (8, 1, True),
        (0, 0, False),
        (9, 9, False),
    ):
        assert paired(pairs(losses, wins, same=30)) == ("worse" if marked else "")
        assert paired(pairs(wins, losses)) == ("better" if marked else "")
    graded = [(0.25, 0.5)] * 7
    assert paired(graded) == "worse"
    often = [(0.4, 0.5)] * 20
    assert paired(often) == "worse" and paired([*often, *[(1.0, 0.0)] * 3]) == ""  # lost far more often, and yet higher


def test_pairs_are_of_the_same_prompt_and_the_mean_of_its_draws() -> None:
    label = "oracle_top_k k=0.025"
    mine = [
        answer(n, score, draw=d) for n, d, score in ((0, 0, 1.0), (0, 1, 0.0), (1, 0, 1.0), (1, 1, 1.0), (7, 0, 1.0))
    ]
    theirs = [answer(n, score, draw=d) for n, d, score in ((1, 0, 0.0), (1, 1, 0.5), (0, 0, 1.0), (0, 1, 1.0))]
    results = {x: result(x, theirs if x == "dense" else mine) for x in ALL}
    (group,) = groups([record_of(evaluation({"a": task(results)}))])
    assert group.rows[0].pairs(label, "dense") == [(0.5, 1.0), (1.0, 0.25)]
    assert group.rows[0].pairs(label, "dense", {1}) == [(1.0, 0.25)]


def test_small_differences_of_many_tasks_are_marked_in_the_mean() -> None:
    tasks = {f"{n}": scored({**ALL, "dense": 4, "streaming_llm window=0.1": 2}) for n in range(4)}
    (group,) = groups([record_of(evaluation(tasks))])
    assert [row.mark("streaming_llm window=0.1", "dense") for row in group.rows] == [""] * 4
    assert summary(group.rows, "streaming_llm window=0.1", "dense").mark == "worse"
    assert summary(group.rows, "dense", "dense").mark == "" == group.rows[0].mark("dense", "dense")
