"""attend over everything for whole runs of rows: torch's fastest exact kernels, for dense prefill of long prompts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.partial import merge
from longreach.ops.selection import Selection, Spans
from longreach.ops.types import KVView, Partial, RowRange, Rows, describe

LONG = 256  # rows of a run from which these kernels are worth their set-up
WIDEST = 128  # channels of a head that cuDNN takes in all its versions
SHORT = 5 << 20  # bytes of keys and values of a sequence; Numba reads more of them faster
FEW = 4  # sequences, as each is a call of its own


def sdpa_for(
    rows: Rows, kv: KVView, selection: Selection, softcap: float | None, sink_logit: Tensor | None, otherwise: str
) -> str | None:
    """The implementation here that "auto" means for these arguments, None for `otherwise`.

    On a GPU whole prompts go to cuDNN. Later chunks go to attend's Triton kernel: cuDNN's is faster there, but builds a
    plan of 0.1 s for each number of cached tokens and each capacity of the cache. On a CPU these kernels also decode:
    short contexts, and all where Numba is not installed.
    """
    runs, name = rows.runs or (), "sdpa_cpu" if rows.q.device.type == "cpu" else "sdpa_cudnn"
    if name == "sdpa_cpu" and runs and all(run.rows == 1 for run in runs):
        takes = not _refusal(rows, kv, selection, softcap, sink_logit, name)
        return name if takes and _decodes(rows, kv, otherwise) else None
    if otherwise == "numba":
        return None
    if not runs or min(run.rows for run in runs) < LONG:
        return None
    if name == "sdpa_cudnn" and (rows.q.shape[2] > WIDEST or any(run.first for run in runs)):
        return None
    return None if _refusal(rows, kv, selection, softcap, sink_logit, name) else name


def _decodes(rows: Rows, kv: KVView, otherwise: str) -> bool:
    """Whether torch's kernel for a CPU is the fastest for one new row of each sequence. It must not copy keys."""
    if rows.q.dtype == torch.float16 or (kv.block_table is not None and len(kv.k) > 1):
        return False
    longest = max(run.first or 0 for run in rows.runs or ()) + 1
    size = 2 * kv.heads * rows.q.shape[2] * rows.q.element_size() * longest
    return otherwise == "reference" or (size <= SHORT and len(rows.runs or ()) <= FEW)


