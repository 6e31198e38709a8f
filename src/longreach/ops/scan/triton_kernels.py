# mypy: ignore-errors
"""The Triton kernels of scan: rows in chunks of C, and within a chunk in pieces of at most T rows.

S is the sum of the rows by rate^age, W the sum of rate^age, V = dW / d rate; y = S / W. Rows that continue one another
form a run, and so do neighbouring rows of padding. A piece lies in one run: S_i = sum_j rate^(i-j) x_j + rate^(i+1)
S_before, so one product with a lower triangular matrix gives all its rows. All terms of W and V are positive: rates
near 1 lose no digits.

A chunk changes the state before it linearly. So `ends` takes the chunks alone, `chain` combines their effects in order,
and `means` computes all rows from the state at the start of their chunk. The backward does the same from the last row
to the first: `ends_back`, `chain`, `gradients`. Rows of one chunk need only the last step, with a program for each run.

Bytes, in sizes of x: forward 2 reads + 1 write; backward reads dy twice and x once, and writes dx. For the
gradient of the decay the forward also writes an fp32 state for each piece, and the backward reads it. `ends` and
`ends_back` stop where rate^age is below 2^-40, beneath fp32's precision: a half-life of h tokens needs 40 h rows.
That supposes rows of similar size: one that is 2^16 times as large as those after it loses digits there. A NaN further
back than that stays in its own chunk.

`few` is a kernel for few rows without gradients, such as those of a decode step: it needs no table and no description.

`runs` describes the rows, int32 [R] each:
source: where the state before a row comes from: b >= 0: the carry of sequence b; -1: the row before; -2: nothing;
    -3: the row is padding.
last: the sequence that ends with this row, else -1.
first: the row of the chunk where the run of this row begins, -1 if it began before the chunk.
stop: the row of the chunk where the run of this row ends, C if it goes on after the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.triton_carry import next_mean

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
CARRIED = tl.constexpr(0)
GOES_ON = tl.constexpr(-1)
FRESH = tl.constexpr(-2)
PADDING = tl.constexpr(-3)
FORGOTTEN = tl.constexpr(40.0)  # a weight below 2^-40 of the latest row's is left out of a chunk's effect


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _sequence(seq, n, rows, sequences):
    """int32 [C]: the sequence of each row, -1 for padding and outside the call, and whether it is that."""
    own = tl.load(seq + n, mask=(n >= 0) & (n < rows), other=-1)
    outside = (own < 0) | (own >= sequences)
    return tl.where(outside, -1, own).to(tl.int32), outside


@triton.jit
def runs(seq, pos, source, last, first, stop, rows, sequences, C: tl.constexpr):
    """Describe the rows of one chunk, see above."""
    i = tl.arange(0, C)
    n = tl.program_id(0) * C + i
    there = n < rows
    own, outside = _sequence(seq, n, rows, sequences)
    before, outside_before = _sequence(seq, n - 1, rows, sequences)
    after, outside_after = _sequence(seq, n + 1, rows, sequences)
    kind = tl.where(own != before, own, GOES_ON)
    kind = tl.where(tl.load(pos + n, mask=there, other=0) == 0, FRESH, kind)
    kind = tl.where(outside, PADDING, kind)
    final = own != after
    fresh_after = tl.load(pos + n + 1, mask=n + 1 < rows, other=0) == 0
    begins = tl.where(outside, ~outside_before | (n == 0), kind != GOES_ON)
    ends = tl.where(outside, ~outside_after | (n + 1 == rows), final | fresh_after)
    tl.store(source + n, kind, mask=there)
    tl.store(last + n, tl.where(final, own, -1), mask=there)
    tl.store(first + n, tl.associative_scan(tl.where(begins, i, -1), 0, _larger), mask=there)
    tl.store(stop + n, tl.associative_scan(tl.where(ends, i, C), 0, _smaller, reverse=True), mask=there)


@triton.jit(do_not_specialize=["rows", "sequences"])
def few(
    x, row_stride, head_stride, rate_of, seq, pos, carry, y, ended, rows, sequences, heads,
    FORGETS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R2: tl.constexpr,
):  # fmt: skip
    """Program (n, channels, KV head): y of sequence n's rows, one after another, and the state after them. Where row n
    is padding: zeros in y. R2: a power of two, at least `rows`."""
    n, g = tl.program_id(0), tl.program_id(2)
    d, some = _channels(D, BD)
    i = tl.arange(0, R2)
    own, _ = _sequence(seq, i, rows, sequences)
    at = tl.min(tl.where(own == n, i, R2), 0)
    end = at + tl.sum((own == n).to(tl.int32), 0)
    if n < sequences:
        rate = 1.0
        if FORGETS:
            rate = tl.load(rate_of + g).to(tl.float32)
        place = n.to(tl.int64) * heads + g
        begins = (at < end) & (tl.load(pos + at, mask=at < end, other=1) == 0)  # then the carry is not read
        mean = tl.load(carry[0] + place * D + d, mask=some & ~begins, other=0.0)
        weight = tl.load(carry[1] + place, mask=~begins, other=0.0)
        while at < end:
            if tl.load(pos + at) == 0:
                mean = tl.zeros((BD,), tl.float32)
                weight = 0.0
            row = at.to(tl.int64)
            new = tl.load(x + row * row_stride + g.to(tl.int64) * head_stride + d, mask=some, other=0.0)
            held = rate * weight
            mean = next_mean(new.to(tl.float32), mean, held)
            weight = 1.0 + held
            tl.store(y + (row * heads + g) * D + d, mean.to(y.dtype.element_ty), mask=some)
            at += 1
        tl.store(ended[0] + place * D + d, mean, mask=some)
        tl.store(ended[1] + place, weight, mask=tl.program_id(1) == 0)
    padding = (n < rows) & (tl.sum(tl.where(i == n, own, 0), 0) < 0)
    tl.store(y + (n.to(tl.int64) * heads + g) * D + d, 0.0, mask=some & padding)


@triton.jit
def powers(rate_of, table, C: tl.constexpr):
    """table fp32 [G, 4, C+1], for n in 0..C: rate^n, its derivative, and the sums of both over 0..n-1.

    fp64: an error in rate^n would return at each piece.
    """
    g = tl.program_id(0)
    n = tl.arange(0, C)
    rate = tl.load(rate_of + g).to(tl.float64)
    power = tl.where(n == 0, 1.0, tl.exp2(n.to(tl.float64) * tl.log2(rate)))
    slope = (n + 1) * power  # of rate^(n+1)
    to = table + g * 4 * (C + 1)
    tl.store(to + n + 1, (power * rate).to(tl.float32))
    tl.store(to + C + 2 + n, slope.to(tl.float32))
    tl.store(to + 2 * (C + 1) + n + 1, tl.cumsum(power, 0).to(tl.float32))
    tl.store(to + 3 * (C + 1) + n + 1, (tl.cumsum(slope, 0) - slope).to(tl.float32))
    tl.store(to, 1.0)
    for k in tl.static_range(1, 4):
        tl.store(to + k * (C + 1), 0.0)


@triton.jit
def _times(weights, x):
    """weights @ x in fp32, for weights in [0, 1]. 16-bit x: two products, as 8 or 11 bits of a weight are too few."""
    if x.dtype == tl.float32:
        product = tl.dot(weights, x, input_precision="tf32x3")
    else:
        scale: tl.constexpr = 32768.0 if x.dtype == tl.float16 else 1.0  # keeps small weights in the range of fp16
        scaled = weights * scale
        high = scaled.to(x.dtype)
        low = (scaled - high.to(tl.float32)).to(x.dtype)
        product = tl.dot(high, x, tl.dot(low, x)) * (1.0 / scale)
    return product


@triton.jit
def _channels(D: tl.constexpr, BD: tl.constexpr):
    """The channels of a program and which of them there are."""
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    some = d < D if D % BD != 0 else tl.full((BD,), True, tl.int1)
    return d, some


@triton.jit
def _carried_mean(carry, kind, g, heads, d, some, D: tl.constexpr):
    """The mean [BD] and weight of the carry of sequence `kind`, 0 if it is none."""
    held = kind >= CARRIED
    place = tl.maximum(kind, 0).to(tl.int64) * heads + g
    mean = tl.load(carry[0] + place * D + d, mask=some & held, other=0.0)
    return mean, tl.load(carry[1] + place, mask=held, other=0.0)


@triton.jit
def _carried(carry, kind, g, heads, d, some, D: tl.constexpr):
    """S [BD] and W of the carry of sequence `kind`, 0 if it is none."""
    mean, weight = _carried_mean(carry, kind, g, heads, d, some, D)
    return mean * weight, weight


@triton.jit
def _weighted(acc, x, row_stride, at, factors, d, some):
    """acc [T, BD] plus T rows of x from `at` on by their factors; rows whose factor is 0 are not read."""
    i = tl.arange(0, factors.shape[0])
    cells = x + at.to(tl.int64) * row_stride + i[:, None] * row_stride + d[None, :]
    tile = tl.load(cells, mask=(factors != 0.0)[:, None] & some[None, :], other=0.0)
    return acc + factors[:, None] * tile.to(tl.float32)


@triton.jit
def _remembered(of):
    """How many rows weigh 2^-40 or more at the last of them."""
    rate = tl.load(of + 1)
    return tl.where(rate < 1.0, tl.minimum(-1.0 / tl.log2(rate) * FORGOTTEN, 1e9), 1e9).to(tl.int32) + 1


@triton.jit
def _store_effect(effects, chunk, g, heads, s, w, v, f, h, d, some, D: tl.constexpr):
    place = chunk.to(tl.int64) * heads + g
    tl.store(effects[0] + place * D + d, s, mask=some)
    if tl.program_id(1) == 0:
        tl.store(effects[1] + place * 4, w)
        tl.store(effects[1] + place * 4 + 1, v)
        tl.store(effects[1] + place * 4 + 2, f)
        tl.store(effects[1] + place * 4 + 3, h)


@triton.jit
def ends(
    x, row_stride, head_stride, table, source, first, carry, effects, heads, C,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The effect of each chunk but the last: S, W and V at its end if it begins from nothing, and f, h: S + f S',
    W + f W', V + h W' + f V' if it begins from S', W', V'. effects: S [chunks, G, D], the others [chunks, G, 4]."""
    g, chunk = tl.program_id(0), tl.program_id(2)
    i = tl.arange(0, T)
    d, some = _channels(D, BD)
    of = table + g * 4 * (C + 1)
    found = tl.load(first + chunk * C + C - 1)
    start = tl.maximum(found, 0)
    kind = tl.load(source + chunk * C + start)
    acc = tl.zeros((T, BD), tl.float32)
    # from the last row: `means` finds the first ones in the L2 cache
    for age in range(0, tl.minimum(C - start, _remembered(of)), T):
        n = C - T - age + i
        factors = tl.load(of + C - 1 - n, mask=(n >= start) & (kind != PADDING), other=0.0)
        acc = _weighted(acc, x + g.to(tl.int64) * head_stride, row_stride, chunk * C + C - T - age, factors, d, some)
    s = tl.sum(acc, 0)
    entry = of + C - start
    reach, slope = tl.load(entry), tl.load(entry + C + 1)
    total, total_slope = tl.load(entry + 2 * (C + 1)), tl.load(entry + 3 * (C + 1))
    s0, w0 = _carried(carry, kind, g, heads, d, some, D)
    s += reach * s0
    real = kind != PADDING
    w = tl.where(real, total + reach * w0, 0.0)
    v = tl.where(real, total_slope + slope * w0, 0.0)
    on = kind == GOES_ON
    f, h = tl.where(on, reach, 0.0), tl.where(on, slope, 0.0)
    _store_effect(effects, chunk, g, heads, s, w, v, f, h, d, some, D)


