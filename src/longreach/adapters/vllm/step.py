"""One forward pass of an engine: the passes of its prompt rows and its decoding rows, and how they are counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longreach.adapters.vllm.rows import BatchRows
from longreach.runtime import Pass


@dataclass(eq=False)
class Step:
    """All layers of a forward pass share it, also layers of different KV cache groups.

    decode, prompt: the passes of the rows of either kind. counted: whether its rows are requests' and not a warm-up's.
    rows: those of a batch in which all rows decode, the ones that pad it included; 0 for other batches. ran: whether
    its layers ran in Python; else a CUDA graph was replayed. builders: ids of the builders that made its metadata.
    """

    decode: Pass
    prompt: Pass
    counted: bool
    rows: int
    ran: bool = False
    builders: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Metadata:
    """Passed by vLLM to the layers of one KV cache group. decode, prompt: rows of either kind, None if there are none.

    batch: the requests that read prompts, as vLLM's own kernels take them; None where longreach's kernels read them.
    """

    step: Step
    decode: BatchRows | None = None
    prompt: BatchRows | None = None
    batch: Any = None
