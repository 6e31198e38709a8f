"""Text of users that spells out control tokens, `</s>` or `<|user|>`, read as text: documents are not trusted."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from longreach.errors import InvalidInput

BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # of text that has no other token


class Part(NamedTuple):
    """A part of a prompt. user: whether it is text of a user, else of the chat template or of longreach."""

    text: str
    user: bool


class Encoded(NamedTuple):
    """Token ids, and the characters [start, stop) of each."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens but those of unknown text and of bytes (`<0x0A>`), and
    added tokens in brackets that its chat template writes."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._safe_copy: Tokenizer | None = None  # control tokens have random texts there, which no user text spells
        self._renamed: dict[str, str] = {}  # a control token's text -> its random text in the copy
        self._own: dict[int, int] = {}  # id of an added token in the copy -> in the tokenizer
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown in (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
            unknown = None  # one token for all of them, as in GPT-2, which has no unknown text
        template = str(getattr(tokenizer, "chat_template", None) or "")
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*getattr(tokenizer, "all_special_ids", ())}
        self._names = {
            number: str(token)
            for number, token in added.items()
            if number != unknown
            and not BYTE.fullmatch(str(token))
            and (number in special or token.special or _written(str(token), template))
        }

    def spelled(self, text: str) -> list[str]:
        """Names of the control tokens that the tokenizer makes of this text, one for each time."""
        return self.names(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def names(self, ids: Iterable[int]) -> list[str]:
        """Names of the control tokens among these tokens."""
        return [self._names[number] for number in ids if number in self._names]

    def encode(self, parts: Sequence[Part]) -> Encoded:
        """Tokens of the joined parts, without those that the tokenizer adds to a text. The control tokens of users'
        parts are split into text; all else is as the tokenizer makes it.

        Raises InvalidInput, naming them, where this tokenizer cannot split them.
        """
        core = self._copy(parts)
        found = core.encode(
            "".join(p.text if p.user else self._rename(p.text) for p in parts), add_special_tokens=False
        )
        kept = [self._names[n] for n in found.ids if n not in self._own and n in self._names]
        if kept:
            raise self._refusal(kept)
        return Encoded([self._own.get(n, n) for n in found.ids], found.offsets)

    def _copy(self, parts: Sequence[Part]) -> Tokenizer:
        """The safe copy, made once. parts: for the error if this tokenizer has none."""
        if self._safe_copy is None:
            core = getattr(self._tokenizer, "backend_tokenizer", None)
            if not isinstance(core, Tokenizer):
                raise self._refusal([name for part in parts if part.user for name in self.spelled(part.text)])
            content, ids, key = json.loads(core.to_str()), dict[str, int](), secrets.token_hex(8)
            content["post_processor"] = None  # it trims spaces off the offsets
            for token in content["added_tokens"]:
                text = token["content"]
                if token["id"] in self._names:  # brackets stay, for tokens that must stand between words
                    token["content"] = self._renamed[text] = f"{text[0]}{key}{token['id']}{text[-1]}"
                ids[token["content"]] = token["id"]
            self._safe_copy = Tokenizer.from_str(json.dumps(content))
            self._safe_copy.no_truncation()
            self._safe_copy.no_padding()
            known = {text: self._safe_copy.token_to_id(text) for text in ids}
            self._own = {at: ids[text] for text, at in known.items() if at is not None}
        return self._safe_copy

    def _rename(self, text: str) -> str:
        """Text of a chat template, with its control tokens under their texts in the copy."""
        if not self._renamed:
            return text
        longest_first = sorted(map(re.escape, self._renamed), key=len, reverse=True)
        return re.sub("|".join(longest_first), lambda found: self._renamed[found.group()], text)

    def _refusal(self, names: Sequence[str]) -> InvalidInput:
        listed = ", ".join(repr(name) for name in dict.fromkeys(names))
        return InvalidInput(
            f"the text spells out control tokens ({listed}), which {type(self._tokenizer).__name__} cannot read as "
            f"text; remove them"
        )


def _written(token: str, template: str) -> bool:
    """Whether a chat template writes this token, in brackets: others, such as line ends, are ordinary text."""
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]" and token in template
