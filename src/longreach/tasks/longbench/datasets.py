# ruff: noqa: RUF001 - Chinese punctuation
"""LongBench's 21 data sets (Bai et al., 2023): what is asked, how long answers are, what measures them.

Questions are reworded and shorter, except the words that answers are judged by: "unanswerable" and yes or no in qasper,
"Paragraph 3", a bare number, and the plain continuation in few-shot and code sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longreach.tasks.longbench import metrics

SOURCE = "LongBench (Bai et al., 2023, arXiv:2308.14508)"


@dataclass(frozen=True)
class Dataset:
    """text, question: templates of what is read and of what follows it, with {context} and {input} of the file.

    begun: how the answer begins. measure: of an answer and one expected text; the best of several counts.
    one_line: only the answer's first line is judged. chat: whether a chat model is asked in its template.
    numbered: whether a number is expected.
    """

    max_new_tokens: int
    measure: Callable[..., float]
    text: str
    question: str = ""
    begun: str = ""
    one_line: bool = False
    chat: bool = True
    numbered: bool = False


def _questions(max_new_tokens: int, text: str, order: str) -> Dataset:
    return Dataset(max_new_tokens, metrics.qa_f1, f"{order}\n\n{text}", f"{order}\n\nQuestion: {{input}}", "Answer:")


def _summary(text: str, question: str) -> Dataset:
    return Dataset(512, metrics.rouge_l, text, question, "Summary:")


def _examples(max_new_tokens: int, measure: Callable[..., float], text: str) -> Dataset:
    return Dataset(max_new_tokens, measure, text, one_line=True, chat=False)


def _code(text: str) -> Dataset:
    return Dataset(64, metrics.code_similarity, text, "Next line of code:", chat=False)


BRIEFLY = "Give only the answer, without any explanation."
BY_STORY = f"Answer the question about the story as concisely as you can, with one phrase if possible. {BRIEFLY}"
BY_ARTICLE = (
    "Answer the question about the article with one phrase or sentence. If the article does not answer it, write "
    '"unanswerable". If it is a yes/no question, answer "yes", "no" or "unanswerable". Do not explain.'
)
BY_TEXT = "Answer the question about the text. Give only the answer and no other words."
BY_PASSAGES = "Answer the question by the given passages. Give only the answer and no other words."
PASSAGES = "Passages:\n{context}"
BY_TEXT_ZH = "请根据文章回答问题，只给出答案，不要输出其他内容。"
MEETING = "The following are the transcript of a meeting and a request about it.\n\nTranscript:\n{context}"
WHICH = "Below are 30 paragraphs of Wikipedia and an abstract. Find the paragraph that the abstract is of.\n\n{context}"
WHICH_ZH = "以下是若干段落和一个摘要，请判断摘要出自哪一个段落。\n\n{context}"

DATASETS = {
    "narrativeqa": _questions(128, "Story: {context}", BY_STORY),
    "qasper": _questions(128, "Article: {context}", BY_ARTICLE),
    "multifieldqa_en": _questions(64, "{context}", BY_TEXT),
    "multifieldqa_zh": Dataset(
        64, metrics.qa_f1_zh, f"{BY_TEXT_ZH}\n\n文章：{{context}}", f"{BY_TEXT_ZH}\n\n问题：{{input}}", "回答："
    ),
    "hotpotqa": _questions(32, PASSAGES, BY_PASSAGES),
    "2wikimqa": _questions(32, PASSAGES, BY_PASSAGES),
    "musique": _questions(32, PASSAGES, BY_PASSAGES),
    "dureader": Dataset(
        128, metrics.rouge_l_zh,
        "请根据文章回答问题。\n\n文章：{context}", "请根据上述文章回答问题。\n\n问题：{input}", "回答：",
    ),
    "gov_report": _summary(
        "Summarize the following report of a government agency on one page.\n\nReport:\n{context}",
        "Now write a one-page summary of the report.",
    ),
    "qmsum": _summary(MEETING, "Answer the request in one or more sentences.\n\nRequest: {input}"),
    "multi_news": _summary(
        "Summarize the following news on one page.\n\nNews:\n{context}", "Now write a one-page summary of all the news."
    ),
    "vcsum": Dataset(
        512, metrics.rouge_l_zh, "请总结下面的会议记录。\n\n会议记录：\n{context}", "请写出会议总结。", "会议总结："
    ),
    "trec": _examples(
        64, metrics.classification,
        "Determine the type of the last question. Examples of questions and their types come first.\n\n"
        "{context}\n{input}",
    ),
    "triviaqa": _examples(
        32, metrics.qa_f1,
        "Answer the last question by its passage, with the answer alone. Examples come first.\n\n{context}\n\n{input}",
    ),
    "samsum": _examples(
        128, metrics.rouge_l,
        "Summarize the last dialogue in a few short sentences. Examples come first.\n\n{context}\n\n{input}",
    ),
    "lsht": _examples(64, metrics.classification, "请判断最后一条新闻的类别，下面是一些例子。\n\n{context}\n{input}"),
    "passage_count": Dataset(
        32, metrics.count,
        "Below are paragraphs of Wikipedia, some of them more than once. Count those that differ from each other."
        "\n\n{context}",
        "How many different paragraphs are there, once duplicates are removed? Give only the number, such as 1 or 2.",
        "The final answer is:", numbered=True,
    ),
    "passage_retrieval_en": Dataset(
        32, metrics.retrieval, WHICH,
        'The abstract:\n\n{input}\n\nGive the number of the paragraph, in the form "Paragraph 1", "Paragraph 2".',
        "The answer is:", numbered=True,
    ),
    "passage_retrieval_zh": Dataset(
        32, metrics.retrieval, WHICH_ZH, "摘要：\n\n{input}\n\n请给出段落的编号，格式如“段落1”、“段落2”。",
        "答案是：", numbered=True,
    ),
    "lcc": _code("Complete the code given below.\n{context}"),
    "repobench-p": _code("Complete the code given below.\n{context}{input}"),
}  # fmt: skip
