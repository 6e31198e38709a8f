"""longreach's part of an engine's additional config: `{"longreach": {"decode": "quest"}}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.registry import choose

KEY = "longreach"
EXAMPLE = '{"longreach": {"decode": "quest"}}'
# methods that work on vLLM's pages; the others need queries of the whole prompt, host memory or a converted model
METHODS = ("dense", "streaming_llm", "kascade", "omnikv", "less_is_more", "quest", "loki", "mac")


@dataclass(frozen=True)
class Settings:
    """decode: the method of new tokens."""

    decode: AttentionMethod

    @classmethod
    def of(cls, config: Any) -> Settings | None:
        """The settings of a VllmConfig; None if it has no key KEY.

        Raises InvalidInput, UnknownName or Unsupported for a key, method or option that does not fit.
        """
        given = config.additional_config
        if not isinstance(given, dict) or KEY not in given:
            return None
        return cls.read(given[KEY])

    @classmethod
    def read(cls, given: object) -> Settings:
        """The settings of the value of KEY."""
        if not isinstance(given, dict):
            raise InvalidInput(f"additional config: {KEY}: expected an object such as {EXAMPLE}, got {given!r}")
        for key in given:
            if key != "decode":
                raise UnknownName(f"key of the additional config's {KEY}", key, ("decode",))
        text = given.get("decode")
        if not isinstance(text, str):
            raise InvalidInput(
                f"additional config: {KEY}: expected the text of a method, as in {EXAMPLE}, got {given!r}"
            )
        method = choose("decode", text)
        if method.name not in METHODS:
            raise Unsupported(
                f"decode={method.name}: it does not run in vLLM; use one of {', '.join(METHODS)}, or use {method.name} "
                f"with longreach.generate"
            )
        return cls(method)
