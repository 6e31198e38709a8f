"""Options that a call does not know, and what to write instead."""

from __future__ import annotations

from typing import Any

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.registry import options_of

ATTACHING = ("fuse", "prefill", "decode", "evict", "cache", "impl", "loop")  # options of `attach`


def refuse_options(of: str, unknown: dict[str, Any], slots: dict[str, Any], more: tuple[str, ...] = ()) -> None:
    """Raise for the first unknown option of a call, InvalidInput if it is one of a method in the slots, which says how
    to write it, else UnknownName. more: names that the call knows besides those of attach."""
    for option, value in unknown.items():
        for slot, text in slots.items():
            if isinstance(text, str) and option in options_of(text):
                raise InvalidInput(f'options of a method stand in its text: write {slot}="{text} {option}={value}"')
        raise UnknownName(f"option of {of}", option, (*more, *ATTACHING))
