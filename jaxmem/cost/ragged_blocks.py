"""What a product of groups of rows costs a GPU, in blocks of rows and as XLA has it."""

import functools
import math
from collections.abc import Iterator

from jaxmem.chips import Rates
from jaxmem.cost.kernel import Product
from jaxmem.cost.roofline import product_seconds
from jaxmem.ir.ragged_blocks import RaggedShape, RowBlocks, ragged_shape
from jaxmem.ir.types import JaxprEqn

# Bytes that an iteration may hold: of those of a product's operands and result, or this
# many, which no step misses.
_SHARE, _LITTLE = 1 / 8, 2**25
_KERNELS = 5  # of an iteration: rows and matrices taken, a product, rows put, a counter
_SUMMED = 16  # blocks of an iteration whose sums are written one after another, at most
_SUM_BYTES = 4  # of an element of a sum over rows that is not complete


def blocks_of(eqn: JaxprEqn, rates: Rates) -> RowBlocks | None:
    """The fastest blocks for an equation; None where XLA's own form is as fast.

    None, too, of what is no product of groups of rows, or cannot be done in blocks.
    """
    shape = ragged_shape(eqn)
    if shape is None:
        return None
    dtype = eqn.invars[0].aval.dtype
    return _best(shape, dtype.itemsize, dtype.name, rates)


@functools.lru_cache(maxsize=1024)  # layers repeat each other
def _best(shape: RaggedShape, size: int, dtype: str, rates: Rates) -> RowBlocks | None:
    took = {
        form: _in_blocks(shape, form, size, dtype, rates)
        for form in _forms(shape, size)
    }
    best = min(took, key=lambda form: took[form])
    return best if took[best] < _by_masks(shape, size, dtype, rates) else None


def _forms(shape: RaggedShape, size: int) -> Iterator[RowBlocks]:
    """Blocks of some rows, as many at a time as there is memory for, or fewer."""
    matrices = shape.groups * shape.inner * shape.outer
    most = _SHARE * size * (shape.rows * (shape.inner + shape.outer) + matrices)
    most = max(most, _LITTLE)
    for rows in _powers(shape.rows):
        blocks = shape.rows // rows + shape.groups
        for together in _powers(min(blocks, _SUMMED) if shape.sums_rows else blocks):
            form = RowBlocks(rows, together)
            if together == 1 or _held(shape, form, size) <= most:
                yield form


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to the first that is not below `most`."""
    return [1 << i for i in range(math.ceil(math.log2(max(most, 1))) + 1)]


def _held(shape: RaggedShape, form: RowBlocks, size: int) -> float:
    """Bytes of an iteration."""
    rows = form.rows * (shape.inner + shape.outer)
    matrix = (_SUM_BYTES if shape.sums_rows else size) * shape.inner * shape.outer
    return form.together * (size * rows + matrix)


def _in_blocks(
    shape: RaggedShape, form: RowBlocks, size: int, dtype: str, rates: Rates
) -> float:
    """Seconds of all iterations."""
    rows, matrix = form.rows, shape.inner * shape.outer
    sizes = (shape.inner, shape.outer, rows)
    if not shape.sums_rows:
        sizes = (rows, shape.outer, shape.inner)
    product = Product(form.together, *sizes, 8 * size, dtype)
    # rows are taken by one kernel, read by the product, and put by a third
    moved = size * rows * 3 * (shape.inner + shape.outer)
    if shape.sums_rows:  # written, added to the sum so far, and written as the result
        moved += (4 * _SUM_BYTES + size) * matrix
    else:  # taken and read
        moved += 3 * size * matrix
    kernels = _KERNELS + (form.together if shape.sums_rows else 0)
    one = product_seconds(product, rates) + kernels * rates.launch
    one += form.together * moved / rates.bandwidth
    return form.count(shape.rows, shape.groups) // form.together * one


def _by_masks(shape: RaggedShape, size: int, dtype: str, rates: Rates) -> float:
    """Seconds of XLA:GPU's own form: the rows of each group, those of others zero."""
    copied, (m, n, k) = shape.inner, (shape.rows, shape.outer, shape.inner)
    if shape.sums_rows:
        copied, (m, n, k) = copied + shape.outer, (shape.inner, shape.outer, shape.rows)
    product = Product(shape.groups, m, n, k, 8 * size, dtype)
    moved = 2 * size * shape.groups * shape.rows * copied
    return product_seconds(product, rates) + moved / rates.bandwidth
