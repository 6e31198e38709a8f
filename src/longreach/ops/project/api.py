"""Coordinates of keys and queries in a basis: the front doors of project and project_keys.

With coordinates c(k) = k basis and c(q) = q basis in `width` orthonormal directions, c(q) . c(k) approximates q . k
(Loki: Singhania et al., 2024, arXiv 2406.02542). Score them as keys of that width: `score_keys` of
Rows(projected queries, seq, pos) over KVView(k=coordinates, v=coordinates, ...) with the layer's own scale, softcap and
sink.

Arguments:
    basis: [G, D, width], a direction a column, k's dtype. `width` must be a multiple of 8 where the coordinates are to
        be scored, as every head dim: see `pad_basis`.
    out: [P, G, page, width], the coordinates of the keys, page by page like the keys, k's dtype.
    slot: int [R], where each row's own key lies; None: at rows.pos, where slots are positions.
basis and out have any strides whose last dimension is contiguous. Products are summed in fp32 (fp64 for fp64) and
rounded once to k's dtype. Nothing waits for the device, and launches depend on shapes alone.
Raises InvalidInput for shapes, dtypes and devices that do not fit, and UnknownName for an unknown impl.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from longreach.ops.checks import check_memory, slots_of
from longreach.ops.doors import Op, Read
from longreach.ops.impl import Implementations
from longreach.ops.selection import Span, Spans, relative
from longreach.ops.types import FLOATS, KVView, Rows, describe, require

IMPLEMENTATIONS = Implementations(
    "project", {name: f"longreach.ops.project.{name}:project" for name in ("reference", "triton")}
)


def pad_basis(basis: Tensor) -> Tensor:
    """The basis [G, D, rank] with zero columns up to a multiple of 8, the unit of head dims: [G, D, width].

    Coordinates in zero columns are zero on both sides, so they change no score; they are stored and read.
    """
    ok = isinstance(basis, Tensor) and basis.dim() == 3 and basis.dtype in FLOATS and basis.shape[2] >= 1
    require(ok, lambda: f"basis: expected float [G, D, rank >= 1], got {describe(basis)}")
    return pad(basis, (0, -basis.shape[2] % 8)).contiguous()


def project_keys(
    rows: Rows, kv: KVView, basis: Tensor, out: Tensor, *, slot: Tensor | None = None, impl: str = "auto"
) -> None:
    """Write the coordinates of the rows' own keys to `out`, at the keys' places. One kernel on a GPU.

    A row whose slot is not filled writes nothing. Queries are not read.
    """
    slot = _check(rows, kv, basis, out, slot)
    IMPLEMENTATIONS.get(impl, kv.k.device)(rows, kv, basis, out, slot, queries=False)


def project(
    rows: Rows, kv: KVView, basis: Tensor, out: Tensor, *, slot: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """`project_keys`, and the coordinates of the rows' queries: [R, H, width], in q's dtype. One kernel on a GPU."""
    slot = _check(rows, kv, basis, out, slot)
    queries: Tensor = IMPLEMENTATIONS.get(impl, kv.k.device)(rows, kv, basis, out, slot, queries=True)
    return queries


NEWEST = Spans((Span(relative(0), relative(1)),))


def _reads(rows: Rows, kv: KVView, result: Tensor, basis: Tensor, out: Tensor) -> tuple[Read, ...]:
    return (Read.of(kv, NEWEST, values=False), Read(other=basis.numel() * basis.element_size()))


PROJECT = Op(project, IMPLEMENTATIONS, reads=_reads)


def _check(rows: Rows, kv: KVView, basis: Tensor, out: Tensor, slot: Tensor | None) -> Tensor:
    """The rows' slots, after all checks."""
    check_memory(rows, kv)
    pages, heads, page, dim = kv.k.shape
    ok = isinstance(basis, Tensor) and basis.dim() == 3 and basis.shape[:2] == (heads, dim) and basis.shape[2] >= 1
    ok = ok and basis.dtype == kv.k.dtype and basis.device == kv.k.device
    wanted = f"{kv.k.dtype} [G={heads}, D={dim}, width >= 1] on {kv.k.device}"
    require(ok, lambda: f"basis: expected {wanted}, got {describe(basis)}")
    shape = (pages, heads, page, basis.shape[2])
    ok = isinstance(out, Tensor) and out.shape == shape and out.dtype == kv.k.dtype and out.device == kv.k.device
    require(ok, lambda: f"out: expected {kv.k.dtype} {list(shape)} on {kv.k.device}, got {describe(out)}")
    contiguous = basis.stride(2) == 1 and out.stride(3) == 1
    require(contiguous, "basis, out: expected a contiguous last dimension; call .contiguous()")
    return slots_of(rows, kv, slot)
