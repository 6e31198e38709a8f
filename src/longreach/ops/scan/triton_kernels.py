# mypy: ignore-errors
"""The Triton kernels of scan: rows in chunks of C, a program for each chunk and KV head, rows one after another.

What a chunk does to the state before it is linear, so chunks are first taken alone (`ends`, `ends_back`), their
effects are chained in order (`chain`), and the chunks run again from the states that they begin with (`means`,
`gradients`). Rows of one chunk need only the last step.

source int32 [R]: where the state before a row comes from: b >= 0: the carry of sequence b; -1: the row before;
-2: nothing; -3: the row is padding. `last` int32 [R]: the sequence whose last row this is, else -1.
U rows are read at once. S the sum of the rows by decay^age, W of decay^age, V = dW / d decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
CARRIED = tl.constexpr(0)
GOES_ON = tl.constexpr(-1)
FRESH = tl.constexpr(-2)
PADDING = tl.constexpr(-3)


@triton.jit
def _sources(source, at, rows, U: tl.constexpr):
    """Sources of U rows from `at` on; past the last row padding."""
    found = ()
    for u in tl.static_range(U):
        found = found + (tl.load(source + at + u, mask=at + u < rows, other=-3),)
    return found


@triton.jit
def _plain(source, at, rows, U: tl.constexpr):
    """Whether U rows from `at` on are there, and each goes on from the row before it."""
    n = at + tl.arange(0, U)
    return tl.min((tl.load(source + n, mask=n < rows, other=-3) == GOES_ON).to(tl.int32), 0) == 1


@triton.jit
def _loaded(x, at, rows, row_stride, d, some, U: tl.constexpr):
    """fp32 [BD] of U rows from `at` on, 0 where there is none."""
    found = ()
    for u in tl.static_range(U):
        place = x + (at + u).to(tl.int64) * row_stride + d
        found = found + (tl.load(place, mask=some & (at + u >= 0) & (at + u < rows), other=0.0).to(tl.float32),)
    return found


@triton.jit
def _before(s, w, v, kind, carry, g, heads, rate, d, some, D: tl.constexpr):
    """S, W and V before a row, without the row's decay: the row's own are x + rate S, 1 + rate W, W + rate V."""
    mean, weight = carry
    held = kind >= CARRIED
    place = tl.where(held, kind, 0).to(tl.int64) * heads + g
    w0 = tl.load(weight + place, mask=held, other=0.0)
    s0 = tl.load(mean + place * D + d, mask=some & held, other=0.0) * w0
    on = kind == GOES_ON
    return tl.where(on, s, s0), tl.where(on, w, w0), tl.where(on, v, 0.0)


@triton.jit
def ends(
    x, row_stride, head_stride, rate_of, source, carry, states, rows, heads,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """The effect of each chunk: S, W and V at its end if it begins from nothing, and f, h: S + f S', W + f W',
    V + h W' + f V' if it begins from S', W', V'. states: S [chunks, G, D], the others [chunks, G, 4]."""
    chunk, g = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    some = d < D
    rate = tl.load(rate_of + g).to(tl.float32)
    s = tl.zeros((BD,), tl.float32)
    w, v, f, h = 0.0, 0.0, 1.0, 0.0
    for step in range(0, C, U):
        at = chunk * C + step
        xs = _loaded(x + g.to(tl.int64) * head_stride, at, rows, row_stride, d, some, U)
        if _plain(source, at, rows, U):
            for u in tl.static_range(U):
                s = xs[u] + rate * s
                v = w + rate * v
                w = 1.0 + rate * w
                h = f + rate * h
                f = rate * f
        else:
            kinds = _sources(source, at, rows, U)
            for u in tl.static_range(U):
                kind = kinds[u]
                s0, w0, v0 = _before(s, w, v, kind, carry, g, heads, rate, d, some, D)
                real = (kind != PADDING).to(tl.float32)
                s = tl.where(kind == PADDING, 0.0, xs[u] + rate * s0)
                w, v = real * (1.0 + rate * w0), real * (w0 + rate * v0)
                on = kind == GOES_ON
                h = tl.where(on, f + rate * h, 0.0)
                f = tl.where(on, rate * f, 0.0)
    sums, scalars = states
    place = chunk.to(tl.int64) * heads + g
    tl.store(sums + place * D + d, s, mask=some)
    tl.store(scalars + place * 4, w)
    tl.store(scalars + place * 4 + 1, v)
    tl.store(scalars + place * 4 + 2, f)
    tl.store(scalars + place * 4 + 3, h)


