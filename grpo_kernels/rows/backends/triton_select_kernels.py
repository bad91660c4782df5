"""The Triton kernel of sparse gradients: which columns of a row are taken, see `rows/selection.py`."""

import triton
import triton.language as tl

from ..selection import BITS as _WHOLE_BITS
from .triton_gradient import _factors
from .triton_rows import _NEG_INF, _fma, _k, _u
from .triton_sparse_kernels import _at

_BITS = tl.constexpr(_WHOLE_BITS)
_WHOLE_STEP = tl.constexpr(2.0**_WHOLE_BITS)


# fmt: off
@triton.jit(do_not_specialize=[
    "stride", "targets", "maxima", "sums", "starts", "inv_temperature", "scale", "softcap", "per_unit", "masses", "ids", "values", "capacity",
])
def _select_kernel(
    logits, stride: tl.int64, V,                                           # [n, V]
    targets, maxima, sums, starts, inv_temperature, scale, softcap, per_unit,  # [n], n programs
    masses, ids, values, capacity,                                         # [n], or None and [n, capacity] twice
    SHAPE: tl.constexpr, ROW_TEMPERATURE: tl.constexpr, ALIGNED: tl.constexpr, ACCESSES: tl.constexpr, LANES: tl.constexpr,
    COLS: tl.constexpr,
):
    BLOCK: tl.constexpr = ACCESSES * LANES * COLS
    i = tl.program_id(0).to(tl.int64)
    inv_t = inv_temperature
    if ROW_TEMPERATURE:
        inv_t = tl.load(inv_temperature + i)
    k = _k(scale, softcap, inv_t, SHAPE)
    m = tl.load(maxima + i)
    s = tl.load(sums + i)
    usable = (tl.abs(m) < -_NEG_INF) & (tl.abs(1.0 / s) < -_NEG_INF)
    # As the gradient has them: what it makes of a slope of 1.
    c, b, inverse, _, _ = _factors(tl.div_rn(m, k), s, k, -1.0, 0.0, 0.0, 0.0, 0)
    target = tl.load(targets + i)
    row = logits + _at(i, stride, ALIGNED)
    before = tl.zeros((), tl.int64)  # where the running sum is
    if starts is not None:
        before = tl.load(starts + i)
    count = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < V
        x = tl.load(row + cols, mask=inside, other=0.0)
        # -inf goes in after u: tanh and the mirror would make a number, or +inf, of it.
        u = tl.where(inside, _u(x, scale, softcap, SHAPE), _NEG_INF)
        units = tl.where(usable, tl.exp2(_fma(u, c, -b)) * inverse * per_unit, 0.0)
        exact = (inside & (cols == target)) | (units >= _WHOLE_STEP)
        mass = tl.where(exact, 0.0, units).to(tl.int32).to(tl.int64)
        after = before + tl.sum(mass, axis=0)
        if ids is not None:
            # Few tiles have a column that is taken: the others cost a sum and no scan.
            if ((before >> _BITS) != (after >> _BITS)) | (tl.max(exact.to(tl.int32), axis=0) > 0):
                running = before + tl.cumsum(mass, axis=0)
                taken = (exact | ((running >> _BITS) != ((running - mass) >> _BITS))).to(tl.int32)
                place = count + tl.cumsum(taken, axis=0) - 1
                here = (taken > 0) & (place < capacity)
                to = i * capacity + place
                tl.store(ids + to, cols, mask=here)
                tl.store(values + to, x.to(tl.float32), mask=here)
                count += tl.sum(taken, axis=0)
        before = after
    if masses is not None:
        tl.store(masses + i, before)
# fmt: on
