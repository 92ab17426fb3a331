"""A matrix product or a convolution of a jaxpr, as the roofline has products."""

from collections.abc import Sequence

from jaxmem.cost.kernel import Product
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.ragged import is_ragged, ragged_flops
from jaxmem.ir.shards import WHOLE, Shardings


def product_of(
    eqn, shardings: Shardings = WHOLE, axes: Sequence[int | None] = (), n: int = 1
) -> Product:
    """One device's share of a product, or of one of `n` parts of it.

    Args:
      eqn: a matmul, a convolution, or a product of groups of rows.
      shardings: how its arrays are sharded over devices.
      axes: of each operand the axis that is cut, or None; empty where none is.
      n: how many parts it is cut into.
    """
    shapes = [list(v.aval.shape) for v in eqn.invars[:2]]
    for shape, axis in zip(shapes, axes, strict=False):
        if axis is not None:
            shape[axis] = -(-shape[axis] // n)
    if is_ragged(eqn):
        batch, m, k, columns = _ragged(eqn, *shapes)
    elif primitives.is_dot(eqn):
        batch, m, k, columns = _dot(eqn, *shapes)
    else:
        batch, m, k, columns = _convolution(eqn, *shapes)
    # devices share batches, and then rows: any other way leaves about as much to each
    workers = shardings.workers(eqn)
    each = -(-batch // workers)
    m = max(1, round(m * batch / (workers * each)))
    wide = max((v.aval.dtype for v in eqn.invars[:2]), key=lambda d: d.itemsize)
    return Product(each, m, columns, k, 8 * wide.itemsize, str(wide), library=True)


def _dot(eqn, lhs: list[int], rhs: list[int]) -> tuple[int, int, int, int]:
    (summed, _), (batched, _) = eqn.params["dimension_numbers"]
    k, batch = (elements([lhs[a] for a in axes]) for axes in (summed, batched))
    both = max(1, k * batch)
    return batch, elements(lhs) // both, k, elements(rhs) // both


def _convolution(eqn, lhs: list[int], rhs: list[int]) -> tuple[int, int, int, int]:
    """Output positions by output features, as if every tap met an element."""
    groups = eqn.params["feature_group_count"]
    axis = eqn.params["dimension_numbers"].rhs_spec[0]
    whole, kernel = (v.aval.shape for v in eqn.invars[:2])
    share = elements(lhs) / max(1, elements(whole))
    rows = share * elements(eqn.outvars[0].aval.shape) / max(1, kernel[axis])
    taps, features = elements(rhs) // max(1, rhs[axis]), rhs[axis] // groups
    return groups, round(rows), taps, features


def _ragged(eqn, lhs: list[int], rhs: list[int]) -> tuple[int, int, int, int]:
    """All rows by one matrix, since each of them is in one group."""
    k = max(1, elements(lhs) // lhs[0])
    columns = ragged_flops(eqn) / (2.0 * elements(eqn.invars[0].aval.shape))
    return 1, lhs[0], k, round(columns)
