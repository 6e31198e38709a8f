# ruff: noqa: RUF001 - Chinese punctuation
"""Every measure against values worked out by hand."""

from __future__ import annotations

import pytest

from longreach.errors import Unsupported
from longreach.tasks.longbench import metrics


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("The cat sat.", "a CAT", 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "cat", 2 / 3),  # a word counts as often as it is expected
        ("an apple", "The Apple!", 1.0),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_qa_f1(answer: str, expected: str, score: float) -> None:
    assert metrics.qa_f1(answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("我爱北京天安门。", "《北京天安门》", 2 / 3),  # 我 爱 北京 天安门 against 北京 天安门
        ("北京，天安门！", "北京天安门", 1.0),
        ("上海", "北京", 0.0),
        ("。", "北京", 0.0),
    ],
)
def test_qa_f1_in_chinese(answer: str, expected: str, score: float) -> None:
    pytest.importorskip("jieba")
    assert metrics.qa_f1_zh(answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("the cat was found", "The cat sat", 4 / 7),  # 2 in common order of 4 and 3
        ("b a", "a b", 1 / 2),
        ("a b c", "a b c", 1.0),
        ("", "a b", 0.0),
    ],
)
def test_rouge_l(answer: str, expected: str, score: float) -> None:
    pytest.importorskip("rouge_score")
    assert metrics.rouge_l(answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [("我爱北京天安门", "北京天安门", 2 / 3), ("天安门北京", "北京天安门", 1 / 2), ("上海", "北京", 0.0)],
)
def test_rouge_l_in_chinese(answer: str, expected: str, score: float) -> None:
    pytest.importorskip("rouge_score")
    pytest.importorskip("jieba")
    assert metrics.rouge_l_zh(answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("Paragraph 3", "Paragraph 3", 1.0),
        ("3 or 5", "Paragraph 3", 1 / 2),
        ("Paragraph 13", "Paragraph 3", 0.0),
        ("段落7", "段落7", 1.0),
        ("none", "Paragraph 3", 0.0),
    ],
)
def test_retrieval(answer: str, expected: str, score: float) -> None:
    assert metrics.retrieval(answer, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"), [("17, no, 17. Or 4?", 2 / 3), ("17", 1.0), ("seventeen", 0.0), ("170", 0.0)]
)
def test_count(answer: str, score: float) -> None:
    assert metrics.count(answer, "17") == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("Food and drink", "Food and drink", 1.0),  # "Food" is a part of what is expected
        ("City or Food", "Food", 1 / 2),
        ("City", "Food", 0.0),
        ("food", "Food", 0.0),
        ("Food and drink", "Food", 1 / 2),
    ],
)
def test_classification(answer: str, expected: str, score: float) -> None:
    assert metrics.classification(answer, expected, ["Food", "Food and drink", "City"]) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("return x", 7 / 8),  # 7 characters in common order of 8 and 8
        ("\n\nreturn y\nreturn x", 1.0),
        ("```python\n# so\n// so\nreturn y", 1.0),
        ("# nothing but talk", 0.0),
        ("", 0.0),
    ],
)
def test_code_similarity(answer: str, score: float) -> None:
    pytest.importorskip("rapidfuzz")
    assert metrics.code_similarity(answer, "return y") == pytest.approx(score)


@pytest.mark.parametrize(("answer", "line"), [("\n\none\ntwo", "one"), ("one", "one"), ("", ""), ("one\n", "one")])
def test_the_first_line_is_the_first_with_text(answer: str, line: str) -> None:
    assert metrics.first_line(answer) == line


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(
        Unsupported, match=r"rouge-score and jieba, not installed.*pip install 'longreach\[longbench\]'"
    ):
        metrics.check_packages(metrics.rouge_l_zh, "longbench_vcsum")
    metrics.check_packages(metrics.qa_f1, "longbench_qasper")
