"""LongBench's files: what is read, what is asked, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tasks.longbench.files import entry, write_lines

from longreach.errors import InvalidInput, Unsupported
from longreach.tasks import longbench
from longreach.tasks.longbench import metrics
from longreach.tasks.longbench.datasets import DATASETS

FEW_SHOT = {"trec", "triviaqa", "samsum", "lsht"}
CODE = {"lcc", "repobench-p"}

for package in ("rouge_score", "jieba", "rapidfuzz"):
    pytest.importorskip(package)


def test_all_data_sets_of_the_paper_are_there() -> None:
    assert len(DATASETS) == 21


@pytest.mark.parametrize("name", DATASETS)
def test_a_file_of_each_data_set_is_read(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / f"{name}.jsonl", entry(name), entry(name, _id="1f", answers=["x 2", "Ada 1"]))
    (task,) = longbench.tasks(path)
    assert task.name == f"longbench_{name}" and "2308.14508" in task.source
    assert [s.facts["id"] for s in task.fixed] == ["0f", "1f"]
    sample = task.fixed[1]
    whole = "\n".join((sample.context, sample.question))
    assert "written {by} Ada." in sample.context
    asks = name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")  # they have no question
    assert ("{wrote}" in whole) == asks
    assert task.chat == (name not in FEW_SHOT | CODE)
    right = {"passage_count": "1"}.get(name, "Ada 1")
    answers = ["1"] if name == "passage_count" else ["x 2", "Ada 1"]
    (again,) = longbench.tasks(write_lines(path, entry(name, answers=answers)))
    assert again.score(right, again.fixed[0]) == 1.0  # the best of what is expected
    assert again.score("", again.fixed[0]) == 0.0


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - CODE - {"passage_count"}))
def test_only_few_shot_sets_are_judged_by_the_first_line(tmp_path: Path, name: str) -> None:
    (task,) = longbench.tasks(write_lines(tmp_path / "f.jsonl", entry(name)))
    score = task.score("\nnothing\nAda 1", task.fixed[0])
    assert (score == 0.0) == (name in FEW_SHOT)
    assert task.score("\nAda 1\nFood", task.fixed[0]) == 1.0 or name not in FEW_SHOT


def test_one_file_may_hold_several_data_sets(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "all.jsonl", entry("qasper"), entry("trec"), entry("qasper", _id="2"))
    assert [(t.name, len(t.fixed)) for t in longbench.tasks(path)] == [("longbench_qasper", 2), ("longbench_trec", 1)]


def test_longbench_e_is_told_apart_by_length(tmp_path: Path) -> None:
    lengths = [3999, 4000, 7999, 8000]
    path = write_lines(tmp_path / "qasper_e.jsonl", *(entry("qasper", _id=f"{n}", length=n) for n in lengths))
    (task,) = longbench.tasks(path)
    assert task.by == ("length_range",)
    assert [s.facts["length_range"] for s in task.fixed] == ["0-4k", "4-8k", "4-8k", "8k+"]
    (whole,) = longbench.tasks(write_lines(tmp_path / "qasper.jsonl", entry("qasper")))
    assert whole.by == ()


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "qasper.jsonl", entry("qasper"))
    write_lines(tmp_path / "qasper_e.jsonl", entry("qasper"))
    write_lines(tmp_path / "trec_e.jsonl", entry("trec_e"))
    (tmp_path / "README.md").write_text("no data")
    names = [task.name for task in longbench.tasks(tmp_path)]
    assert names == ["longbench_qasper", "longbench_qasper_e", "longbench_trec_e"]
    write_lines(tmp_path / "copy.jsonl", entry("qasper"))
    with pytest.raises(InvalidInput, match=r"longbench_qasper is in another file"):
        longbench.tasks(tmp_path)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no \.jsonl file"):
        longbench.tasks(tmp_path)


def without(field: str, dataset: str = "qasper") -> dict[str, object]:
    return {k: v for k, v in entry(dataset).items() if k != field}


@pytest.mark.parametrize("field", ["input", "context", "answers", "length", "dataset", "language", "_id"])
def test_a_missing_field_is_named_with_its_line(tmp_path: Path, field: str) -> None:
    path = write_lines(tmp_path / "f.jsonl", entry("qasper"), "", without(field))
    with pytest.raises(InvalidInput, match=rf"f\.jsonl, line 3: the field '{field}' is missing"):
        longbench.tasks(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"input": "a"', r"line 2: no valid JSON"),
        ("7", r"line 2: expected a JSON object, got 7"),
        (entry("qasper", answers=[]), r"line 2: the field 'answers' should be a list of texts, got \[\]"),
        (entry("qasper", answers="Ada"), r"line 2: the field 'answers' should be a list of texts"),
        (entry("qasper", answers=[1]), r"line 2: the field 'answers' should be a list of texts"),
        (entry("qasper", context=None), r"line 2: the field 'context' should be a text, got null"),
        (entry("qasper", length="5"), r"line 2: the field 'length' should be a number"),
        (entry("qasper", length=True), r"line 2: the field 'length' should be a number"),
        (r'{"input": "a", "context": "\ud800"}', r"line 2: the field 'context' holds half a character"),
        (entry("quasper"), r"line 2: unknown LongBench data set 'quasper'; known: narrativeqa, qasper, .*repobench-p"),
        (without("all_classes", "trec"), r"line 2: the field 'all_classes' is missing"),
        (entry("trec", all_classes=None), r"line 2: the field 'all_classes' should be a list of texts, got null"),
        (entry("passage_count", answers=["many"]), r"line 2: the field 'answers' should hold a number, got 'many'"),
    ],
)
def test_bad_lines_are_refused(tmp_path: Path, line: object, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=rf"f\.jsonl, {complaint}"):
        longbench.tasks(write_lines(tmp_path / "f.jsonl", entry("qasper"), line))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=r"f\.jsonl is empty"):
        longbench.tasks(write_lines(tmp_path / "f.jsonl", text))


def test_no_file_and_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot read .*none\.jsonl"):
        longbench.tasks(tmp_path / "none.jsonl")
    (tmp_path / "f.jsonl").write_bytes(b'{"input": "\xff"}')
    with pytest.raises(InvalidInput, match="is not UTF-8"):
        longbench.tasks(tmp_path / "f.jsonl")


def test_line_separators_within_texts_end_no_line(tmp_path: Path) -> None:
    (task,) = longbench.tasks(write_lines(tmp_path / "f.jsonl", entry("qasper", context="one\u2028two\x85three")))
    assert "one\u2028two\x85three" in task.fixed[0].context


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "f.jsonl", entry("qasper"))
    plain = longbench.tasks(path)[0].fixed
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert longbench.tasks(path)[0].fixed == plain


def test_classes_may_not_be_needed(tmp_path: Path) -> None:
    assert longbench.tasks(write_lines(tmp_path / "f.jsonl", entry("qasper", all_classes=None)))


def test_a_missing_package_is_found_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"longbench_lcc is scored with the package rapidfuzz"):
        longbench.tasks(write_lines(tmp_path / "f.jsonl", entry("lcc")))
    assert longbench.tasks(write_lines(tmp_path / "g.jsonl", entry("qasper")))