@triton.jit
def chain(effects, begins, chunks, heads, BACK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, U: tl.constexpr):
    """The state with which each chunk begins, from the chunks' effects. BACK: from the last chunk to the first."""
    sums, scalars = effects
    sums_to, scalars_to = begins
    g = tl.program_id(0)
    d = tl.arange(0, BD)
    some = d < D
    s = tl.zeros((BD,), tl.float32)
    w, v = 0.0, 0.0
    for at in range(0, chunks, U):
        places, parts, ws, vs, fs, hs = (), (), (), (), (), ()
        for u in tl.static_range(U):
            there = at + u < chunks
            n = chunks - 1 - at - u if BACK else at + u
            place = n * heads + g
            places = places + (place,)
            parts = parts + (tl.load(sums + place * D + d, mask=some & there, other=0.0),)
            ws = ws + (tl.load(scalars + place * 4, mask=there, other=0.0),)
            vs = vs + (tl.load(scalars + place * 4 + 1, mask=there, other=0.0),)
            fs = fs + (tl.load(scalars + place * 4 + 2, mask=there, other=0.0),)
            hs = hs + (tl.load(scalars + place * 4 + 3, mask=there, other=0.0),)
        for u in tl.static_range(U):
            there = at + u < chunks
            tl.store(sums_to + places[u] * D + d, s, mask=some & there)
            tl.store(scalars_to + places[u] * 4, w, mask=there)
            tl.store(scalars_to + places[u] * 4 + 1, v, mask=there)
            v = vs[u] + hs[u] * w + fs[u] * v
            w = ws[u] + fs[u] * w
            s = tl.where(fs[u] == 0.0, parts[u], parts[u] + fs[u] * s)


