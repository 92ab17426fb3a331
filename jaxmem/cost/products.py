"""A matrix product or a convolution of a jaxpr, as the roofline has products."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from jaxmem.cost.kernel import Product
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.ragged import groups, is_ragged
from jaxmem.ir.shards import WHOLE, Shardings


class _Axis(NamedTuple):
    """An axis of a product, or the elements of several that nobody cuts."""

    role: Literal["batch", "m", "n", "k"]
    size: int
    at: tuple[tuple[int, int], ...] = ()  # (an operand that has it, which of its axes)


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
    sizes, used = {"batch": 1, "m": 1, "n": 1, "k": 1}, set()
    for role, size, at in _axes(eqn):
        # an axis of the mesh shares the work once: weights that are sharded over that
        # of the examples are gathered
        own = {name for i, a in at for name in shardings.names(eqn.invars[i], a)}
        size = _parts(elements([size]), shardings.size(tuple(own - used)))
        used |= own
        sizes[role] *= _parts(size, n) if {*at} & {*enumerate(axes)} else size
    # what else is shared: the groups of rows, a result of operands that are whole
    sizes["m"] = _parts(sizes["m"], shardings.workers(eqn, without=used))
    wide = max((v.aval.dtype for v in eqn.invars[:2]), key=lambda d: d.itemsize)
    sides = sizes["batch"], sizes["m"], sizes["n"], sizes["k"]
    return Product(*sides, 8 * wide.itemsize, str(wide), library=True)


def _parts(size: int, n: int) -> int:
    return -(-size // n)


def _axes(eqn) -> Iterator[_Axis]:
    """In the order in which they take the axes of a mesh: of the result first."""
    if is_ragged(eqn):
        return _ragged(eqn)
    return _dot(eqn) if primitives.is_dot(eqn) else _convolution(eqn)


def _dot(eqn) -> Iterator[_Axis]:
    return _by_numbers(eqn, eqn.params["dimension_numbers"])


def _by_numbers(eqn, numbers, of_groups: Sequence[int] = ()) -> Iterator[_Axis]:
    """By the axes that are summed, and those of a batch."""
    summed, batched = numbers
    left, right = (v.aval.shape for v in eqn.invars[:2])
    for a, b in zip(*batched, strict=True):
        yield _Axis("batch", left[a], ((0, a), (1, b)))
    for a in {*range(len(left))} - {*summed[0], *batched[0]}:
        yield _Axis("m", left[a], ((0, a),))
    for b in {*range(len(right))} - {*summed[1], *batched[1], *of_groups}:
        yield _Axis("n", right[b], ((1, b),))
    for a, b in zip(*summed, strict=True):
        yield _Axis("k", left[a], ((0, a), (1, b)))


def _ragged(eqn) -> Iterator[_Axis]:
    """All rows by one matrix, since each of them is in one group.

    Where the groups are of what is summed, there is a product for each.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (rows,) = numbers.lhs_ragged_dimensions
    count = groups(eqn)
    dims = numbers.dot_dimension_numbers
    for axis in _by_numbers(eqn, dims, numbers.rhs_group_dimensions):
        if axis.role == "k" and axis.at[0] == (0, rows):
            yield _Axis("batch", count)
            axis = axis._replace(size=_parts(axis.size, count))
        yield axis


def _convolution(eqn) -> Iterator[_Axis]:
    """Output positions by output features, as if every tap met an element.

    Groups are side by side in one product, as in those of compiled modules.
    """
    spec = eqn.params["dimension_numbers"]
    (image, feature), (makes, takes) = spec.lhs_spec[:2], spec.rhs_spec[:2]
    made, kernel = eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape
    of_features = eqn.params["feature_group_count"] > 1
    of_images = eqn.params["batch_group_count"] > 1
    # images, or features that are read, lie beside the features that are made
    beside = ((0, feature),) * of_features + ((0, image),) * of_images
    yield _Axis("m", made[spec.out_spec[0]], ((0, image),) * (not of_images))
    yield _Axis("m", elements([made[a] for a in spec.out_spec[2:]]))
    yield _Axis("n", kernel[makes], ((1, makes), *beside))
    summed = ((1, takes), *((0, feature),) * (not of_features))
    yield _Axis("k", kernel[takes], summed)
    yield _Axis("k", elements([kernel[a] for a in spec.rhs_spec[2:]]))
