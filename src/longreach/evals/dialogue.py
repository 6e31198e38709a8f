"""A long generation with known answers: questions for needles in a text, one after another while decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.adapters.transformers import (
    Advance,
    Answer,
    Reader,
    Session,
    attach,
    check_length,
    encode,
    planned_shape,
)
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.mac_study.drift import Likeliest
from longreach.evals.methods import NAMED, Spec, by_prefill, refuse_slots
from longreach.evals.progress import Progress, counted, unseen
from longreach.evals.prompting import Counter
from longreach.evals.read_shares import phase_bytes
from longreach.tasks import haystack
from longreach.tasks.needle import ASKED, BEGUN, INTRO_ALL, NEEDLE
from longreach.tasks.ruler.niah import distinct

Keep = Callable[[str, Any], None]
NOTED = ("searched", "acceptance", "reuse", "skipped", "gap")  # notes of methods on a layer, head by head


class Script(NamedTuple):
    """prompt: tokens read, needles among them. fed: tokens decoded after it, questions and answers. answers: [start,
    stop) of each needle's value in `fed`."""

    prompt: tuple[int, ...]
    fed: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def script(tokenizer: Any, length: int, questions: int, random: Random, count: Counter) -> Script:
    """A text of at most `length` tokens in which `questions` needles are hidden, and as many questions in another
    order, each with its right answer. Raises InvalidInput if they do not fit."""
    keys, values = distinct(random, "word", questions), distinct(random, "number", questions)
    needles = list(zip(keys, values, strict=True))
    facts = [(random.random(), NEEDLE.format(attribute="number", key=key, value=value)) for key, value in needles]
    begin = len(encode(tokenizer, ""))
    intro = INTRO_ALL.format(attribute="number")
    text = haystack.document(random, facts, length - begin, count, intro, what="a dialogue")
    fed, answers = list[int](), list[tuple[int, int]]()
    for key, value in random.sample(needles, questions):
        fill = {"attribute": "number", "key": key}
        fed += encode(tokenizer, f"\n\n{ASKED.format(**fill)} {BEGUN.format(**fill)}", special=False)
        answer = encode(tokenizer, f" {value}", special=False)
        answers.append((len(fed), len(fed) + len(answer)))
        fed += answer
    return Script(tuple(encode(tokenizer, text)), tuple(fed), tuple(answers))


