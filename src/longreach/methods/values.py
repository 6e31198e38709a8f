"""Option values as users write them."""

from __future__ import annotations

import json
from typing import Any

from longreach.errors import InvalidInput

WORDS = {"True": True, "False": False, "None": None}  # Python's spelling of JSON's constants


def value_of(text: str, where: str) -> Any:
    """JSON (numbers, true, false, null, "text", [1, 2]), Python's True, False and None, or a plain word.

    where: named by InvalidInput, for text that begins like JSON and is not.
    """
    if text in WORDS:
        return WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        if text[0] in "[{\"'":
            raise InvalidInput(f"{where}: {text} is no JSON value; write lists as [0, 1] and text plainly") from None
        return text
