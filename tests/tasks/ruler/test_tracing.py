"""Variable tracking: a chain in order, a worked example that gives nothing away."""

from __future__ import annotations

import re
from random import Random

import pytest
from tests.tasks.counts import made

from longreach.tasks.ruler.tracing import Tracing


@pytest.mark.parametrize("hops", [1, 4, 7])
def test_a_chain_is_hidden_in_order_and_leads_to_every_name(hops: int) -> None:
    sample = made(Tracing(hops=hops))
    example, own = sample.context.split("Memorize and track")[1:]
    value = re.search(r"value (\d{5})", sample.question)[1]  # type: ignore[index]
    held: dict[str, str] = {}
    for name, of in re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", own):
        held[name] = held.get(of, of)
    assert set(held) == set(sample.answers) and set(held.values()) == {value} and len(held) == hops + 1
    assert value not in example and all(name not in example for name in sample.answers)
    assert all(name in example.split("they are:")[1] for name in re.findall(r"VAR (\w{3}) =", example))
    assert f"{hops + 1} variables" in sample.begun and own.count("The grass is green") > 50


def test_the_example_never_has_the_value_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(Random):
        def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
            return 10000 + int(2 * self.random()) if start == 10000 else super().randrange(start, stop, step)

    monkeypatch.setattr("longreach.tasks.ruler.tracing.Random", Few)
    asked = set()
    for seed in range(8):
        sample = Tracing().sample(Few(seed), 800, lambda text: len(text.split()))
        shown, own = re.findall(r"assigned the value (\d+) in", sample.context + sample.question)
        assert shown != own
        asked.add(own)
    assert asked == {"10000", "10001"}


def test_partial_credit() -> None:
    sample = made(Tracing())
    assert Tracing().score(" ".join(sample.answers[:3]).lower(), sample) == 0.6
