"""How large a text may be: the most words, needles or documents with which a prompt still fits."""

from __future__ import annotations

from collections.abc import Callable

from longreach.errors import InvalidInput

FULL = 0.9
CLOSE = 0.01  # of the room: nearer than that, one more try costs more than it gains


def too_short(what: str, least: int, room: int) -> InvalidInput:
    """The error of a task that takes `least` tokens of prompt where there are `room`."""
    return InvalidInput(
        f"{what} takes at least {least} tokens of prompt and {max(0, room)} are there; ask for a longer --length"
    )


def largest(
    tokens_of: Callable[[int], int], room: int, what: str, least: int = 1, most: int = 1 << 30, beside: int = 0
) -> int:
    """The largest size in [least, most] whose text takes at most `room` tokens, or one within CLOSE of it.

    tokens_of: tokens of the text of a size, growing with it (nearly linearly, or more tries are needed).
    beside: tokens that were taken from the room before, for messages to name the whole.
    Raises InvalidInput, naming `what`, where the least does not fit, or the most leaves over a tenth empty.
    """
    low, low_tokens = least, tokens_of(least)
    if low_tokens > room:
        raise too_short(what, low_tokens + beside, room + beside)
    high, high_tokens = low, low_tokens
    while high_tokens <= room:  # until it no longer fits
        low, low_tokens = high, high_tokens
        if low == most:
            if low_tokens < FULL * room:
                filled = f"{low_tokens + beside} of {room + beside} tokens of prompt"
                raise InvalidInput(f"{what} fills at most {filled}; ask for a shorter --length")
            return low
        slope = max(high_tokens / max(high, 1), 1e-3)
        high = min(most, max(high + 1, min(8 * high, round(1.02 * room / slope))))
        high_tokens = tokens_of(high)
    while high - low > 1 and room - low_tokens > CLOSE * room:
        guess = low + round((room - low_tokens) / max(high_tokens - low_tokens, 1) * (high - low))
        size = min(max(guess, low + 1), high - 1)
        tokens = tokens_of(size)
        if tokens <= room:
            low, low_tokens = size, tokens
        else:
            high, high_tokens = size, tokens
    return low
