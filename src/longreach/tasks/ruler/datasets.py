"""The data sets of qa_1 and qa_2: SQuAD's and HotpotQA's official JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput
from longreach.tasks.ruler.questions import Item, Questions
from longreach.tasks.sources import of_file

KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}


def squad(path: Path, name: str = "qa_1") -> Questions:
    """SQuAD's JSON: answerable questions about Wikipedia's paragraphs. Raises InvalidInput, naming file and entry."""
    items: list[Item] = []
    documents: dict[str, None] = {}
    for place, paragraph in _paragraphs(path):
        text = _field(place, paragraph, "context", str)
        documents[text] = None
        for number, asked in enumerate(_field(place, paragraph, "qas", list), 1):
            here = f"{place}, question {number}"
            found = [_field(here, answer, "text", str) for answer in _field(here, asked, "answers", list)]
            if found and not asked.get("is_impossible"):
                items.append(Item(_field(here, asked, "question", str), tuple(dict.fromkeys(found)), (text,)))
    return _made(path, name, items, documents, "RULER on SQuAD (Rajpurkar et al., 2016)")


def _paragraphs(path: Path) -> Iterator[tuple[str, Any]]:
    for number, article in enumerate(_field(f"{path}", _loaded(path), "data", list), 1):
        place = f"{path}, article {number}"
        for at, paragraph in enumerate(_field(place, article, "paragraphs", list), 1):
            yield f"{place}, paragraph {at}", paragraph


def hotpot(path: Path, name: str = "qa_2") -> Questions:
    """HotpotQA's JSON: questions whose answer takes several of their documents. Raises as `squad`."""
    items: list[Item] = []
    documents: dict[str, None] = {}
    entries = _loaded(path)
    if not isinstance(entries, list):
        raise InvalidInput(f"{path}: expected a list of questions, got {_shown(entries)}; is it the official file?")
    for number, entry in enumerate(entries, 1):
        place = f"{path}, entry {number}"
        texts = {title: f"{title}\n{''.join(lines)}" for title, lines in _pairs(place, entry, "context", list)}
        facts = _pairs(place, entry, "supporting_facts", int)
        documents |= dict.fromkeys(texts.values())
        needed = tuple(dict.fromkeys(texts[title] for title, _ in facts if title in texts)) or tuple(texts.values())
        question, answer = _field(place, entry, "question", str), _field(place, entry, "answer", str)
        items.append(Item(question, (answer,), needed))
    return _made(path, name, items, documents, "RULER on HotpotQA (Yang et al., 2018)")


def _loaded(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path given to --tasks") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 (byte {error.start}); fetch it again") from error
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path}, line {error.lineno}: no valid JSON ({error.msg}); fetch it again") from error


def _field(place: str, entry: Any, name: str, kind: type) -> Any:
    """The field of an entry. Raises InvalidInput, naming its place, where it is missing or of another kind."""
    if not isinstance(entry, dict):
        raise InvalidInput(f"{place}: expected an object, got {_shown(entry)}; is it the official file?")
    if name not in entry:
        raise InvalidInput(f"{place}: the field {name!r} is missing; is it the official file?")
    if not isinstance(entry[name], kind):
        raise InvalidInput(f"{place}: the field {name!r} should be {KINDS[kind]}, got {_shown(entry[name])}")
    return entry[name]


def _pairs(place: str, entry: Any, name: str, second: type) -> list[tuple[str, Any]]:
    """A field that lists pairs of a title and a number or a list of texts."""
    pairs = _field(place, entry, name, list)
    for pair in pairs:
        good = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], second)
        if not good or (second is list and not all(isinstance(line, str) for line in pair[1])):
            raise InvalidInput(f"{place}: the field {name!r} should list titles with theirs, got {_shown(pair)}")
    return [(title, theirs) for title, theirs in pairs]


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]


def _made(path: Path, name: str, items: list[Item], documents: dict[str, None], source: str) -> Questions:
    if not items:
        raise InvalidInput(f"{path} holds no question with an answer")
    return Questions(name, tuple(items), tuple(documents), of_file(source, path))