def cudnn(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    """cuDNN's kernel, for whole prompts and for chunks after cached tokens.

    It aligns the causal triangle with the first key, so a chunk attends twice, to the cached tokens and to its own.
    """
    refusal = _refusal(rows, kv, selection, softcap, sink_logit, "sdpa_cudnn")
    if refusal is None and any(run.first == 1 for run in rows.runs or ()):
        refusal = "sdpa_cudnn: cuDNN attends to no single key, and a run starts after one token; use impl='triton'"
    if refusal:
        raise Unsupported(refusal)
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        past = k.shape[2] - q.shape[2]

        def over(some: slice, causal: bool) -> tuple[Tensor, Tensor]:
            out, lse = kernel(q, k[:, :, some], v[:, :, some], None, True, 0.0, causal, scale=scale)[:2]
            return out, lse.reshape(1, q.shape[1], -1)[..., : q.shape[2]]  # it may have more rows

        own = over(slice(past, None), True)
        return [own, over(slice(past), False)] if past else [own]

    return _by_run(rows, kv, attend)


def flash(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    """FlashAttention-2, for whole prompts and for chunks after cached tokens."""
    refusal = _refusal(rows, kv, selection, softcap, sink_logit, "sdpa_flash")
    if refusal:
        raise Unsupported(refusal)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        # with fewer queries than keys this kernel aligns the causal triangle with the last key
        return [torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[:2]]

    return _by_run(rows, kv, attend)


def cpu(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    """torch's flash attention on a CPU, for whole prompts and for chunks after cached tokens."""
    refusal = _refusal(rows, kv, selection, softcap, sink_logit, "sdpa_cpu")
    if refusal:
        raise Unsupported(refusal)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        heads, past = k.shape[1], k.shape[2] - q.shape[2]
        if q.shape[2] == 1:  # it sees all keys, and so may the query heads of a group as rows
            out, lse = kernel(q.reshape(1, heads, -1, q.shape[3]), k, v, 0.0, False, scale=scale)
            return [(out.reshape(q.shape), lse.reshape(q.shape[:3]))]

        def over(q: Tensor, some: slice, causal: bool) -> Partial:
            out, lse = kernel(q, k[:, :, some], v[:, :, some], 0.0, causal, scale=scale)
            return Partial(out[0].float(), lse[0])  # heads first, as the kernel has them

        parts = list[Partial]()
        for number in range(q.shape[1] // heads):  # a query head of each group at a time: keys are not repeated
            mine = q[:, number :: q.shape[1] // heads]
            found = over(mine, slice(past, None), True)
            parts.append(merge(found, over(mine, slice(past), False)) if past else found)
        out, lse = [p.out for p in parts], [p.lse for p in parts]
        return [(torch.stack(out, 1).flatten(0, 1)[None], torch.stack(lse, 1).flatten(0, 1)[None])]

    return _by_run(rows, kv, attend)


def _refusal(
    rows: Rows, kv: KVView, selection: Selection, softcap: float | None, sink_logit: Tensor | None, impl: str
) -> str | None:
    """Why these kernels cannot do it."""
    if impl == "sdpa_cpu":
        if rows.q.device.type != "cpu" or rows.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{impl} takes fp32, bf16 and fp16 on a CPU, got {describe(rows.q)}; use impl='reference'"
    elif rows.q.device.type != "cuda" or rows.q.dtype not in (torch.bfloat16, torch.float16):
        return f"{impl} takes bf16 and fp16 on CUDA devices, got {describe(rows.q)}; use impl='triton'"
    other = "reference" if impl == "sdpa_cpu" else "triton"
    if rows.runs is None or any(run.first is None for run in rows.runs):
        return f"{impl} needs Rows.runs with their first positions on the host; use impl='{other}'"
    if not isinstance(selection, Spans) or not selection.is_dense:
        return f"{impl} attends to everything: the selection must be Spans.dense(); use impl='{other}'"
    if softcap is not None or sink_logit is not None or kv.slot_pos is not None:
        return f"{impl} supports no softcap, no sink logit and no evicted slots; use impl='{other}'"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (rows.q, kv.k, kv.v)):
        return f"{impl} is not differentiable through lse; use impl='reference', or torch.no_grad()"
    return None


def _by_run(rows: Rows, kv: KVView, attend: Callable[[Tensor, Tensor, Tensor], list[tuple[Tensor, Tensor]]]) -> Partial:
    """`attend` takes q [1, H, T, D] and k, v [1, G, N, D] and gives out like q and lse [1, H, T]: one result, or two
    over different keys.
    """
    out = torch.empty_like(rows.q, dtype=torch.float32, memory_format=torch.contiguous_format)
    lse = out.new_empty(out.shape[:2])
    start = 0
    for run in rows.runs or ():
        part = slice(start, start + run.rows)
        q = rows.q[part].transpose(0, 1)[None]
        k, v = _keys(kv.k, kv, run), _keys(kv.v, kv, run)
        found = attend(q, k, v)
        if len(found) > 1:
            from longreach.ops.attend.triton_join import join  # needs Triton, which CPUs may lack

            join(found[0], found[1], out[part], lse[part])
        else:
            ((o, x),) = found
            out[part], lse[part] = o[0].transpose(0, 1), x[0, :, : run.rows].transpose(0, 1)
        start += run.rows
    return Partial(out, lse)


def _keys(memory: Tensor, kv: KVView, run: RowRange) -> Tensor:
    """[1, G, N, D]: keys or values visible to a run; a view where memory has one page, or no table."""
    stop = (run.first or 0) + run.rows
    if len(memory) == 1:  # one page, whatever the table says
        return memory[:, :, :stop]
    if kv.block_table is None:
        return memory[run.seq : run.seq + 1, :, :stop]
    pages = kv.block_table[run.seq, : -(-stop // kv.page)].long()
    if stop <= kv.page:  # contiguous memory: its one page may be far longer than the filled part
        return memory[:, :, :stop].index_select(0, pages)
    return memory[pages].transpose(0, 1).flatten(1, 2)[None, :, :stop]
