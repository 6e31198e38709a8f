"""What makes a plan of one prompt that is in the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from longreach.methods.call import LayerCall, ModelShape
from longreach.ops import KVView
from longreach.plans import Plan


@dataclass(frozen=True)
class PromptRead:
    """A prompt whose keys are in the cache.

    model: its shape. length: tokens. slot: the prompt's sequence in the views. views: of every layer. calls: layer -> a
    call for the prompt's last rows, in layers of full attention; it counts what it reads. changes: layer -> fp32 [r],
    how much attention turned the residual stream of these rows.
    """

    model: ModelShape
    length: int
    slot: int
    views: Sequence[KVView]
    calls: Mapping[int, LayerCall]
    changes: Mapping[int, Tensor]


class PlanParts(NamedTuple):
    """A plan's values and arrays, and the settings that they depend on."""

    values: Mapping[str, Any]
    arrays: Mapping[str, Tensor]
    settings: Mapping[str, Any]


class PlanMaker(ABC):
    """Makes plans of one kind. needed: the fewest tokens of a prompt. rows: last rows of the prompt that it takes, 0 if
    keys are enough."""

    kind: ClassVar[str]
    needed: int
    rows: int = 0

    @abstractmethod
    def make(self, prompt: PromptRead) -> PlanParts:
        """The plan's parts. Raises Unsupported or InvalidInput for a model or prompt that it makes no plan of."""

    @abstractmethod
    def about(self, plan: Plan) -> str:
        """The plan in a few words, for reports."""
