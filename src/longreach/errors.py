"""Exceptions that users catch. Every message gives what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class LongreachError(Exception):
    """Base of every error longreach raises on purpose."""


class InvalidInput(LongreachError, ValueError):
    """An argument has the wrong shape, dtype, device or value."""


class SelectionError(InvalidInput):
    """A selection names slots that the KV cache does not hold, or names one twice."""


class UnknownName(LongreachError, ValueError):
    """A method, option, model or implementation that does not exist; the known ones are listed."""

    def __init__(self, kind: str, name: object, known: Iterable[str]):
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(known) or 'none'}")


class Unsupported(LongreachError, NotImplementedError):
    """Something the model or the caller needs and longreach lacks; refused rather than computed wrongly."""


class CapacityError(LongreachError, RuntimeError):
    """The KV cache has no room for the tokens to be appended; nothing was written."""


class HostCallFailed(LongreachError, RuntimeError):
    """Attention that the CPU computes for the GPU failed within a step; the tokens of that answer are not right."""


class ConcurrentUse(LongreachError, RuntimeError):
    """An attached model was used by two callers at once, or attached twice."""


class OutOfMemory(LongreachError, MemoryError):
    """Memory ran out; the message names the options to lower. The cache holds what it held before the call."""


class OtherRankFailed(LongreachError, RuntimeError):
    """Another tensor-parallel rank failed in a call that all ranks make together. rank: its number; why: its error."""

    def __init__(self, rank: int, ranks: int, why: str):
        super().__init__(
            f"rank {rank} of {ranks} failed: {why}; all ranks gave the call up and hold what they held before"
        )
        self.rank, self.why = rank, why


class ModelFileError(LongreachError, OSError):
    """A model directory, checkpoint or tokenizer file is missing, broken or foreign."""


class CalledOutside(LongreachError, RuntimeError):
    """longreach's attention was reached without a forward pass of an attached model around it."""


class MeasurementFailed(LongreachError, RuntimeError):
    """What was to be measured crashed, and nothing more can be: a lost device, or failures all through."""


class StoreError(LongreachError, OSError):
    """The chunk store cannot be opened, read or written; the message has the reason. Work can go on without it."""


class StoreFull(StoreError):
    """The disk, a quota or max_bytes has no room for a chunk; nothing of it was stored."""