@triton.jit
def chain(effects, begins, chunks, heads, BACK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, U: tl.constexpr):
    """The state with which each chunk begins, from the chunks' effects. BACK: from the last chunk to the first.
    The effects of U chunks are read at once."""
    sums, scalars = effects
    sums_to, scalars_to = begins
    g = tl.program_id(0)
    d, some = _channels(D, BD)
    s = tl.zeros((BD,), tl.float32)
    w, v = 0.0, 0.0
    for at in range(0, chunks, U):
        places, parts, ws, vs, fs, hs = (), (), (), (), (), ()
        for u in tl.static_range(U):
            there = at + u < chunks - 1  # nothing follows the last one
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
            own = there & (tl.program_id(1) == 0)
            tl.store(scalars_to + places[u] * 4, w, mask=own)
            tl.store(scalars_to + places[u] * 4 + 1, v, mask=own)
            v = vs[u] + hs[u] * w + fs[u] * v
            w = ws[u] + fs[u] * w
            s = tl.where(fs[u] == 0.0, parts[u], parts[u] + fs[u] * s)


@triton.jit
def means(
    x, row_stride, head_stride, table, source, last, first, stop, carry, begins, y, weights, pieces, ended, rows, heads,
    C, BEGUN: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """y [R, G, D], weights (W, V) [G, R] and the state (mean [B, G, D], weight [B, G]) after last rows.

    KEEP: also S before each piece that continues a run, pieces fp32 [ceil(R / T), G, D], at the piece's first row / T.
    T rows hold the beginning of one such piece at most.
    BEGUN: a program for each chunk, from its state in `begins`. Else there is one chunk, and a program for each row:
    it computes the run that begins there, if one does.
    """
    g, lead = tl.program_id(0), tl.program_id(1) == 0
    i = tl.arange(0, T)
    d, some = _channels(D, BD)
    of = table + g * 4 * (C + 1)
    age = i[:, None] - i[None, :]
    lower = tl.load(of + age, mask=age >= 0, other=0.0)
    reach, slope = tl.load(of + i + 1), tl.load(of + C + 2 + i)
    sums_of, slopes_of = of + 2 * (C + 1), of + 3 * (C + 1)
    total, total_slope = tl.load(sums_of + i + 1), tl.load(slopes_of + i + 1)
    s = tl.zeros((BD,), tl.float32)
    w, v = 0.0, 0.0
    if BEGUN:
        chunk = tl.program_id(2)
        base = chunk * C
        at, end = base, tl.minimum(base + C, rows)
        place = chunk.to(tl.int64) * heads + g
        s = tl.load(begins[0] + place * D + d, mask=some, other=0.0)
        w = tl.load(begins[1] + place * 4)
        v = tl.load(begins[1] + place * 4 + 1)
    else:
        base, at = 0, tl.program_id(2)
        end = tl.where(tl.load(first + at) == at, tl.load(stop + at) + 1, at)
    while at < end:
        kind = tl.load(source + at)
        size = tl.minimum(tl.minimum(base + tl.load(stop + at) + 1, end) - at, T)
        there = (i < size)[:, None] & some[None, :]
        tile = x + at.to(tl.int64) * row_stride + g.to(tl.int64) * head_stride
        tile = tl.load(tile + i[:, None] * row_stride + d[None, :], mask=there & (kind != PADDING), other=0.0)
        if kind != GOES_ON:
            s, w = _carried(carry, kind, g, heads, d, some, D)
            v = 0.0
        row = at.to(tl.int64) * heads + g
        if KEEP:
            if kind == GOES_ON:
                tl.store(pieces + ((at // T).to(tl.int64) * heads + g) * D + d, s, mask=some)
        real = (kind != PADDING).to(tl.float32)
        sums = _times(lower, tile) + reach[:, None] * s[None, :]
        ws = real * (total + reach * w)
        vs = real * (total_slope + slope * w + reach * v)
        mean = sums * (1.0 / tl.maximum(ws, 1.0))[:, None]  # W is at least 1, and 0 for padding
        tl.store(y + row * D + i[:, None] * (heads * D) + d[None, :], mean.to(y.dtype.element_ty), mask=there)
        n = g.to(tl.int64) * rows + at + i
        tl.store(weights[0] + n, ws, mask=(i < size) & lead)
        tl.store(weights[1] + n, vs, mask=(i < size) & lead)
        s = tl.sum(tl.where(i[:, None] == size - 1, sums, 0.0), 0)
        part = tl.load(of + size)
        v = tl.load(slopes_of + size) + tl.load(of + C + 1 + size) * w + part * v
        w = tl.load(sums_of + size) + part * w
        at += size
        b = tl.load(last + at - 1)
        if b >= 0:
            to = b.to(tl.int64) * heads + g
            tl.store(ended[0] + to * D + d, s * (1.0 / w), mask=some)
            tl.store(ended[1] + to, w, mask=lead)


@triton.jit
def _inverse(w, n, there):
    """1 / W of rows, and 0 for padding."""
    total = tl.load(w + n, mask=there, other=0.0)
    return tl.where(total > 0.0, 1.0 / tl.maximum(total, 1.0), 0.0)


@triton.jit
def ends_back(
    dy, d_ended, w_of, table, last, stop, effects, rows, heads, C,
    ENDED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The effect of each chunk but the first on gradients of S, which pass from later rows to earlier; as `ends`."""
    g, chunk = tl.program_id(0), tl.program_id(2) + 1
    i = tl.arange(0, T)
    d, some = _channels(D, BD)
    of, w = table + g * 4 * (C + 1), w_of + g.to(tl.int64) * rows
    base = chunk * C
    end = tl.load(stop + base)
    acc = tl.zeros((T, BD), tl.float32)
    for step in range(0, tl.minimum(tl.minimum(end + 1, C), _remembered(of)), T):
        there = (step + i <= end) & (step + i < C)
        factors = tl.load(of + step + i, mask=there, other=0.0) * _inverse(w, base + step + i, there)
        acc = _weighted(acc, dy + g * D, heads * D, base + step, factors, d, some)
    a = tl.sum(acc, 0)
    if ENDED:
        if end < C:
            a += _given(d_ended, tl.load(last + base + end), w, base + end, g, heads, d, some, D) * tl.load(of + end)
    f = tl.where(end == C, tl.load(of + C), 0.0)
    _store_effect(effects, chunk, g, heads, a, 0.0, 0.0, f, 0.0, d, some, D)


@triton.jit
def _given(d_ended, b, w, n, g, heads, d, some, D: tl.constexpr):
    """[BD]: the gradient of S of row n through the state after it, if sequence b >= 0 ends there."""
    place = tl.maximum(b, 0).to(tl.int64) * heads + g
    return tl.load(d_ended + place * D + d, mask=some & (b >= 0), other=0.0) * _inverse(w, n, b >= 0)


@triton.jit
def gradients(
    dy, d_ended, x, row_stride, head_stride, pieces, w_of, table, source, last, first, stop, carry, begins, dx, d_carry,
    dw_of, rows, heads, C, BEGUN: tl.constexpr, ENDED: tl.constexpr, LEARNT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Gradients of x [R, G, D], of the carry's mean [B, G, D] and, if LEARNT, of each row's W [D / BD, G, R], in parts
    that are to be added. Programs and pieces as those of `means`, from the last piece to the first.

    With A_t the gradient of S_t: dx_t = A_t and dW_t = -A_t (x_t - y_(t-1)) / W_t; y_(t-1) does not depend on W_t. It
    is computed again from S before the piece: y as stored has the precision of x, too little where x has an offset.
    """
    g = tl.program_id(0)
    i = tl.arange(0, T)
    d, some = _channels(D, BD)
    of, w = table + g * 4 * (C + 1), w_of + g.to(tl.int64) * rows
    dw = dw_of + (tl.program_id(1).to(tl.int64) * heads + g) * rows
    ahead = i[None, :] - i[:, None]
    upper = tl.load(of + ahead, mask=ahead >= 0, other=0.0)
    earlier = tl.load(of - 1 - ahead, mask=ahead < 0, other=0.0)  # rate^(i-1-j), of S before row i
    faded = tl.load(of + i)
    a = tl.zeros((BD,), tl.float32)
    if BEGUN:
        chunk = tl.program_id(2)
        base = chunk * C
        end = tl.minimum(base + C, rows)
        start = base
        place = chunk.to(tl.int64) * heads + g
        a = tl.load(begins[0] + place * D + d, mask=some, other=0.0)
    else:
        base, end = 0, tl.program_id(2) + 1
        start = tl.where(tl.load(stop + end - 1) == end - 1, tl.load(first + end - 1), end)
    while end > start:
        at = base + tl.maximum(tl.load(first + end - 1), 0)
        at += (end - 1 - at) // T * T
        size = end - at
        kind = tl.load(source + at)
        on = (tl.load(stop + end - 1) > end - 1 - base).to(tl.int32)  # the run goes on after this piece
        if on == 0:
            a = tl.zeros((BD,), tl.float32)
            if ENDED:
                a = _given(d_ended, tl.load(last + end - 1), w, end - 1, g, heads, d, some, D)
        here = i < size
        there = here[:, None] & some[None, :]
        row = at.to(tl.int64) * heads + g
        cells = i[:, None] * (heads * D) + d[None, :]
        inverse = _inverse(w + at, i, here)
        part = tl.load(of + size - 1 + on - i, mask=here, other=0.0)
        real = there & (kind != PADDING)
        from_x = x + at.to(tl.int64) * row_stride + g.to(tl.int64) * head_stride
        if LEARNT:  # read early: all loads of a piece are under way together
            follows = here & ((i > 0) | (kind == GOES_ON)) & (kind != PADDING)
            own = tl.load(from_x + i[:, None] * row_stride + d[None, :], mask=real, other=0.0)
            held = pieces + ((at // T).to(tl.int64) * heads + g) * D + d
            s = tl.load(held, mask=some & (kind == GOES_ON), other=0.0)
            if kind >= CARRIED:
                s, _ = _carried(carry, kind, g, heads, d, some, D)
        grads = _times(upper * inverse[None, :], tl.load(dy + row * D + cells, mask=real, other=0.0))
        grads += part[:, None] * a[None, :]
        tl.store(dx + row * D + cells, grads.to(dx.dtype.element_ty), mask=there)
        a = tl.sum(tl.where(i[:, None] == 0, grads, 0.0), 0)
        if LEARNT:
            before = _inverse(w + at - 1, i, follows)[:, None] * (_times(earlier, own) + faded[:, None] * s[None, :])
            moved = tl.sum(grads * tl.where(follows[:, None], own.to(tl.float32) - before, 0.0), 1)
            tl.store(dw + at + i, -moved * inverse, mask=here & ((i > 0) | (kind < CARRIED)))
        if kind >= CARRIED:
            mean0, w0 = _carried_mean(carry, kind, g, heads, d, some, D)
            to = d_carry + (kind.to(tl.int64) * heads + g) * D + d
            tl.store(to, a * (tl.load(of + 1) * w0), mask=some)
            if LEARNT:
                x0 = tl.load(from_x + d, mask=some, other=0.0).to(tl.float32)
                tl.store(dw + at, -tl.sum(a * (x0 - mean0), 0) * _inverse(w, at, True))
        end = at
