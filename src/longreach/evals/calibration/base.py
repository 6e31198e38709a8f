"""One kind of calibration: its options, what it needs of prompts, and the plan's parts that it makes of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.call import ModelShape

if TYPE_CHECKING:
    from longreach.evals.calibration.run import CalibrationRun


class PlanContent(NamedTuple):
    """A plan's values and arrays. settings: options that it depends on besides those of `Calibration.settings`."""

    values: Mapping[str, Any]
    arrays: Mapping[str, Tensor]
    settings: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Calibration(ABC):
    """Options of one kind of calibration. Subclasses are frozen dataclasses, which check options when they are made.

    kind: of the plan. tasks: for a kind that takes prompts of tasks only, those that it takes by default; else None.
    """

    kind: ClassVar[str]
    tasks: ClassVar[str | None] = None

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a document's chunk at most, for prompts that are cut into chunks; else None."""
        return None

    def check(self, shape: ModelShape) -> None:  # noqa: B027 - most fit every model
        """Raise InvalidInput where options do not fit a model; called before its weights are loaded."""

    def least_tokens(self, shape: ModelShape) -> int:
        """The fewest tokens of a prompt."""
        return 1

    def settings(self) -> dict[str, Any]:
        """Options that affect the data gathered from a prompt, for the journal and the plan (JSON)."""
        return {}

    def remark(self, run: CalibrationRun) -> str | None:
        """What the user should know of the prompts before they are read, else None."""
        return None

    @abstractmethod
    def make(self, run: CalibrationRun) -> PlanContent:
        """Read the run's prompts and make the plan's content."""


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise InvalidInput for an option that is no count of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{name}: expected a count of at least {least}, got {value!r}; choose another")


def check_share(name: str, value: float, *, top: bool = False) -> None:
    """Raise InvalidInput for an option that is no share in (0, 1), or in (0, 1] with `top`."""
    if not 0 < value < 1 and not (top and value == 1):
        kinds = "(0, 1]" if top else "(0, 1)"
        raise InvalidInput(f"{name}: expected a share in {kinds}, got {value}; choose another (--{name})")
