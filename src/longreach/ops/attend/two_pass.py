"""Passes that keep logits, and passes over kept logits: the front doors of attend_with_logits, score_keys,
attend_from_logits.

Kascade's anchor layers read each key once: score_keys leaves logits, pooled_scores sums them over query heads, a top-k
chooses, attend_from_logits reads the values of what was chosen. Layer 0, which attends densely, uses
attend_with_logits.
"""

from __future__ import annotations

from torch import Tensor

from longreach.ops.checks import check_kept, check_logits, check_memory, check_scoring
from longreach.ops.doors import EVERYTHING, Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.selection import Selection
from longreach.ops.types import KVView, Logits, Partial, Rows, ScoringKeys, describe, require


def _named(op: str, reference: str, numba: str) -> Implementations:
    files = {"reference": reference, "triton": "triton_two_pass", "numba": numba}
    return Implementations(
        op, {name: f"longreach.ops.attend.{file}:{op}" for name, file in files.items()}, few_rows=True
    )


WITH_LOGITS_IMPLEMENTATIONS = _named("attend_with_logits", "two_pass_reference", "numba_two_pass")
SCORE_IMPLEMENTATIONS = _named("score_keys", "two_pass_reference", "numba_two_pass")
FROM_LOGITS_IMPLEMENTATIONS = _named("attend_from_logits", "reference", "numba")


def attend_with_logits(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Partial, Logits]:
    """attend over all keys visible to each row, and their logits for later passes of the same call.

    For a few rows a sequence: the logits take H N fp16 (fp32 for fp32 inputs and in the reference) a row. Arguments,
    result and errors are as in `attend`.
    """
    check_memory(rows, kv)
    check_logits(scale, softcap, rows, sink_logit)
    compute = WITH_LOGITS_IMPLEMENTATIONS.get(impl, rows.q.device, rows, kv, sink_logit)
    return compute(rows, kv, scale=scale, softcap=softcap, sink_logit=sink_logit)


def score_keys(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    keys: ScoringKeys | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Logits]:
    """attend_with_logits without the values, which are never read: (lse [R, H] fp32, a sink in it, and the logits).

    keys: an 8-bit copy that is read in place of kv.k. Logits and lse are then as far off as its keys are: choose by
    them, and attend to what is chosen exactly (attend, not attend_from_logits). The kernel multiplies on int8 tensor
    cores, with q in two int8 terms (off by 2^-16 of its largest channel). Turned into bf16 instead, the 4.3e9 codes of
    128K keys, batch 32 and 8 heads of 128 would take some 0.6 ms of an H200's conversion and packing units (64 a clock
    and multiprocessor), most of the 0.9 ms that their bytes save.
    """
    check_memory(rows, kv)
    check_logits(scale, softcap, rows, sink_logit)
    if keys is not None:
        check_scoring(keys, kv)
    compute = SCORE_IMPLEMENTATIONS.get(impl, rows.q.device, rows, kv, sink_logit, keys)
    return compute(rows, kv, scale=scale, softcap=softcap, sink_logit=sink_logit, keys=keys)


def attend_from_logits(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    logits: Logits,
    *,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
) -> Partial:
    """attend over `selection` from kept logits: keys are never read, values only where selected.

    logits: those that attend_with_logits or score_keys gave for the same rows and view; scale and softcap are in them.
    Log-weights and the sink count as in `attend`, and so do result and errors.
    """
    check_memory(rows, kv)
    require(isinstance(selection, Selection), lambda: f"selection: expected a Selection, got {describe(selection)}")
    selection.check(rows, kv)
    check_kept(logits, rows, kv)
    check_logits(1.0, None, rows, sink_logit)
    weight = getattr(selection, "log_weight", None)
    compute = FROM_LOGITS_IMPLEMENTATIONS.get(impl, rows.q.device, rows, kv, weight, logits, sink_logit)
    return compute(rows, kv, selection, logits, sink_logit=sink_logit)


def _read_all(rows: Rows, kv: KVView, result: object) -> tuple[Read, ...]:
    return (Read.of(kv, EVERYTHING),)


def _read_keys(rows: Rows, kv: KVView, result: object, keys: ScoringKeys | None = None) -> tuple[Read, ...]:
    if keys is None:
        return (Read.of(kv, EVERYTHING, values=False),)
    return (Read(EVERYTHING, metadata_bytes=keys.k.shape[3] * keys.k.element_size() + keys.scale.element_size()),)


def _read_values(rows: Rows, kv: KVView, result: object, selection: Selection, logits: Logits) -> tuple[Read, ...]:
    return (Read.of(kv, selection, keys=False),)


LOGIT_TERMS = ("rows", "kv", "scale", "softcap", "sink_logit")
WITH_LOGITS = Op(attend_with_logits, WITH_LOGITS_IMPLEMENTATIONS, LOGIT_TERMS, _read_all)
SCORE_KEYS = Op(score_keys, SCORE_IMPLEMENTATIONS, LOGIT_TERMS, _read_keys)
FROM_LOGITS = Op(attend_from_logits, FROM_LOGITS_IMPLEMENTATIONS, ("rows", "kv", "sink_logit"), _read_values)
