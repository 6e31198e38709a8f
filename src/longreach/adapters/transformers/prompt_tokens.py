"""Prompts as tokens: chat templates, special tokens, stop tokens, and the length that a model was made for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longreach.adapters.transformers.checks import text_config
from longreach.adapters.transformers.control_tokens import ControlTokens, Part
from longreach.errors import InvalidInput, ModelFileError


def context_limit(model: Any) -> int | None:
    """Tokens of the model's context, else None."""
    return getattr(text_config(model), "max_position_embeddings", None)


def short_context(model: Any) -> int | None:
    """The longest prompt, in tokens, that a longrope model rotates by its short frequencies; None for other models.

    The model rotates all tokens of a longer prompt by its long frequencies. Chunks are computed with the short ones: a
    chunk with its prefix must not be longer, and no chunk is exact in a longer prompt.
    """
    config = text_config(model)
    rope = config.rope_parameters or {}
    kinds = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    found = [
        kind.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min((int(n) for n in found if n), default=None)


def uses_chunk_frequencies(model: Any, length: int) -> bool:
    """Whether the model rotates a prompt of `length` tokens by the frequencies that chunks are computed with."""
    longest = short_context(model)
    return longest is None or length <= longest


def check_tokens(model: Any, tokens: Tensor, what: str) -> None:
    """Raise InvalidInput for token ids [N], on the host, that are not the model's."""
    known = model.get_input_embeddings().num_embeddings
    unknown = tokens[(tokens < 0) | (tokens >= known)]
    if len(unknown):
        raise InvalidInput(
            f"{what}: token {int(unknown[0])} is not in the model's vocabulary of {known}; use its own tokenizer"
        )


def check_length(model: Any, prompt: int, max_new_tokens: int) -> None:
    """Raise InvalidInput if prompt and answer exceed the model's context."""
    limit = context_limit(model)
    if limit is not None and prompt + max_new_tokens > limit:
        raise InvalidInput(
            f"document and question are {prompt} tokens and the answer may take {max_new_tokens}, but the model's "
            f"context is {limit} tokens; shorten the document by {prompt + max_new_tokens - limit} tokens, or ask for "
            f"a shorter answer"
        )


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer, from the generation config and the tokenizer."""
    found = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, (list, tuple)) else ({value} if value is not None else set())
    return tuple(sorted(found))


def stop_strings(model: Any) -> tuple[str, ...]:
    """Texts that end an answer, from the generation config."""
    value = getattr(model.generation_config, "stop_strings", None)
    return (value,) if isinstance(value, str) else tuple(value or ())


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Tokens of a prompt to continue: special tokens at its beginning if `special`, none at its end."""
    ids = list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
    if special and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def encode_parts(tokenizer: Any, parts: Sequence[Part], special: bool = True) -> list[int]:
    """As `encode` of the joined parts, but control tokens that a user's part spells out (`</s>`) are read as text.

    Raises InvalidInput, naming them, where the tokenizer cannot do that.
    """
    control = ControlTokens(tokenizer)
    if not any(control.spelled(text) for text, user in parts if user):
        return encode(tokenizer, "".join(text for text, _ in parts), special)
    return [*(encode(tokenizer, "") if special else ()), *control.encode(parts).ids]


def _users_part(tokenizer: Any, written: str, pattern: str, key: str, text: str) -> list[Part]:
    """A chat template's text, with the parts that are a user's `text`. pattern: the same with `key` in their place.

    Raises InvalidInput if the template changes the text and this spells out control tokens.
    """
    for mine in (text, text.strip()):
        if pattern.replace(key, mine) == written:
            first, *others = pattern.split(key)
            return [Part(first, False), *(part for more in others for part in (Part(mine, True), Part(more, False)))]
    names = ControlTokens(tokenizer).spelled(text)
    if names:
        listed = ", ".join(repr(name) for name in dict.fromkeys(names))
        raise InvalidInput(
            f"the text spells out control tokens ({listed}), and the chat template changes it, so that they cannot be "
            f"told from the template's own; remove them"
        )
    return [Part(written, False)]


def chat(tokenizer: Any, turn: str, system: str = "") -> str | None:
    """A user's turn in the tokenizer's chat template, up to the beginning of the answer; None without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "system", "content": system}] if system else []
    return in_template(tokenizer, [*turns, {"role": "user", "content": turn}])


def in_template(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """Messages (role, content) in the tokenizer's chat template, up to the beginning of the answer.

    Raises ModelFileError for a template that fails.
    """
    try:
        text: str = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's: it may raise anything
        why, remedy = f"{type(error).__name__}: {error}", "mend it"
        if messages[0]["role"] == "system":
            remedy = "leave the system prompt out (--system) if the template takes none, else mend it"
        raise ModelFileError(f"the tokenizer's chat template failed ({why}); {remedy} or remove it") from error
    return text


@dataclass(frozen=True)
class Frame:
    """The text around the documents of a prompt. templated: by the chat template, which brings special tokens.

    head: before the documents. rest: after the question.
    """

    head: tuple[Part, ...]
    rest: str
    templated: bool

    def tail(self, question: str) -> list[Part]:
        """The parts after the documents."""
        return [Part("" if self.templated else "Question: ", False), Part(question, True), Part(self.rest, False)]


def frame(tokenizer: Any, system: str = "") -> Frame:
    """The constant parts of prompts with changing documents and question.

    Raises InvalidInput for a chat template that changes the system prompt or a user's turn, or has the latter twice.
    """
    if any("\ud800" <= c <= "\udfff" for c in system):
        raise InvalidInput("the system prompt must be text; this one holds bytes that are not UTF-8")
    place = "{documents and a question}"
    written = chat(tokenizer, place, system)
    if written is None:
        return Frame((Part(f"{system}\n\n", True),) if system else (), "\nAnswer:", False)
    head, found, rest = written.partition(place)
    if not found or place in rest:
        raise InvalidInput(
            "the chat template must contain the user's message once, unchanged; this one cannot hold documents"
        )
    if system.strip() not in head:
        raise InvalidInput(
            "the chat template leaves the system prompt out or changes it; put its text into the question, or use a "
            "template with a system role"
        )
    if not system:
        return Frame((Part(head, False),), rest, True)
    key = secrets.token_hex(16)
    pattern = (chat(tokenizer, place, key) or "").partition(place)[0]
    return Frame(tuple(_users_part(tokenizer, head, pattern, key, system)), rest, True)


def document_head(tokenizer: Any, system: str = "") -> tuple[Frame, list[int]]:
    """The frame of prompts of documents, and the tokens of its head, behind which chunks are computed. As `frame`."""
    around = frame(tokenizer, system)
    return around, encode_parts(tokenizer, around.head, special=not around.templated)


def prompts(tokenizer: Any, document: str, questions: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """(tokens that all prompts share, the rest of each): so the document is read once.

    Questions follow the document, in the tokenizer's chat template if it has one, else as "Question: ...
    Answer:". Raises InvalidInput for an empty document or question.
    """
    if not document.strip():
        raise InvalidInput("the document is empty; give one with text in it")
    if not questions or not all(question.strip() for question in questions):
        raise InvalidInput("a question is empty; ask something")

    if any("\ud800" <= c <= "\udfff" for text in (document, *questions) for c in text):
        raise InvalidInput("document and questions must be text; one of them holds bytes that are not UTF-8")

    key = secrets.token_hex(16)

    def prompt(question: str) -> list[int]:
        text = f"{document.rstrip()}\n\n"
        written = chat(tokenizer, text + question)
        if written is None:
            return encode_parts(tokenizer, [Part(f"{text}Question: {question}", True), Part("\nAnswer:", False)])
        pattern = chat(tokenizer, key) or ""
        return encode_parts(tokenizer, _users_part(tokenizer, written, pattern, key, text + question), special=False)

    return share([prompt(q) for q in questions], prompt("?"))


def share(sequences: Sequence[list[int]], other: list[int]) -> tuple[list[int], list[list[int]]]:
    """Split sequences after the longest prefix they share with `other`; each keeps at least one token of its own."""
    common = min(len(s) for s in (*sequences, other)) - 1
    for sequence in sequences:
        for i in range(common):
            if sequence[i] != other[i]:
                common = i
                break
    if common < 1:
        raise InvalidInput("the prompts share no beginning; the chat template puts the question before the document")
    return other[:common], [s[common:] for s in sequences]
