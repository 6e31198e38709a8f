"""A conversation over turns: each turn reads only what the cache does not hold yet."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.control_tokens import ControlTokens, Part
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.api import Generated, generate
from longreach.adapters.transformers.prompt_reader import CHUNK, Advance, Reader
from longreach.adapters.transformers.prompt_tokens import (
    check_length,
    encode_parts,
    in_template,
    stop_strings,
    stop_tokens,
)
from longreach.adapters.transformers.recurrent import continues
from longreach.errors import InvalidInput

Message = dict[str, str]  # role, content


@dataclass(frozen=True)
class Reply:
    """One turn's answer.

    text: without special tokens. tokens: of the answer. prompt_tokens: of the whole conversation up to it.
    reused_tokens: those of them that the cache held; the others were read. read_again: of these, tokens in the cache
    that no longer fitted, as the chat template writes earlier turns differently now (thoughts are left out), as a turn
    was taken back, or as the method's state cannot be cut. stopped: the model ended its answer, max_new_tokens did not.
    made: as `generate` returns it.
    """

    text: str
    tokens: int
    prompt_tokens: int
    reused_tokens: int
    read_again: int
    stopped: bool
    made: Generated


class Chat:
    """A conversation with the model of a session, in the chat template of its tokenizer.

    system: the system prompt, none if empty. document: a text that the first turn begins with, before its question;
    none if empty. cache: one that `session.load_cache` returned, with its tokens: as many of them as the conversation
    begins with are not read again. Raises InvalidInput for a tokenizer without a chat template, and another cache.
    """

    def __init__(
        self, session: Session, tokenizer: Any, *, system: str = "", document: str = "",
        cache: LongreachCache | None = None,
    ):  # fmt: skip
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidInput(
                "the tokenizer has no chat template, so turns cannot be written; use longreach.generate, or set "
                "tokenizer.chat_template"
            )
        session.check_open()
        self.session, self.tokenizer = session, tokenizer
        if any("\ud800" <= c <= "\udfff" for c in system + document):
            raise InvalidInput("system and document must be text; one of them holds bytes that are not UTF-8")
        self._held: list[int] = [] if cache is None else _tokens_of(cache, session)  # tokens in the cache
        self._cache = session.new_cache() if cache is None else cache
        self.document = document.rstrip()
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as the chat template takes it."""
        return tuple(dict(message) for message in self._messages)

    def ask(self, text: str, *, max_new_tokens: int = 512, **settings: Any) -> Reply:
        """The model's answer to a turn of the user; both are added to the conversation.

        settings: of `longreach.generate`, such as do_sample, temperature, repetition_penalty, streamer (as transformers
        has them), prefill_chunk_size, graph.
        Raises InvalidInput for an empty turn and for a conversation longer than the model's context, ModelFileError
        for a template that fails, and what `generate` raises. After an error the conversation is as before.
        """
        if not isinstance(text, str) or not text.strip():
            raise InvalidInput("the turn is empty; write something")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise InvalidInput("the turn must be text; this one holds bytes that are not UTF-8")
        for name in ("past_key_values", "attention_mask", "num_return_sequences"):
            if name in settings:
                raise InvalidInput(f"{name}: a chat has one sequence and its own cache; leave it out")
        turn: Message = {"role": "user", "content": text}
        model = self.session.model
        ids = self._tokens([*self._messages, turn])
        check_length(model, len(ids), max_new_tokens)
        kept = self._keep(ids)
        again, self._held = len(self._held) - kept, self._held[:kept]  # also if the answer fails
        ends = stop_tokens(model, self.tokenizer)
        settings.setdefault("eos_token_id", ends)
        if strings := stop_strings(model):
            settings = {"stop_strings": list(strings), "tokenizer": self.tokenizer, **settings}
        prompt = torch.tensor([ids])
        made = generate(self.session, prompt, max_new_tokens=max_new_tokens, past_key_values=self._cache, **settings)
        answer = made.tokens[0].tolist()
        self._held = [*ids, *answer[:-1]]
        said = self.tokenizer.decode(answer, skip_special_tokens=True).strip()
        self._messages += [turn, {"role": "assistant", "content": said}]
        stopped = answer[-1] in ends or len(answer) < max_new_tokens
        return Reply(said, len(answer), len(ids), kept, again, stopped, made)

    def beginning(self) -> list[int]:
        """The tokens that any conversation begins with: system prompt and document."""
        head = [message for message in self._messages[:1] if message["role"] == "system"]
        one, two = (self._tokens([*head, {"role": "user", "content": probe}]) for probe in ("?", "A"))
        same = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        return one[:same]

    def read_ahead(self, progress: Advance | None = None, *, prefill_chunk_size: int = CHUNK, room: int = 0) -> int:
        """Read system prompt and document into the cache before the first turn. Returns the tokens in the cache.

        progress: called with the tokens that each pass read, and first with those that the cache held. room: tokens of
        turns and answers to come, for which memory is reserved at once. Raises what `ask` raises.
        """
        ids = self.beginning()
        check_length(self.session.model, len(ids), 1)
        if len(ids) < 2 or (self._messages and self._messages[-1]["role"] == "assistant"):
            return self._cache.columns
        kept = self._keep([*ids, -1])  # which leaves the last one to be read
        self._held = self._held[:kept]
        reader = Reader(self.session, prefill_chunk_size)
        reader.cache, advance = self._cache, progress or (lambda tokens: None)
        if kept:
            advance(kept)
        if kept < len(ids):
            reader.read(ids[kept:], advance, then=room)
            self._held = ids
        return self._cache.columns

    def save(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Save the cache with its tokens, as `LongreachCache.save`; see `cache` above. The turns are not saved."""
        self._cache.save(path, tokens=[self._held], overwrite=overwrite)

    def take_back(self) -> None:
        """Remove the last turn and its answer from the conversation. Raises InvalidInput if it has no turn."""
        if len(self._messages) < 2 or self._messages[-1]["role"] != "assistant":
            raise InvalidInput("there is no turn to take back")
        del self._messages[-2:]

    def _keep(self, ids: Sequence[int]) -> int:
        """Cut the cache to what the tokens begin with; how many stay. At least one token is left to read."""
        cache, held = self._cache, self._held
        same = next((n for n, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        same = min(same, len(ids) - 1)
        if cache.invalid:
            self._cache, self._held = self.session.new_cache(), []
            return 0
        goes_on = continues(self.session.facts)
        if same < cache.columns or not goes_on:
            if same and goes_on and cache.can_drop(cache.columns - same):
                cache.drop_columns(cache.columns - same)
            else:
                cache.empty()
        return self._cache.columns

    def _tokens(self, messages: Sequence[Message]) -> list[int]:
        """The conversation in the template, up to the beginning of the answer. A control token that the text of a
        message spells out is read as text."""
        if self.document:
            first = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
            messages = [
                {**m, "content": f"{self.document}\n\n{m['content']}"} if n == first else m
                for n, m in enumerate(messages)
            ]
        written = in_template(self.tokenizer, messages)
        keys = [secrets.token_hex(16) for _ in messages]
        pattern = in_template(self.tokenizer, [{**m, "content": key} for m, key in zip(messages, keys, strict=True)])
        parts, rest, filled = list[Part](), pattern, list[str]()
        for message, key in zip(messages, keys, strict=True):
            before, found, rest = rest.partition(key)
            if not found:  # left out of the template, or moved: the parts cannot be told
                return self._plain(messages, written)
            content = message["content"]
            if not written.startswith("".join(filled) + before + content):
                content = content.strip()
            filled += [before, content]
            parts += [Part(before, False), Part(content, True)]
        if "".join(filled) + rest != written:
            return self._plain(messages, written)
        return encode_parts(self.tokenizer, [*parts, Part(rest, False)], special=False)

    def _plain(self, messages: Sequence[Message], written: str) -> list[int]:
        """A template that changes what was said (leaves out thoughts). Raises InvalidInput where that is not safe."""
        names = [name for m in messages for name in ControlTokens(self.tokenizer).spelled(m["content"])]
        if names:
            listed = ", ".join(repr(name) for name in dict.fromkeys(names))
            raise InvalidInput(
                f"a turn spells out control tokens ({listed}), and the chat template changes turns, so that they "
                f"cannot be told from the template's own; remove them"
            )
        return encode_parts(self.tokenizer, [Part(written, False)], special=False)


def _tokens_of(cache: LongreachCache, session: Session) -> list[int]:
    """The tokens of a loaded cache of one sequence. Raises InvalidInput for another one."""
    tokens = cache.saved_tokens
    fits = cache.owner is session and cache.batch == 1 and not cache.padded
    if not fits or tokens is None or tokens.shape[1] != cache.columns:
        raise InvalidInput(
            "cache: expected one that this session's load_cache has just returned, of one sequence and saved with its "
            "tokens (cache.save(path, tokens=...), chat.save(path))"
        )
    found: list[int] = tokens[0].tolist()
    return found
