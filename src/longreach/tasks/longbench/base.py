"""Tasks whose texts are given: a long one loses its middle where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from longreach.errors import InvalidInput
from longreach.tasks.base import Count, Sample

Cut = Callable[[str, int], str]  # (text, keep) -> its first and last keep/2 tokens
Metric = Callable[[str, Sequence[str]], float]  # (answer, expected texts) -> [0, 1]
TRIES = 8


@dataclass(frozen=True)
class Fixed:
    """A data set as a Task.

    fixed: its samples, in the order of the file. metric: how right an answer is, given what is expected.
    chat: whether a chat model is asked in its template. Few-shot and code sets are gone on with as plain text.
    by: facts of samples by which the official results are split.
    """

    name: str
    source: str
    max_new_tokens: int
    fixed: tuple[Sample, ...]
    metric: Metric
    chat: bool = True
    by: tuple[str, ...] = ()

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        """One of the samples, its context cut by characters where it is too long. Raises InvalidInput."""

        def cut(text: str, keep: int) -> str:
            return middle_out(text, len(text) * keep // max(1, count(text)))

        return self.fit(random.choice(self.fixed), room, count, cut)

    def fit(self, sample: Sample, room: int, count: Count, cut: Cut) -> Sample:
        """The sample in at most `room` tokens: what lies in the middle of its context goes, as in the official code.

        facts: "kept", the share of the context's tokens that is left. Raises InvalidInput where nothing would be.
        """
        tokens, over = count(sample.context), count(_written(sample)) - room
        keep = tokens
        if over <= 0:
            return _kept(sample, 1.0)
        for _ in range(TRIES):
            keep -= over
            if keep < 2:
                break
            shorter = replace(sample, context=cut(sample.context, keep))
            over = count(_written(shorter)) - room
            if over <= 0:
                return _kept(shorter, round(keep / tokens, 4))
        raise InvalidInput(
            f"{self.name}, sample {sample.facts.get('id')}: {room} tokens of prompt leave no room for its context "
            f"and the question; raise --length"
        )

    def score(self, answer: str, sample: Sample) -> float:
        return self.metric(answer, sample.answers)


def middle_out(text: str, keep: int) -> str:
    """The first and last keep/2 characters of a text."""
    return text if keep >= len(text) else text[: keep // 2] + text[len(text) - keep // 2 :]


def _written(sample: Sample) -> str:
    return " ".join(p for p in ("\n\n".join(p for p in (sample.context, sample.question) if p), sample.begun) if p)


def _kept(sample: Sample, share: float) -> Sample:
    return replace(sample, facts={**sample.facts, "kept": share})
