"""Keys and values of training facts: the words that evaluation leaves to training, other words, numbers, names."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from longreach.tasks.needle import digits
from longreach.tasks.words import ADJECTIVES, NOUNS, evaluation_words, half


class KeySource:
    """Fresh keys from the training halves of the words, from other words, numbers and identifiers."""

    def __init__(self, extra_words: Sequence[str] = ()):
        reserved = evaluation_words()
        self.adjectives = [w for w in half(ADJECTIVES, False) if w not in reserved]
        self.nouns = [w for w in half(NOUNS, False) if w not in reserved]
        self.extra = [w for w in extra_words if w not in reserved]

    def pair(self, random: Random) -> str:
        """An adjective and a noun."""
        return f"{random.choice(self.adjectives)} {random.choice(self.nouns)}"

    def draw(self, random: Random) -> str:
        """One key of any kind."""
        kind = random.random()
        if kind < 0.4:
            return self.pair(random)
        if kind < 0.5:
            return self.pair(random).replace(" ", "-")
        if kind < 0.75 and self.extra:
            return " ".join(random.choice(self.extra) for _ in range(random.choice((1, 2, 2, 3))))
        if kind < 0.83:
            return " ".join((random.choice(self.nouns), str(random.randrange(1, 1000))))
        if kind < 0.88:
            return random.choice(self.nouns).capitalize() + " " + random.choice(self.nouns).capitalize()
        if kind < 0.94:
            return digits(random, random.randrange(3, 8))
        return identifier(random)

    def relative(self, random: Random, key: str) -> str:
        """A key that shares all but one word with the given one, or a fresh one where it has a single word."""
        words = key.split(" ")
        if len(words) < 2:
            return self.draw(random)
        place = random.randrange(len(words))
        words[place] = random.choice(self.nouns if place else self.adjectives)
        return " ".join(words)

    def distinct(self, random: Random, count: int) -> list[str]:
        """Keys, none contained in another; about a third are one word away from an earlier one."""
        keys: list[str] = []
        while len(keys) < count:
            near = keys and random.random() < 0.35
            key = self.relative(random, random.choice(keys)) if near else self.draw(random)
            if not any(key in other or other in key for other in keys):
                keys.append(key)
        return keys

    def value(self, random: Random) -> str:
        """A value to look up: mostly seven digits."""
        kind = random.random()
        if kind < 0.65:
            return digits(random, 7)
        if kind < 0.8:
            return digits(random, random.randrange(2, 11))
        if kind < 0.9:
            return random.choice(self.nouns + self.extra)
        return identifier(random)


def identifier(random: Random) -> str:
    """Random hexadecimal groups or random letters."""
    if random.random() < 0.5:
        return "-".join(f"{random.getrandbits(16):04x}" for _ in range(random.choice((2, 3, 4))))
    return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randrange(4, 9)))
