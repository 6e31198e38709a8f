"""A baseline's best settings: every candidate that runs and is right is timed briefly, the fastest compete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from longreach.bench.baselines import baseline, candidates
from longreach.bench.check import WrongResult, require_right
from longreach.bench.competitor import Competitor
from longreach.bench.inputs import Inputs
from longreach.bench.timing import measure
from longreach.errors import LongreachError


class BaselineFailed(LongreachError):
    """A baseline that a case needs has no setting that works."""


@dataclass(frozen=True)
class Candidate:
    """A candidate: its settings and its time in us, or why it does not count."""

    settings: dict[str, Any]
    microseconds: float | None
    refused: str | None = None


def best(name: str, inputs: Inputs, say: Callable[[str], None]) -> tuple[list[Competitor], list[Candidate]]:
    """The fastest competitor of a baseline for each of its page sizes (in prefill: kernels), and all that was tried.

    Empty where the baseline has nothing to offer for the case. Raises BaselineFailed where all candidates fail.
    """
    tried: list[Candidate] = []
    right: list[tuple[float, Competitor]] = []
    offered = candidates(name, inputs)
    if inputs.case.rivals is not None:
        wanted = inputs.case.rivals.get(name, ())
        offered = [(settings, build) for settings, build in offered if json.loads(json.dumps(settings)) in wanted]
    if offered:
        say(f"  {name}: trying {len(offered)} settings")
    for settings, build in offered:
        try:
            competitor = replace(build(), name=f"{baseline(name).TITLE} {label(settings)}")
            with torch.no_grad():
                out = competitor.output(competitor.calls[0]())
            require_right(competitor.name, inputs, competitor.memory, competitor.rows, out)
            replays = 2 if inputs.case.prefill else 5
            timing = measure({"it": competitor.calls}, inputs.device, replays=replays, warm_up=1, launches=False)["it"]
            took = timing.median * 1e6
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError, WrongResult) as error:
            tried.append(Candidate(settings, None, " ".join(str(error).split())[:300]))
            continue
        tried.append(Candidate(settings, took))
        right.append((took, competitor))
    if offered and not right:
        reasons = "; ".join(sorted({t.refused or "" for t in tried}))
        raise BaselineFailed(
            f"baseline {name}: none of its {len(tried)} settings works ({reasons}); --without {name} leaves it out"
        )
    chosen: dict[Any, Competitor] = {}
    for _, competitor in sorted(right, key=lambda x: x[0]):
        kind = competitor.settings.get("backend") if inputs.case.prefill else competitor.memory.page
        chosen.setdefault(kind, competitor)
    if offered:
        say(f"  {name}: {len(right)} of {len(tried)} settings work, best {label(next(iter(chosen.values())).settings)}")
    return list(chosen.values()), tried


class Sweeps:
    """The sweeps of a run: settings are tried once for each shape, and its later cases use the best of them."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[dict[str, Any]], list[Candidate]]] = {}

    def fastest(
        self, name: str, inputs: Inputs, say: Callable[[str], None]
    ) -> tuple[list[Competitor], list[Candidate]]:
        """As `best`, but the fastest competitor alone."""
        only = json.dumps(inputs.case.rivals)
        place = name, inputs.shape, inputs.case.reads, inputs.case.prefill, inputs.device, only
        if place not in self._known:
            found, tried = best(name, inputs, say)
            self._known[place] = [c.settings for c in found[:1]], tried
            return found[:1], tried
        chosen, tried = self._known[place]
        builds = [(settings, build) for settings, build in candidates(name, inputs) if settings in chosen]
        return [replace(build(), name=f"{baseline(name).TITLE} {label(settings)}") for settings, build in builds], tried


def label(settings: dict[str, Any]) -> str:
    """Settings in a few words."""
    words = []
    for key, value in settings.items():
        if key == "page":
            words.append("contiguous" if value is None else f"page {value}")
        elif isinstance(value, bool):
            words.append(key if value else f"no {key}")
        elif isinstance(value, str):
            words.append(value)
        else:
            words.append(f"{key} {value}" if value else f"own {key}")
    return ", ".join(words)
