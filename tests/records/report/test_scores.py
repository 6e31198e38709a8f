"""Tables of scores and costs say what the records hold."""

from __future__ import annotations

import pytest

from longreach.records import wilson
from longreach.records.report.blocks import Block, Figure, Table, Text
from longreach.records.report.rows import groups
from longreach.records.report.scores import scores
from tests.records.report import factory
from tests.records.report.factory import answer, cells, evaluation, only, record_of, result, scored, task


def blocks(*contents: object) -> list[Block]:
    (group,) = groups([record_of(c, f"{n}.json") for n, c in enumerate(contents)])  # type: ignore[arg-type]
    return scores(group, "eval")


def test_scores_with_intervals_marks_and_means() -> None:
    table = only(blocks(factory.small()), Table, "Scores")
    assert table.head == ("task", "tokens", "ch/token", "n", "1 dense", "2 streaming_llm window=0.1",
                          "3 oracle_top_k k=0.025")  # fmt: skip
    rows = cells(table)
    assert rows["niah_single_1"] == ["4010", "4.25", "20", "100.0% 83.9-100.0%", "15.0% 5.2-36.0% ▼",
                                     "95.0% 76.4-99.1%"]  # fmt: skip
    assert rows["vt"] == ["4002", "4.25", "4", "50.0% 15.0-85.0%", "25.0% 4.6-69.9%", "50.0% 15.0-85.0%"]
    low, high = wilson(0.75 * 13, 13)  # 4 / (1/20 + 1/4) = 13.3 samples
    assert rows["mean of all 2"][3] == f"75.0% {low * 100:.1f}-{high * 100:.1f}%"


def test_what_methods_read_and_take() -> None:
    rows = cells(only(blocks(factory.small()), Table, "What methods read"))
    assert rows["1 dense"][1:] == ["0 of 24", "100.0%", "100.0%", "50.0%", "50.0%", "0.0%", "2.50 s", "12.50 ms", "-",
                                   "-"]  # fmt: skip
    assert rows["2 streaming_llm window=0.1"][1:] == ["0 of 24", "100.0%", "10.4%", "5.2%", "5.2%", "0.0%", "2.50 s",
                                                      "12.50 ms", "1.50x", "100.0%"]  # fmt: skip
    assert rows["3 oracle_top_k k=0.025"][3] == "102.6%"


def test_failures_are_counted_where_the_score_is() -> None:
    label = "streaming_llm window=0.1"
    answers = [answer(0, 1.0), answer(1, 0.0, error="OutOfMemory: no room")]
    methods = {k: factory.METHODS[k] for k in ("dense", label)}
    content = evaluation({"vt": task({"dense": result("dense", [answer(0, 1.0), answer(1, 1.0)]),
                                      label: result(label, answers)})}, methods=methods)  # fmt: skip
    found = blocks(content)
    assert cells(only(found, Table, "Scores"))["vt"][-1] == "50.0% 9.5-90.5%; 1 failed"
    assert cells(only(found, Table, "What methods"))[f"2 {label}"][1] == "1 of 2"


def test_answers_asked_alone_are_told() -> None:
    content = factory.small()
    assert not [b for b in blocks(content) if isinstance(b, Text) and "prompt by prompt" in b.text]
    for label, alone in (("dense", 0), ("oracle_top_k k=0.025", 3)):
        content["tasks"]["vt"]["results"][label]["alone"] = alone
    assert only(blocks(content), Text, "3 answers were asked prompt by prompt, as their batch of 1 failed").loud


def test_lengths_have_means_of_their_own_and_records_are_named() -> None:
    low, high = factory.sweep(1024), factory.small()
    found = blocks(low, high)
    rows = cells(only(found, Table, "Scores"))
    assert rows["needle_sweep"][0] == "0.json" and rows["vt"][0] == "1.json"
    assert "mean of all 2, 4096 tokens" in rows and not any("1024" in name for name in rows)
    assert [b.title for b in found if isinstance(b, Table) and b.title.startswith("What")] == [
        "What methods read and take, 1024 tokens", "What methods read and take, 4096 tokens",
    ]  # fmt: skip


