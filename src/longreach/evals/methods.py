"""Which methods are measured: by name or as users write them on a command line, and grouped by prefill method."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.base import AttentionMethod
from longreach.methods.registry import METHODS, choose, names, options

DENSE = "dense"
PREFILL = "prefill."
Pairing = tuple[str, tuple[str, ...]]  # a prefill method, and the decode methods that answer after it


@dataclass(frozen=True)
class Spec:
    """A prefill and a decode method, and the text that named them."""

    label: str
    prefill: AttentionMethod
    decode: AttentionMethod

    def to_json(self) -> dict[str, Any]:
        """Both methods' configurations."""
        return {"prefill": self.prefill.to_json(), "decode": self.decode.to_json()}


def parse(text: str) -> Spec:
    """The methods of "[PREFILL/]DECODE [option=value ...] [prefill.option=value ...]".

    "oracle_top_k k=0.025 dense_layers=[0]", say; without PREFILL the prompt is read densely. Values are JSON, Python's
    True, False and None, or plain words.
    Raises InvalidInput for what is none, UnknownName for methods and options that do not exist.
    """
    try:
        name, *settings = shlex.split(text)
    except ValueError as error:
        raise InvalidInput(
            f"method {text!r}: expected [PREFILL/]DECODE and option=value, such as 'oracle_top_k k=0.1'"
        ) from error
    before, slash, after = name.partition("/")
    prefill, decode = (before, after) if slash else (DENSE, before)
    where = f"method {text!r}"
    mine = options([x.removeprefix(PREFILL) for x in settings if x.startswith(PREFILL)], where)
    theirs = options([x for x in settings if not x.startswith(PREFILL)], where)
    label = " ".join([name, *settings])
    return Spec(label, choose("prefill", prefill, **mine), choose("decode", decode, **theirs))


def specs(texts: Iterable[str]) -> list[Spec]:
    """Each text's methods, dense first: it is what all are measured against. One label once."""
    found = {spec.label: spec for spec in map(parse, [DENSE, *texts])}
    return list(found.values())


def by_prefill(chosen: Sequence[Spec]) -> list[tuple[AttentionMethod, list[Spec]]]:
    """Those that read the prompt alike, together, in the order of first mention."""
    groups: dict[AttentionMethod, list[Spec]] = {}
    for spec in chosen:
        groups.setdefault(spec.prefill, []).append(spec)
    return list(groups.items())


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
