"""The trained levels of a model, and other windows and numbers of blocks for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from longreach.errors import InvalidInput
from longreach.mka.levels import Levels


class Budget(NamedTuple):
    """What level 3 leaves out and recalls: keys of the window, number of blocks."""

    window: int
    blocks: int


def levels_of(model: Any) -> dict[int, Levels]:
    """layer -> its trained levels; empty for a model that was not converted."""
    found = (getattr(module, "mka", None) for module in model.modules())
    return {levels.layer: levels for levels in found if isinstance(levels, Levels)}


@contextmanager
def budget(model: Any, given: Budget | None) -> Iterator[None]:
    """Run a converted model with another budget in all layers. None: with its own.

    Raises InvalidInput for a budget that its levels cannot have.
    """
    levels = list(levels_of(model).values()) if given is not None else []
    before = [one.config for one in levels]
    try:
        for one in levels:
            assert given is not None
            one.config = replace(one.config, window=given.window, blocks=given.blocks)
        yield
    finally:
        for one, config in zip(levels, before, strict=True):
            one.config = config


def check_budgets(model: Any, budgets: Sequence[Budget]) -> None:
    """Raise InvalidInput if a model cannot run with these budgets, or recalls nothing."""
    if not budgets:
        return
    levels = levels_of(model)
    if not levels or any(3 not in one.config.tiers for one in levels.values()):
        raise InvalidInput("budgets: the model recalls no blocks; convert it to block_mka, or with level 3 among tiers")
    for one in budgets:
        with budget(model, one):
            pass


def drawn(budgets: Sequence[Budget], seed: int, step: int) -> Budget | None:
    """The budget of a step, else None."""
    return Random(f"budget/{seed}/{step}").choice(budgets) if budgets else None
