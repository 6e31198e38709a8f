"""The tasks of training in text form: each makes something to read and questions about it, of any length.

Wordings are the evaluation's and others; words of keys and real text are not the evaluation's. What is drawn letter by
letter (numbers, codes, names of variables, people and towns) comes from other seeds. Lists to count in are of common
English words, as the evaluation's are, and share many with them: which of them come often is drawn each time.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from longreach.train.mini.forms.counting import common, frequent
from longreach.train.mini.forms.needles import alike, essay, noise
from longreach.train.mini.forms.plan import plan
from longreach.train.mini.forms.questions import questions
from longreach.train.mini.forms.tracing import tracing
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import Page

Form = Callable[[Random, int, Materials], Page]  # (random, tokens of context and exchanges, materials)

FORMS: dict[str, tuple[Form, float]] = {  # and its share of the sequences that are no plain text
    "essay": (essay, 0.28),
    "noise": (noise, 0.07),
    "alike": (alike, 0.24),
    "tracing": (tracing, 0.12),
    "common": (common, 0.13),
    "frequent": (frequent, 0.07),
    "questions": (questions, 0.06),
    "plan": (plan, 0.03),
}
