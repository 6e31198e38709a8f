"""Which methods are measured beside each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.registry import METHODS, names

Plan = tuple[str, tuple[str, ...]]


def plans(chosen: Sequence[str] | None = None, left_out: Collection[str] = ()) -> list[Plan]:
    """(prefill method, decode methods after it): every decode method after dense, every prefill method throughout.

    chosen: only these methods, and dense as what they are measured against; None: all of them but those `left_out`.
    Raises UnknownName for a method that does not exist, InvalidInput where none is chosen.
    """
    for name in chosen or ():
        if name not in METHODS:
            raise UnknownName("method", name, METHODS)
    if chosen is not None and not chosen:
        raise InvalidInput(f"no methods to compare; name some of {', '.join(METHODS)}")
    kept = [n for n in METHODS if n == "dense" or (n not in left_out if chosen is None else n in chosen)]
    decodes = names("decode")
    found: list[Plan] = [("dense", tuple(n for n in decodes if n in kept))]
    for name in names("prefill"):
        if name in kept and name != "dense":
            found.append((name, (name if name in decodes else "dense",)))
    return found
