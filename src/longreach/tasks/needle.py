"""Needles in a haystack, as text: facts to hide in filler, questions about them, their answers.

The evaluation's wording is that of RULER's single-needle task (Hsieh et al., 2024, arXiv:2404.06654). Training
sees it among many others, with many needles and questions per text, so that a small model learns to look up
rather than to recite one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from longreach.tasks.words import ADJECTIVES, NOUNS, evaluation_words, half

NEEDLE = "One of the special magic {attribute}s for {key} is: {value}."
INTRO = (
    "Some special magic {attribute}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {attribute}s afterwards."
)
ASKED = "What is the special magic {attribute} for {key} mentioned in the provided text?"
BEGUN = "The special magic {attribute} for {key} mentioned in the provided text is"
QUESTION = f"{ASKED} {BEGUN}"

NEEDLES = (
    "The {attribute} of the {key} is {value}.",
    "The {attribute} for {key} is {value}.",
    "The {attribute} for the {key} is {value}.",
    "For {key}, the {attribute} is {value}.",
    "Remember that the {attribute} of {key} is {value}.",
    "Note that {key} has the {attribute} {value}.",
    "Somebody wrote down that the {attribute} of the {key} was {value}.",
    "It was agreed that the {attribute} for {key} would be {value}.",
    "{key}: {attribute} {value}.",
    "The {key} was given the {attribute} {value} last year.",
)
QUESTIONS = (
    "Question: What is the {attribute} of the {key}?\nAnswer:",
    "Question: What is the {attribute} for the {key}?\nAnswer:",
    "What is the {attribute} for {key}? The {attribute} for {key} is",
    "What is the {attribute} of the {key}? The {attribute} of the {key} is",
    "Q: {attribute} of {key}?\nA:",
    "Which {attribute} does the {key} have?\nAnswer:",
    "Tell me the {attribute} of the {key}. It is",
    "According to the text, the {attribute} for {key} is",
    "What is the {attribute} of {key}?\nAnswer:",
)
TERSE = (
    ("{key}: {value}.", "{key}:"),
    ("{key} = {value}.", "{key} ="),
    ("{key} -> {value}.", "{key} ->"),
    ("The {attribute} of {key} is {value}.", "The {attribute} of {key} is"),
)
ATTRIBUTES = (
    "access code",
    "password",
    "serial number",
    "phone number",
    "registration number",
    "account number",
    "locker code",
    "ticket number",
    "reference number",
    "PIN",
    "passphrase",
    "invoice number",
    "code",
    "number",
    "badge number",
    "room number",
    "door code",
    "order number",
    "product key",
    "security code",
    "magic number",
    "passcode",
    "identifier",
    "batch number",
    "postal code",
    "file number",
    "budget",
    "population",
    "price",
)


@dataclass(frozen=True)
class Needle:
    """One hidden fact and the question whose answer it holds."""

    key: str
    value: str
    statement: str
    question: str  # ends where the answer, a space and the value, goes on

    @property
    def answer(self) -> str:
        """What the model is to write after the question."""
        return f" {self.value}"


@dataclass(frozen=True)
class Episode:
    """Facts hidden in one text, in order of depth, and those asked about, in order of asking."""

    intro: str
    needles: tuple[Needle, ...]
    asked: tuple[int, ...]  # indices into needles


class KeySource:
    """Fresh keys from one half of the words. Training adds other words, numbers and identifiers."""

    def __init__(self, evaluation: bool, extra_words: list[str] | None = None):
        reserved = evaluation_words()
        self.evaluation = evaluation
        self.adjectives = [w for w in half(ADJECTIVES, evaluation) if (w in reserved) == evaluation]
        self.nouns = [w for w in half(NOUNS, evaluation) if (w in reserved) == evaluation]
        self.extra = [w for w in extra_words or () if w not in reserved]

    def draw(self, random: Random) -> str:
        """One key: an adjective and a noun for evaluation, anything for training."""
        pair = f"{random.choice(self.adjectives)} {random.choice(self.nouns)}"
        kind = 0.0 if self.evaluation else random.random()
        if kind < 0.4:
            return pair
        if kind < 0.5:
            return pair.replace(" ", "-")
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


def digits(random: Random, count: int) -> str:
    """A number of exactly `count` digits."""
    return str(random.randrange(10 ** (count - 1), 10**count))


def identifier(random: Random) -> str:
    """Random hexadecimal groups or random letters."""
    if random.random() < 0.5:
        return "-".join(f"{random.getrandbits(16):04x}" for _ in range(random.choice((2, 3, 4))))
    return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randrange(4, 9)))


def draw_value(random: Random, keys: KeySource) -> str:
    """A value to look up: seven digits for evaluation, mostly so in training."""
    kind = 0.0 if keys.evaluation else random.random()
    if kind < 0.65:
        return digits(random, 7)
    if kind < 0.8:
        return digits(random, random.randrange(2, 11))
    if kind < 0.9:
        return random.choice(keys.nouns + keys.extra)
    return identifier(random)


def draw_keys(random: Random, source: KeySource, count: int) -> list[str]:
    """Distinct keys, none contained in another; about a third are one word away from an earlier one."""
    keys: list[str] = []
    while len(keys) < count:
        near = keys and random.random() < 0.35
        key = source.relative(random, random.choice(keys)) if near else source.draw(random)
        if not any(key in other or other in key for other in keys):
            keys.append(key)
    return keys


def evaluation_episode(random: Random, source: KeySource) -> Episode:
    """A single needle in the evaluation's wording: fresh key, seven digits."""
    key, value = source.draw(random), digits(random, 7)
    fill = {"attribute": "number", "key": key, "value": value}
    needle = Needle(key, value, NEEDLE.format(**fill), QUESTION.format(**fill))
    return Episode(INTRO.format(**fill), (needle,), (0,))


def training_episode(random: Random, source: KeySource, count: int) -> Episode:
    """`count` needles in one of many wordings, all asked about, in random order.

    No value occurs twice, no key within another, so each question has one answer.
    """
    keys = draw_keys(random, source, count)
    values: list[str] = []
    while len(values) < count:
        value = draw_value(random, source)
        if value not in values and not any(value in key for key in keys):
            values.append(value)
    style = random.random()
    attribute = random.choice(ATTRIBUTES)
    intro = ""
    terse = random.choice(TERSE)
    statement_form, question_form = random.choice(NEEDLES), random.choice(QUESTIONS)
    if style < 0.35:
        attribute = random.choice(("number", "number", "number", "word", "code"))
        statement_form, question_form = NEEDLE, QUESTION
        if random.random() < 0.6:
            intro = INTRO.format(attribute=attribute)
    elif style < 0.6:
        statement_form, question_form = terse
    needles = []
    for key, value in zip(keys, values, strict=True):
        if style >= 0.8:  # every fact worded in its own way
            attribute = random.choice(ATTRIBUTES)
            statement_form, question_form = random.choice(NEEDLES), random.choice(QUESTIONS)
        fill = {"attribute": attribute, "key": key, "value": value}
        needles.append(
            Needle(key, value, upper_first(statement_form.format(**fill), statement_form), question_form.format(**fill))
        )
    asked = list(range(count))
    random.shuffle(asked)
    return Episode(intro, tuple(needles), tuple(asked))


def upper_first(sentence: str, form: str) -> str:
    """The sentence as it is: keys and values keep their case, so that they can be matched letter by letter."""
    return sentence if form.startswith("{") else sentence[0].upper() + sentence[1:]
