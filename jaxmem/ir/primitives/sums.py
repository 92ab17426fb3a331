"""Primitives that make an element of many: products, reductions, windows, sorts."""

from functools import partial

from jaxmem.ir.primitives.record import FIRST
from jaxmem.ir.primitives.record import PrimitiveKind as Kind
from jaxmem.ir.primitives.record import PrimitiveRecord as Record

_PRODUCT = (
    Record("conv_general_dilated", Kind.PRODUCT, bilinear=True),
    Record("dot_general", Kind.PRODUCT, bilinear=True),
    Record("ragged_dot_general", Kind.PRODUCT, bilinear=True),
)

_reduces = partial(Record, kind=Kind.REDUCTION)

_REDUCTION = (
    _reduces("argmax", exact=True),
    _reduces("argmin", exact=True),
    _reduces("reduce", sums=True, by_body=True),
    _reduces("reduce_and", combine="bitwise_and"),
    _reduces("reduce_max", exact=True, combine="max"),
    _reduces("reduce_min", exact=True, combine="min"),
    _reduces("reduce_or", combine="bitwise_or"),
    _reduces("reduce_prod", sums=True, combine="mul"),
    _reduces("reduce_sum", sums=True, combine="add", linear=FIRST),
    _reduces("reduce_xor", combine="bitwise_xor"),
)

_CUMULATIVE = (
    Record("cumlogsumexp", Kind.CUMULATIVE, sums=True),
    Record("cummax", Kind.CUMULATIVE, exact=True),
    Record("cummin", Kind.CUMULATIVE, exact=True),
    Record("cumprod", Kind.CUMULATIVE, sums=True),
    Record("cumsum", Kind.CUMULATIVE, sums=True, linear=FIRST),
)

_windows = partial(Record, kind=Kind.WINDOW)

_WINDOW = (
    _windows("reduce_window", sums=True, by_body=True),
    _windows("reduce_window_max", exact=True, saves_operand=True),
    _windows("reduce_window_min", exact=True),
    _windows("reduce_window_sum", sums=True),
    _windows("select_and_gather_add", exact=True),
    _windows("select_and_scatter_add", sums=True, keeps_zero=True),
)

_SORT = (
    Record("approx_top_k", Kind.SORT, exact=True),
    Record("sort", Kind.SORT, exact=True),
    Record("top_k", Kind.SORT, exact=True),
)

_names = "cholesky eigh geqrf householder_product lu qr svd triangular_solve".split()

_MATRIX = tuple(Record(name, Kind.MATRIX) for name in _names)

_TRANSFORM = (Record("fft", Kind.TRANSFORM),)

RECORDS = (
    *_PRODUCT,
    *_REDUCTION,
    *_CUMULATIVE,
    *_WINDOW,
    *_SORT,
    *_MATRIX,
    *_TRANSFORM,
)
