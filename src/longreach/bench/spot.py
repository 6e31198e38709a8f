"""Spot checks: is a group's record still right at today's commit? Measured again by one or two small cases on a GPU.

A record is confirmed when each of our entries repeats its speed, within WITHIN, and its launches: as a ratio
to the fastest other kernel of the record where that is measured again too, else as a time. Confirmed in either
direction: an entry that became faster is to be measured again as well.

Records from before launches were kept are carried over: the launches of the spot run are stored with the spot case's
entries, and the other cases of the group count by them (`carried_over`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from longreach.bench.case import Case
from longreach.records.launches import Launched

WITHIN = 0.03


@dataclass(frozen=True)
class Compared:
    """One entry of ours, then and now: its speed over `against`, or its time in microseconds if that is None.

    off: share by which it is larger now (as a ratio: faster; as a time: slower).
    """

    then: float
    now: float
    off: float
    against: str | None

    @property
    def confirmed(self) -> bool:
        return abs(self.off) <= WITHIN


@dataclass(frozen=True)
class Spot:
    """A case measured again. faults: differences other than speed: entries that are gone, other launches."""

    case: str
    entries: dict[str, Compared]
    faults: tuple[str, ...]

    @property
    def confirmed(self) -> bool:
        return not self.faults and all(entry.confirmed for entry in self.entries.values())

    def lines(self) -> Iterator[str]:
        """The outcome in words, a line for each entry and fault."""
        for name, entry in self.entries.items():
            what = "us" if entry.against is None else f"x of {entry.against}"
            verdict = "confirmed" if entry.confirmed else f"not within {WITHIN:.0%}"
            then_now = f"{entry.then:.3f} then, {entry.now:.3f} now"
            yield f"{self.case}: {name}: {then_now} {what} ({entry.off:+.1%}): {verdict}"
        yield from (f"{self.case}: {fault}" for fault in self.faults)


def repeated(case: Case, measured: Mapping[str, Any]) -> Case:
    """The case with the baselines' settings that its record holds, so that none is searched for again."""
    rivals: dict[str, list[dict[str, Any]]] = {}
    for entry in _theirs(measured):
        settings = {key: value for key, value in entry["settings"].items() if key not in ("memory", "rows")}
        rivals.setdefault(entry["who"], []).append(settings)
    return replace(case, rivals=rivals)


def compare(case: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Spot:
    """Two measurements of a case, as records hold them."""
    current = {entry["name"]: entry for entry in now["entries"]}
    rivals = [entry for entry in _theirs(then) if entry["name"] in current]
    fastest = min(rivals, key=_median, default=None)
    entries, faults = dict[str, Compared](), list[str]()
    for entry in _ours(then):
        name = entry["name"]
        if name not in current:
            faults.append(f"{name} is no longer measured by this case")
            continue
        before, today = _median(entry), _median(current[name])
        if fastest is not None:
            before, today = _median(fastest) / before, _median(current[fastest["name"]]) / today
        entries[name] = Compared(before, today, today / before - 1, None if fastest is None else fastest["name"])
        if entry.get("launched") is not None:
            if current[name].get("launched") is None:
                faults.append(f"{name}: its launches were not observed this time")
            else:
                found = Launched.from_json(entry["launched"]).differences(Launched.from_json(current[name]["launched"]))
                faults += [f"{name} has other launches: {what}" for what in found]
    return Spot(case, entries, tuple(faults))


def confirmed(
    record: dict[str, Any], spots: Iterable[Spot], now: Mapping[str, Mapping[str, Any]], conditions: Mapping[str, Any]
) -> dict[str, Any]:
    """A group's record with its confirmation, launches of old cases carried over.

    now: spot case -> its new measurement. conditions: where those were made.
    """
    spots, cases = list(spots), {}
    for name, case in record["cases"].items():
        kept = {key: value for key, value in case.items() if key != "kernels"}
        if "kernels" in case:
            kept["carried_over"] = True
            launched = {e["name"]: e.get("launched") for e in now[name]["entries"]} if name in now else {}
            kept["entries"] = [
                {**entry, **({"launched": launched[entry["name"]]} if entry["name"] in launched else {})}
                for entry in case["entries"]
            ]
        cases[name] = kept
    shown = ("commit", "dirty", "versions", "device")
    found = {
        **{name: conditions[name] for name in shown},
        "within": WITHIN,
        "cases": {spot.case: {name: asdict(entry) for name, entry in spot.entries.items()} for spot in spots},
    }
    return {**record, "confirmed": found, "cases": cases}


def _ours(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in measured["entries"] if entry["who"] == "longreach"]


def _theirs(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in measured["entries"] if entry["who"] != "longreach"]


def _median(entry: Mapping[str, Any]) -> float:
    return float(entry["microseconds"]["median"])