def test_tasks_beyond_the_model_are_named_and_left_out_of_a_second_mean() -> None:
    none = {"dense": 0, "streaming_llm window=0.1": 0, "oracle_top_k k=0.025": 0}
    tasks = factory.small()["tasks"] | {"fwe": scored(none)}
    found = blocks(evaluation(tasks))
    rows = cells(only(found, Table, "Scores"))
    assert rows["mean of all 3"][3].startswith("50.0%") and rows["mean of the 2 within reach"][3].startswith("75.0%")
    assert "fwe at 4096 tokens" in only(found, Text, "Beyond the model").text


def test_without_dense_nothing_is_compared_and_the_report_says_so() -> None:
    methods = {k: v for k, v in factory.METHODS.items() if k != "dense"}
    found = blocks(evaluation({"vt": scored(dict.fromkeys(methods, 2)), "cwe": scored(dict.fromkeys(methods, 0))},
                              methods=methods))  # fmt: skip
    assert only(found, Text, "No method of these records is dense").loud
    assert not any("▼" in cell for b in found if isinstance(b, Table) for row in cells(b).values() for cell in row)


def test_pictures_are_of_what_differs() -> None:
    found = blocks(factory.small())
    assert [b.file for b in found if isinstance(b, Figure)] == ["eval-quality-decode.png"]
    content = factory.small()
    late = content["tasks"]["vt"]["results"]["streaming_llm window=0.1"]
    late["answers"][0]["diverges_at"] = 2
    late["prefill_reads"] = factory.reads(0.3)
    found = blocks(content)
    names = ["eval-quality-decode.png", "eval-quality-prefill.png", "eval-divergence.png"]
    assert [b.file for b in found if isinstance(b, Figure)] == names
    content["config"]["temperature"] = 0.7  # drawn answers differ by chance
    assert names[-1] not in [b.file for b in blocks(content) if isinstance(b, Figure)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_reads_that_are_not_there_are_no_zero(phase: str) -> None:
    content = factory.small()
    for entry in content["tasks"].values():
        entry["results"]["dense"][f"{phase}_reads"] = None
    rows = cells(only(blocks(content), Table, "What methods read"))
    assert rows["1 dense"][2 if phase == "prefill" else 3] == "-"


def test_long_names_are_cut_in_tables() -> None:
    long = "m" * 500
    methods = {"dense": factory.DENSE, long: factory.METHODS["oracle_top_k k=0.025"]}
    found = blocks(evaluation({"vt": scored({"dense": 1, long: 1})}, methods=methods))
    assert all(len(text) < 120 for text in only(found, Table, "Scores").head)


def test_many_methods_are_rows() -> None:
    labels = ["dense", *(f"streaming_llm window={n}" for n in range(1, 19))]
    methods = {x: factory.METHODS["dense"] if x == "dense" else {
        "prefill": {"name": "dense"}, "decode": {"name": "streaming_llm", "window": n},
    } for n, x in enumerate(labels)}  # fmt: skip
    rights = {x: n % 5 for n, x in enumerate(labels)}
    found = blocks(evaluation({"vt": scored(rights), "cwe": scored(rights)}, methods=methods))
    table = only(found, Table, "Scores")
    assert table.head == ("", "vt", "cwe", "mean of all 2") and table.texts == 1
    assert cells(table)["n"] == ["4", "4", ""] and cells(table)["4 streaming_llm window=3"][0].startswith("75.0%")
    assert only(found, Table, "Bytes read in decode").head == ("", "vt", "cwe")


def test_fused_methods_go_by_short_names_and_their_prefill_is_not_compared() -> None:
    content = factory.fused()
    for entry in content["tasks"].values():
        entry["results"]["dense fuse=full_reuse"]["prefill_reads"] = factory.reads(0.1)
    found = blocks(content)
    assert only(found, Table, "Scores").head[4:7] == ("1 dense", "2 full_reuse", "3 a3 ratio=0.3")
    assert "eval-quality-prefill.png" not in [b.file for b in found if isinstance(b, Figure)]
