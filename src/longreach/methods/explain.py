"""What a method's options mean, from its docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any

from longreach.methods.base import Configured

OPTION = re.compile(r"(\w+(?:, \w+)*): (.*)")


def summary(kind: type[Configured]) -> str:
    """The first line of a method's docstring."""
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def explained(kind: type[Configured]) -> dict[str, str]:
    """Option -> what its docstring says of it, for the options that it explains.

    An explanation is a line "option: text" or "option, other: text", with the lines after it up to the next
    explanation or an empty line.
    """
    known, found = kind.options(), dict[str, str]()
    names, words = list[str](), list[str]()

    def close() -> None:
        found.update({name: " ".join(words) for name in names})
        names.clear()
        words.clear()

    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        match = OPTION.fullmatch(line)
        if match and all(name in known for name in match[1].split(", ")):
            close()
            names += match[1].split(", ")
            words.append(match[2])
        elif not line.strip():
            close()
        elif names:
            words.append(line.strip())
    close()
    return {name: found[name] for name in known if name in found}


def options_of(kind: type[Configured]) -> list[dict[str, Any]]:
    """Name, default and meaning of each option; the meaning is "" for one that the docstring does not explain."""
    meant = explained(kind)
    return [{"name": k, "default": v, "meaning": meant.get(k, "")} for k, v in kind.options().items()]