@triton.jit
def means(
    x, row_stride, head_stride, rate_of, source, last, carry, begins, y, weights, ended, rows, heads,
    BEGUN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """y [R, G, D], weights (W, V) [R, G] and the state (mean [B, G, D], weight [B, G]) after last rows.

    BEGUN: chunks begin from the states `begins`, else from nothing.
    """
    chunk, g = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    some = d < D
    rate = tl.load(rate_of + g).to(tl.float32)
    s = tl.zeros((BD,), tl.float32)
    w, v = 0.0, 0.0
    if BEGUN:
        place = chunk.to(tl.int64) * heads + g
        s = tl.load(begins[0] + place * D + d, mask=some, other=0.0)
        w = tl.load(begins[1] + place * 4)
        v = tl.load(begins[1] + place * 4 + 1)
    for step in range(0, C, U):
        at = chunk * C + step
        xs = _loaded(x + g.to(tl.int64) * head_stride, at, rows, row_stride, d, some, U)
        n = at + tl.arange(0, U)
        ends_here = tl.max(tl.load(last + n, mask=n < rows, other=-1), 0) >= 0
        if _plain(source, at, rows, U) & ~ends_here:
            for u in tl.static_range(U):
                s = xs[u] + rate * s
                v = w + rate * v
                w = 1.0 + rate * w
                place = (at + u).to(tl.int64) * heads + g
                tl.store(y + place * D + d, (s * (1.0 / w)).to(y.dtype.element_ty), mask=some)
                tl.store(weights[0] + place, w)
                tl.store(weights[1] + place, v)
        else:
            kinds = _sources(source, at, rows, U)
            for u in tl.static_range(U):
                kind = kinds[u]
                s0, w0, v0 = _before(s, w, v, kind, carry, g, heads, rate, d, some, D)
                real = (kind != PADDING).to(tl.float32)
                s = tl.where(kind == PADDING, 0.0, xs[u] + rate * s0)
                w, v = real * (1.0 + rate * w0), real * (w0 + rate * v0)
                there = at + u < rows
                place = (at + u).to(tl.int64) * heads + g
                mean = s * (1.0 / tl.maximum(w, 1.0))  # W is at least 1, and 0 for padding
                tl.store(y + place * D + d, mean.to(y.dtype.element_ty), mask=some & there)
                tl.store(weights[0] + place, w, mask=there)
                tl.store(weights[1] + place, v, mask=there)
                b = tl.load(last + at + u, mask=there, other=-1)
                to = tl.maximum(b, 0).to(tl.int64) * heads + g
                tl.store(ended[0] + to * D + d, mean, mask=some & (b >= 0))
                tl.store(ended[1] + to, w, mask=b >= 0)


@triton.jit
def _gradient(dy, d_ended, at, w, last, rows, g, heads, d, some, D: tl.constexpr, ENDED: tl.constexpr):
    """The gradient of one row's S through its own y and the state after it."""
    there = (at >= 0) & (at < rows)
    place = at.to(tl.int64) * heads + g
    grad = tl.load(dy + place * D + d, mask=some & there, other=0.0).to(tl.float32)
    if ENDED:
        b = tl.load(last + at, mask=there, other=-1)
        to = tl.maximum(b, 0).to(tl.int64) * heads + g
        grad += tl.load(d_ended + to * D + d, mask=some & (b >= 0), other=0.0)
    total = tl.load(w + place, mask=there, other=0.0)
    return tl.where(total == 0.0, 0.0, grad * (1.0 / tl.maximum(total, 1.0))), total


@triton.jit
def _goes_on(source, at, rows):
    """Whether a row takes the state of the row before it."""
    return tl.load(source + at, mask=at < rows, other=-3) == GOES_ON


@triton.jit
def ends_back(
    dy, d_ended, w, rate_of, source, last, effects, rows, heads,
    ENDED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """The effect of each chunk on gradients of S, which pass from later rows to earlier ones; as `ends`."""
    chunk, g = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    some = d < D
    rate = tl.load(rate_of + g).to(tl.float32)
    a = tl.zeros((BD,), tl.float32)
    f = 1.0
    for back in range(0, C, U):
        at = chunk * C + C - 1 - back
        grads, ons = (), ()
        for u in tl.static_range(U):
            grad, _ = _gradient(dy, d_ended, at - u, w, last, rows, g, heads, d, some, D, ENDED)
            grads = grads + (grad,)
            ons = ons + (_goes_on(source, at - u + 1, rows),)
        for u in tl.static_range(U):
            a = grads[u] + tl.where(ons[u], rate * a, 0.0)
            f = tl.where(ons[u], rate * f, 0.0)
    sums, scalars = effects
    place = chunk.to(tl.int64) * heads + g
    tl.store(sums + place * D + d, a, mask=some)
    tl.store(scalars + place * 4, 0.0)
    tl.store(scalars + place * 4 + 1, 0.0)
    tl.store(scalars + place * 4 + 2, f)
    tl.store(scalars + place * 4 + 3, 0.0)


@triton.jit
def gradients(
    dy, d_ended, x, row_stride, head_stride, y, w_of, rate_of, source, last, carry, begins, dx, d_carry, dw_of,
    rows, heads, BEGUN: tl.constexpr, ENDED: tl.constexpr, LEARNT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Gradients of x [R, G, D], of the carry's mean [B, G, D] and, if LEARNT, of each row's W [R, G].

    With A_t the gradient of S_t: dx_t = A_t and dW_t = -A_t (x_t - y_(t-1)) / W_t; y_(t-1) does not depend on W_t.
    """
    chunk, g = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    some = d < D
    rate = tl.load(rate_of + g).to(tl.float32)
    a = tl.zeros((BD,), tl.float32)
    if BEGUN:
        place = chunk.to(tl.int64) * heads + g
        a = tl.load(begins[0] + place * D + d, mask=some, other=0.0)
    for back in range(0, C, U):
        at = chunk * C + C - 1 - back
        grads, totals, ons, xs, ys = (), (), (), (), ()
        for u in tl.static_range(U):
            n = at - u
            grad, total = _gradient(dy, d_ended, n, w_of, last, rows, g, heads, d, some, D, ENDED)
            grads, totals = grads + (grad,), totals + (total,)
            ons = ons + (_goes_on(source, n + 1, rows),)
            if LEARNT:
                there = some & (n < rows)
                xs = xs + (tl.load(x + n.to(tl.int64) * row_stride + g.to(tl.int64) * head_stride + d, mask=there),)
                before = (n - 1).to(tl.int64) * heads + g
                ys = ys + (tl.load(y + before * D + d, mask=there & (n > 0), other=0.0),)
        for u in tl.static_range(U):
            n = at - u
            a = grads[u] + tl.where(ons[u], rate * a, 0.0)
            there = n < rows
            place = n.to(tl.int64) * heads + g
            tl.store(dx + place * D + d, a.to(dx.dtype.element_ty), mask=some & there)
            kind = tl.load(source + n, mask=there, other=-3)
            held = kind >= CARRIED
            from_carry = tl.maximum(kind, 0).to(tl.int64) * heads + g
            w0 = tl.load(carry[1] + from_carry, mask=held, other=0.0)
            tl.store(d_carry + from_carry * D + d, a * rate * w0, mask=some & held)
            if LEARNT:
                before = tl.load(carry[0] + from_carry * D + d, mask=some & held, other=0.0)
                before = tl.where(kind == GOES_ON, ys[u].to(tl.float32), before)
                moved = tl.where(some & (kind >= GOES_ON), xs[u].to(tl.float32) - before, 0.0)
                dw = -tl.sum(a * moved, 0) / tl.maximum(totals[u], 1.0)
                tl.store(dw_of + place, dw, mask=there)
