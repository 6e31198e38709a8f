"""The entry point of attend: checks common to all implementations, then dispatch to one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from longreach.ops.attend.sdpa import sdpa_for
from longreach.ops.checks import Once, check_logits, check_memory, each_time
from longreach.ops.impl import Implementations
from longreach.ops.partial import merge
from longreach.ops.selection import Bound, Lists, Selection, Spans, check_bound
from longreach.ops.tile_lists import TileLists
from longreach.ops.types import KVView, Partial, Rows, describe, require

T = TypeVar("T")

IMPLEMENTATIONS = Implementations(
    "attend",
    {
        "reference": "longreach.ops.attend.reference:attend",
        "triton": "longreach.ops.attend.triton:attend",
        "numba": "longreach.ops.attend.numba:attend",
        "sdpa_cudnn": "longreach.ops.attend.sdpa:cudnn",
        "sdpa_flash": "longreach.ops.attend.sdpa:flash",
        "sdpa_cpu": "longreach.ops.attend.sdpa:cpu",
    },
    few_rows=True,
    cpu="longreach.ops.attend.numba_host:attend",
)
_prepare = Implementations("attend", {"triton": "longreach.ops.attend.triton:prepare"})  # who has anything to prepare
_split = Implementations(
    "attend_split",
    {"reference": "longreach.ops.attend.reference:attend_split", "triton": "longreach.ops.attend.triton:attend_split"},
)


def resolve(
    impl: str,
    rows: Rows,
    kv: KVView,
    selection: Selection,
    *,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
) -> str:
    """The implementation that `attend` with these arguments uses.

    "auto" is Triton on a GPU, but for plain dense prefill of long prompts, which goes to torch's fastest exact kernel,
    cuDNN's, for whole prompts. It is "cpu" for few rows over spans or lists of a view with `calls`. On a CPU it is
    Numba where that is installed, for few rows a sequence; torch's flash attention for dense prefill of long prompts
    and of their later chunks, and for dense decoding of short contexts, or of all where Numba is not installed; and the
    reference for all else.
    """
    weight = getattr(selection, "log_weight", None)
    given = (rows, kv, weight, sink_logit)
    if kv.calls is not None and not isinstance(selection, (Spans, Lists)):  # of a prompt's tiles
        given = (rows, replace(kv, calls=None), weight, sink_logit)
    name = IMPLEMENTATIONS.choose(impl, rows.q.device, *given)
    if impl == "auto" and name in ("triton", "reference", "numba"):
        return sdpa_for(rows, kv, selection, softcap, sink_logit, name) or name
    return name


def attend(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
) -> Partial:
    """Attention of each row over its selected keys.

    logit = softcap(scale * q.k) + log_weight, softcap(x) = c tanh(x / c); out = sum softmax(logit) v;
    lse = log sum exp(logit). Only filled slots at positions up to a row's own are visible to it.
    Slots that no row of the call selects are never read; those that one selects must hold numbers for all.

    rows: q [R, H, D]; kv: k, v [P, G, page, D] of the same dtype and device, H a multiple (1 to 128) of G.
    sink_logit: float [H], an extra logit per head that takes probability and gives no value, i.e. a merge
        with Partial(out=0, lse=sink_logit).
    impl: "auto" or one of `IMPLEMENTATIONS.names()`. "cpu" is accepted for few rows of a view with `calls`, for which
        "auto" chooses it.

    Returns Partial (out [R, H, D], lse [R, H], fp32); over no keys out is 0 and lse -inf.
    Differentiable, through out and lse, in q, k, v, log-weights and sink_logit: "reference" for every selection and
    view; "triton" once, for Spans and Lists over contiguous memory (no block table, no slot_pos), with the same bits at
    each call. An implementation that cannot compute a gradient that an input requires raises Unsupported.
    Raises InvalidInput for shapes, dtypes and devices that do not fit, SelectionError for slots out of range
    or named twice (where reading them costs no device sync), UnknownName for an unknown impl. "cpu" raises
    HostCallFailed for slots out of range, and takes slots that are named twice as two keys.
    """
    return prepare(rows, kv, selection, scale=scale, softcap=softcap, sink_logit=sink_logit, impl=impl)()


def prepare(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    impl: str = "auto",
    once: Once = each_time,
) -> Callable[[], Partial]:
    """attend with these arguments, checked and planned once: each call uses the tensors' contents at that time.

    For a step that runs again over the same tensors. The arguments and what is raised are those of `attend`.
    once: on a CPU, computes once for several layers what depends on sequences, positions, lengths, the block table and
    spans alone, for the first call. Values of an earlier step must not be given back.
    """
    check_memory(rows, kv, once)
    require(isinstance(selection, Selection), lambda: f"selection: expected a Selection, got {describe(selection)}")
    selection.check(rows, kv, entries=False)
    check_logits(scale, softcap, rows, sink_logit)
    name = resolve(impl, rows, kv, selection, softcap=softcap, sink_logit=sink_logit)
    if rows.q.device.type == "cpu" and name not in ("numba", "cpu"):  # Numba's kernel checks entries as it reads them
        selection.check_entries(rows, kv)
    given: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink_logit": sink_logit}
    if name == "numba" and isinstance(selection, TileLists):
        return partial(_in_two, rows, kv, selection, **given)
    if name == "numba":
        given["once"] = _first_time(once)
    if name in _prepare.paths:
        return _prepare.get(name, rows.q.device)(rows, kv, selection, **given)
    return partial(IMPLEMENTATIONS.get(name, rows.q.device, rows, kv), rows, kv, selection, **given)


def _first_time(once: Once) -> Once:
    """`once` for the first run; a later run follows what the tensors hold by then."""
    first = True

    def found(key: Hashable, make: Callable[[], T]) -> T:
        nonlocal first
        mine, first = first, False
        return once(key, make) if mine else make()

    return found


def _in_two(rows: Rows, kv: KVView, selection: TileLists, *, sink_logit: Tensor | None, **given: Any) -> Partial:
    """Numba's kernel over the lists of tiles, and over the tiles' own keys, which are others."""
    compute = IMPLEMENTATIONS.get("numba", rows.q.device)
    listed = compute(rows, kv, selection.lists, sink_logit=sink_logit, **given)
    found: Partial = merge(listed, compute(rows, kv, selection.own, sink_logit=None, **given))
    return found


def attend_split(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    split: Bound,
    *,
    scale: float,
    softcap: float | None = None,
    impl: str = "auto",
) -> tuple[Partial, Partial]:
    """attend in two parts, in one pass: over the selected keys before `split`, and over those from it on.

    split: a bound made by absolute() (a slot) or relative() (an offset to the row's position), int or int
        [R, 1 or heads]; the heads are those of `selection.per`. The two parts merge to attend's result.
    There is no sink logit: it belongs to the whole, so merge it there. Everything else is as in `attend`.
    """
    check_memory(rows, kv)
    require(isinstance(selection, Selection), lambda: f"selection: expected a Selection, got {describe(selection)}")
    selection.check(rows, kv)
    check_bound("split", split, selection.per, rows, kv)
    check_logits(scale, softcap, rows)
    compute = _split.get(impl, rows.q.device)
    return compute(rows, kv, selection, split, scale=scale, softcap=softcap)
