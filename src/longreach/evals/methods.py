"""The methods to measure: by name or as written on a command line, and grouped by how prompts are read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.base import AttentionMethod
from longreach.methods.registry import (
    FUSIONS,
    METHODS,
    NONE,
    choose,
    choose_eviction,
    choose_fusion,
    names,
    options,
)
from longreach.methods.slots import Eviction, Fusion, check_eviction, check_fusion

DENSE = "dense"
NAMED = ("fuse", "evict")  # slots that a SPEC names as settings, fuse=a3
OWNERS = ("prefill", *NAMED)  # slots with options by name: fuse.ratio=0.3
Pairing = tuple[str, tuple[str, ...]]  # a prefill method, and the decode methods that answer after it
Controls = Mapping[str, type[Fusion]]  # fusion for measurements only, by name


@dataclass(frozen=True)
class Spec:
    """The methods of the four slots, and the text that named them. fuse, evict: None for none."""

    label: str
    prefill: AttentionMethod
    decode: AttentionMethod
    fuse: Fusion | None = None
    evict: Eviction | None = None

    def to_json(self) -> dict[str, Any]:
        """The methods' configurations; fuse and evict only where there are any."""
        there = {slot: method.to_json() for slot in NAMED if (method := getattr(self, slot)) is not None}
        return {"prefill": self.prefill.to_json(), "decode": self.decode.to_json(), **there}


def parse(text: str, controls: Controls | None = None) -> Spec:
    """The methods of "[PREFILL/]DECODE [option=value ...] [fuse=NAME] [evict=NAME] [SLOT.option=value ...]".

    For example "oracle_top_k k=0.025 dense_layers=[0]", or "dense fuse=a3 fuse.ratio=0.3 evict=snapkv"; without PREFILL
    the prompt is read densely. SLOT: prefill, fuse or evict. Values are JSON, Python's True, False and None, or plain
    words. controls: further names for fuse.
    Raises InvalidInput for what is none, UnknownName for methods and options that do not exist, Unsupported for methods
    that do not go together.
    """
    name, *settings = _words(text)
    before, slash, after = name.partition("/")
    prefill, decode = (before, after) if slash else (DENSE, before)
    where = f"method {text!r}"
    named = {slot: [x.removeprefix(f"{slot}=") for x in settings if x.startswith(f"{slot}=")] for slot in NAMED}
    for slot, found in named.items():
        if len(found) > 1 or "" in found:
            raise InvalidInput(f"{where}: expected {slot}=NAME once, got {slot}={f' {slot}='.join(found)}")
    of = {slot: [x.removeprefix(f"{slot}.") for x in settings if x.startswith(f"{slot}.")] for slot in OWNERS}
    slots = tuple(f"{slot}=" for slot in NAMED) + tuple(f"{slot}." for slot in OWNERS)
    theirs = options([x for x in settings if not x.startswith(slots)], where)
    spec = Spec(
        " ".join([name, *settings]),
        choose("prefill", prefill, **options(of["prefill"], where)),
        choose("decode", decode, **theirs),
        _fusion(next(iter(named["fuse"]), None), options(of["fuse"], where), controls or {}),
        choose_eviction(next(iter(named["evict"]), None), **options(of["evict"], where)),
    )
    check_fusion(spec.fuse, spec.prefill)
    check_eviction(spec.evict, spec.decode, fused=spec.fuse is not None)
    return spec


def _words(text: str) -> list[str]:
    try:
        first, *rest = shlex.split(text)
    except ValueError as error:
        raise InvalidInput(
            f"method {text!r}: expected [PREFILL/]DECODE and option=value, such as 'oracle_top_k k=0.1'"
        ) from error
    return [first, *rest]


def _fusion(name: str | None, given: dict[str, Any], controls: Controls) -> Fusion | None:
    if name in controls:
        return controls[str(name)].make(**given)
    if name is not None and name not in (*NONE, *FUSIONS):
        raise UnknownName("fuse method", name, (*NONE, *FUSIONS, *controls))
    return choose_fusion(name, **given)


def specs(
    texts: Iterable[str], *, settings: Mapping[str, Mapping[str, Any]] | None = None, controls: Controls | None = None
) -> list[Spec]:
    """Each text's methods, dense first, as the others are compared with it. One label once.

    settings: {slot: {option: value}} of fuse and evict, for each method that has the option and does not set it itself.
    Raises as `parse`, and InvalidInput for a setting that no method takes.
    """
    found, unused = dict[str, Spec](), {(slot, option) for slot, mine in (settings or {}).items() for option in mine}
    for text in [DENSE, *texts]:
        if not isinstance(text, str):
            raise InvalidInput(
                f"methods: expected text such as 'quest k=0.2', got {text!r}; to measure a method of your own, "
                f"register it (CONTRIBUTING.md, Add a method)"
            )
        spec, words = parse(text, controls), list[str]()
        for slot, mine in (settings or {}).items():
            method = getattr(spec, slot)
            for option, value in mine.items():
                if method is not None and option in method.options():
                    unused.discard((slot, option))
                    if not any(word.startswith(f"{slot}.{option}=") for word in shlex.split(text)):
                        said = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
                        words.append(f"{slot}.{option}={said}")
        spec = parse(" ".join([text, *words]), controls)
        found[spec.label] = spec
    if unused:
        slot, option = min(unused)
        raise InvalidInput(f"--set {slot}.{option}: no method given has this option in its {slot} slot; leave it out")
    return list(found.values())


def refuse_slots(specs: Iterable[Spec], slots: Collection[str], why: str) -> None:
    """Raise InvalidInput for the first method with something in one of these slots."""
    for spec in specs:
        for slot in slots:
            if (method := getattr(spec, slot)) is not None:
                raise InvalidInput(f"{spec.label!r}: {slot}={method.name}: {why}")


def by_prefill(chosen: Sequence[Spec]) -> list[tuple[AttentionMethod, list[Spec]]]:
    """Grouped by prefill method, in the order of first mention."""
    groups: dict[AttentionMethod, list[Spec]] = {}
    for spec in chosen:
        groups.setdefault(spec.prefill, []).append(spec)
    return list(groups.items())


def by_reading(chosen: Sequence[Spec], *, fused_together: bool = False) -> list[list[Spec]]:
    """Grouped by how they read the prompt and evict, in the order of first mention.

    fused_together: one group of all with a fusion method.
    """
    groups: dict[Any, list[Spec]] = {}
    for spec in chosen:
        alike = "fused" if spec.fuse and fused_together else (spec.fuse, spec.prefill, spec.evict)
        groups.setdefault(alike, []).append(spec)
    return list(groups.values())


def pairings(chosen: Sequence[str] | None = None, left_out: Collection[str] = ()) -> list[Pairing]:
    """Every decode method after dense prefill, then every other prefill method with itself as decode method, or dense.

    chosen: these methods and dense, the reference; None: all methods but those `left_out`.
    Raises UnknownName for a method that does not exist, InvalidInput where none is chosen.
    """
    for name in chosen or ():
        if name not in METHODS:
            raise UnknownName("method", name, METHODS)
    if chosen is not None and not chosen:
        raise InvalidInput(f"no methods to compare; name some of {', '.join(METHODS)}")
    kept = [n for n in METHODS if n == "dense" or (n not in left_out if chosen is None else n in chosen)]
    decodes = names("decode")
    found: list[Pairing] = [("dense", tuple(n for n in decodes if n in kept))]
    for name in names("prefill"):
        if name in kept and name != "dense":
            found.append((name, (name if name in decodes else "dense",)))
    return found