@dataclass
class TokenScores:
    """Scores of each token of the script [n] by a method: its nll, and whether it was the likeliest. Against dense
    attention: the divergence of the distributions, and whether the likeliest token is the same.

    The latter two are NaN from the first token that differs from dense attention's, if answers are the method's own.
    """

    nll: list[Tensor]
    right: list[Tensor]
    kl: list[Tensor]
    agree: list[Tensor]

    def to_json(self, answers: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """right: of each answer, whether every token of it was the likeliest. Means are over decode steps: all tokens
        but the first, which the prompt alone expected."""
        right = torch.stack(self.right).tolist()
        means = {
            name: float(torch.stack(getattr(self, name))[1:].double().nanmean()) for name in ("nll", "kl", "agree")
        }
        tokens = torch.stack(self.nll).double()
        return {
            "right": [all(right[a:b]) for a, b in answers],
            **means,
            "nll_answers": float(torch.cat([tokens[a:b] for a, b in answers]).mean()),
            "kl_by_question": [_number(torch.stack(self.kl[a:b]).nanmean()) for a, b in _turns(answers)],
        }


def _number(x: Tensor) -> float | None:
    return None if torch.isnan(x) else float(x)


def _turns(answers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """[start, stop) of each question with its answer."""
    ends = [0, *(stop for _, stop in answers)]
    return list(pairwise(ends))


def _forget(key: str, part: Any) -> None:
    """Keeps nothing."""


class Dialogue:
    """`samples` texts of `length` tokens, each with `questions` needles and a question for each, one after another.

    Questions and right answers are fed token by token, so that all methods go on from the same words; an answer is
    right where each of its tokens was the likeliest one, which is when greedy decoding gives it. So a wrong answer does
    not spoil those after it, but what a method keeps of its own steps does. own: answers are the tokens that were
    likeliest instead, as many as the right one has, and the dialogue goes on from them.
    specs: methods, dense first. Raises InvalidInput where prompt and dialogue exceed the model's context, or needles
    their text.
    """

    def __init__(
        self, model: Any, tokenizer: Any, specs: Sequence[Spec], *, length: int = 4096, questions: int = 50,
        samples: int = 1, seed: int = 0, own: bool = False, graph: bool | None = None,
    ):  # fmt: skip
        for name, value in (("questions", questions), ("samples", samples)):
            if value < 1:
                raise InvalidInput(f"{name}: expected at least 1, got {value}")
        refuse_slots(specs, NAMED, "a dialogue needs all its keys for later questions")
        for spec in specs:
            for method in (spec.prefill, spec.decode):
                method.check(planned_shape(model))
        self.model, self.specs, self.own, self.graph = model, specs, own, graph
        count = Counter(tokenizer)
        self.scripts = [
            script(tokenizer, length, questions, Random(f"{seed}/dialogue/{n}"), count) for n in range(samples)
        ]
        for one in self.scripts:
            check_length(model, len(one.prompt), len(one.fed))

    def run(
        self, chunk: int, progress: Progress = unseen, *, done: Mapping[str, Any] | None = None, keep: Keep = _forget
    ) -> dict[str, list[dict[str, Any]]]:
        """Of each method, by its label, what each sample gave (`Heard.to_json`), bytes read while decoding
        (`phase_bytes`), seconds_per_token, and what the method noted, {name: [layers]}, means over heads.

        done: samples that an interrupted run measured, by name; `keep` is called with each new one.
        """
        parts = []
        for number, one in enumerate(self.scripts):
            name = f"dialogue {number}"
            part = (done or {}).get(name)
            if part is None:
                part = self._sample(one, chunk, progress, f"{number + 1} of {counted(len(self.scripts), 'dialogue')}")
                keep(name, part)
            parts.append(part)
        return {spec.label: [part[spec.label] for part in parts] for spec in self.specs}

    def _sample(self, one: Script, chunk: int, progress: Progress, which: str) -> dict[str, Any]:
        found, reference = dict[str, Any](), _Reference([], [])
        room = CacheConfig(capacity=len(one.prompt) + len(one.fed) + 1)
        for prefill, specs in by_prefill(self.specs):
            with attach(self.model, prefill=prefill, cache=room) as session, torch.inference_mode():
                session.prepare(*(spec.decode for spec in specs))
                reader = Reader(session, chunk, graph=self.graph)
                with progress(f"{which}, {prefill.name} prefill", len(one.prompt)) as advance:
                    first = reader.read(one.prompt, advance, then=len(one.fed))
                for spec in specs:
                    session.switch(spec.decode)
                    with reader.rollback(spec.decode), progress(f"{which}, {spec.label}", len(one.fed)) as advance:
                        heard, seconds = _fed(reader, first, one, reference, advance, own=self.own)
                    found[spec.label] = {
                        **heard.to_json(one.answers), "bytes": phase_bytes(session.report(), "decode"),
                        "seconds_per_token": seconds, "noted": noted(session),
                    }  # fmt: skip
        return found


class _Reference(NamedTuple):
    """Dense attention's distributions and input tokens."""

    found: list[Likeliest]
    fed: list[Tensor]


def _fed(
    reader: Reader, first: Tensor, one: Script, reference: _Reference, advance: Advance, *, own: bool
) -> tuple[TokenScores, float | None]:
    """Decode a script. reference: made by the first call."""
    fed = one.fed
    heard, leading, answer = TokenScores([], [], [], []), not reference.found, Answer()
    tokens = torch.tensor(fed, device=first.device)
    mine = {at for a, b in one.answers for at in range(a, b)} if own else set()
    same = torch.ones((), dtype=torch.bool, device=first.device)  # as dense attention has been fed

    def choose(logits: Tensor) -> Tensor:
        nonlocal same
        at = len(heard.nll)
        if at >= len(fed):  # it may be asked past the end
            return tokens[-1:]
        row, token = logits[0], tokens[at]
        likeliest = row.argmax()
        given = likeliest if at in mine else token
        if leading:
            reference.found.append(Likeliest.of(row))
            reference.fed.append(given)
        heard.nll.append(-row.double().log_softmax(0)[token])
        heard.right.append(likeliest == token)
        heard.kl.append(torch.where(same, reference.found[at].divergence(row), torch.nan))
        heard.agree.append(torch.where(same, (likeliest == reference.found[at].tokens[0]).double(), torch.nan))
        same = same & (given == reference.fed[at])
        return given[None]

    with closing(reader.decode(first, len(fed), answer, choose=choose)) as chosen:
        for _ in chosen:
            advance(1)
    return heard, answer.seconds_per_token


def noted(session: Session) -> dict[str, list[float | None]]:
    """The method's notes on its layers while decoding, {name: [layers]}, means over heads."""
    layers = [x for x in session.report().layers if x.phase == "decode"]
    found = {}
    for name in NOTED:
        values = [_mean((x.notes or {}).get(name)) for x in layers]
        if any(v is not None for v in values):
            found[name] = values
    return found


def _mean(heads: Sequence[float | None] | None) -> float | None:
    known = [x for x in heads or () if x is not None]
    return sum(known) / len(known) if known else None
