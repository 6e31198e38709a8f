"""The report of an engine, summed over its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import iscoroutinefunction
from typing import Any

from longreach.adapters.vllm.engine import Engine
from longreach.errors import InvalidInput
from longreach.runtime import LayerReport, Report

SUMMED = ("key_bytes", "value_bytes", "metadata_bytes", "dense_bytes", "overflowed_lists")
NAME = "longreach_report"  # of the method that `plugin.install` gives to vLLM's workers


def report_of_worker(worker: Any) -> list[dict[str, Any]] | None:
    """A worker's layers, as JSON: it crosses processes. None for an engine without longreach."""
    context = worker.vllm_config.compilation_config.static_forward_context
    engines = [impl.engine for layer in context.values() if (impl := getattr(layer, "impl", None)) is not None
               and isinstance(getattr(impl, "engine", None), Engine)]  # fmt: skip
    if not engines:
        return None
    return [{**row.__dict__, "dense_reasons": list(row.dense_reasons)} for row in engines[0].report().layers]


def report(llm: Any) -> Report:
    """See `longreach.adapters.vllm.report`."""
    if not hasattr(llm, "collective_rpc") or iscoroutinefunction(llm.collective_rpc):
        raise InvalidInput(f"llm: expected a vllm.LLM, got {type(llm).__name__}")
    ranks = llm.collective_rpc(NAME)
    if any(rank is None for rank in ranks):
        raise InvalidInput("this engine does not use longreach: its additional config has no key 'longreach'")
    return summed([[_row(row) for row in rank] for rank in ranks])


def summed(ranks: Sequence[Sequence[LayerReport]]) -> Report:
    """The report of ranks that each hold some heads: bytes are added, rows and steps are the same on all.

    A method's notes are kept if they are the same on all ranks, else listed by rank.
    """
    layers = list[LayerReport]()
    for each in zip(*ranks, strict=True):
        first = each[0]
        notes = first.notes if all(row.notes == first.notes for row in each) else {"ranks": [row.notes for row in each]}
        totals = {name: sum(getattr(row, name) for row in each) for name in SUMMED}
        layers.append(LayerReport(**{**first.__dict__, **totals, "notes": notes}))
    return Report(tuple(layers))


def _row(fields: dict[str, Any]) -> LayerReport:
    return LayerReport(**{**fields, "dense_reasons": tuple(fields["dense_reasons"])})
