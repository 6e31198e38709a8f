"""How training states facts and asks about them: RULER's words among many others, keys before values and after."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from longreach.tasks.needle import ASKED, BEGUN, NEEDLE
from longreach.tasks.ruler.niah import ASKED_ALL, BEGUN_ALL

STATEMENTS = (
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
    "{value} is the {attribute} of {key}.",
    "The {attribute} {value} belongs to {key}.",
    "They chose {value} as the {attribute} for the {key}.",
)
QUESTIONS = (  # about one value, about several
    ("Question: What is the {attribute} of the {key}?\nAnswer:", "Question: What {attribute}s have {key}?\nAnswer:"),
    (
        "Question: What is the {attribute} for the {key}?\nAnswer:",
        "Question: Name the {attribute}s for {key}.\nAnswer:",
    ),
    ("What is the {attribute} for {key}? The {attribute} for {key} is", "The {attribute}s for {key} are"),
    ("What is the {attribute} of the {key}? The {attribute} of the {key} is", "The {attribute}s of {key} are"),
    ("Q: {attribute} of {key}?\nA:", "Q: {attribute}s of {key}?\nA:"),
    ("Which {attribute} does the {key} have?\nAnswer:", "Which {attribute}s do {key} have?\nAnswer:"),
    ("Tell me the {attribute} of the {key}. It is", "Tell me the {attribute}s of {key}. They are"),
    ("According to the text, the {attribute} for {key} is", "According to the text, the {attribute}s for {key} are"),
    ("What is the {attribute} of {key}?\nAnswer:", "What are the {attribute}s of {key}?\nAnswer:"),
)
TERSE = (
    ("{key}: {value}.", "{key}:"),
    ("{key} = {value}.", "{key} ="),
    ("{key} -> {value}.", "{key} ->"),
    ("The {attribute} of {key} is {value}.", "The {attribute} of {key} is"),
    ("{value} ({key}).", "({key}):"),
)
ATTRIBUTES = tuple(
    """access code, password, serial number, phone number, registration number, account number, locker code,
    ticket number, reference number, PIN, passphrase, invoice number, code, number, badge number, room number,
    door code, order number, product key, security code, magic number, passcode, identifier, batch number,
    postal code, file number, budget, population, price""".replace("\n", " ").split(",")
)  # fmt: skip
ATTRIBUTES = tuple(" ".join(attribute.split()) for attribute in ATTRIBUTES)


@dataclass(frozen=True)
class Wording:
    """Forms over {attribute}, {key} and {value}; `several` asks about more than one value, of one key or of more."""

    attribute: str
    statement: str
    one: str
    several: str

    def state(self, key: str, value: str) -> str:
        """The fact as a sentence. Keys and values keep their case, so that they can be matched letter by letter."""
        return self.statement.format(attribute=self.attribute, key=key, value=value)

    def ask(self, key: str, several: bool) -> str:
        """The question about a key, or about keys as `enumeration` joins them."""
        return (self.several if several else self.one).format(attribute=self.attribute, key=key)


def ruler(attribute: str) -> Wording:
    """RULER's words (Hsieh et al., 2024, arXiv:2404.06654), as the evaluation has them."""
    return Wording(attribute, NEEDLE, f"{ASKED} {BEGUN}", f"{ASKED_ALL} {BEGUN_ALL}")


def terse(random: Random) -> Wording:
    """A fact and a question with next to no words around key and value."""
    statement, question = random.choice(TERSE)
    return Wording(random.choice(ATTRIBUTES), statement, question, question)


def plain(random: Random) -> Wording:
    """A sentence and a question of one's own."""
    one, several = random.choice(QUESTIONS)
    return Wording(random.choice(ATTRIBUTES), random.choice(STATEMENTS), one, several)
