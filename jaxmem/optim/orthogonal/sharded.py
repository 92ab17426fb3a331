"""Sharded matrices: one exchange before the iterations, one after.

Everything is done inside `jax.shard_map` with the leaf's own sharding, so that no more
is sent than what is written here. A consistent permutation of rows or of columns goes
through the iterations unchanged, so how merged axes are sharded does not matter.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jaxmem.optim.orthogonal.matrices import MatrixAxes

Names = tuple[str, ...]
Rule = Callable[..., Any]  # (matrix [m, n]; axes=()) -> matrix


class SidesOverMesh(NamedTuple):
    """Names of the mesh axes over which the sides of a leaf's matrices are sharded."""

    rows: Names
    columns: Names

    @property
    def names(self) -> Names:
        return self.rows + self.columns


def sides_over_mesh(sharding: NamedSharding, axes: MatrixAxes) -> SidesOverMesh:
    """The mesh axes that cut the matrices of a leaf."""
    of = lambda dims: tuple(n for d in dims for n in names_of(sharding, d))
    return SidesOverMesh(of(axes.rows), of(axes.columns))


def names_of(sharding: NamedSharding, axis: int) -> Names:
    """The mesh axes over which an axis of an array is sharded."""
    spec = sharding.spec
    names = spec[axis] if axis < len(spec) else None
    listed = names if isinstance(names, tuple) else (names,)
    sizes = sharding.mesh.shape
    return tuple(n for n in listed if n is not None and sizes[n] > 1)


def on_shards(
    rule: Rule, x: jax.Array, axes: MatrixAxes, sharding: NamedSharding, gram: bool
) -> jax.Array:
    """`rule` of each matrix of a leaf that is sharded so.

    Two matrices or more are dealt over the devices that share them. One is gathered, or
    with `gram` its longer side alone is sharded, and its Gram matrix summed.
    """
    sides = sides_over_mesh(sharding, axes)
    shape = [n // _size(sharding, names_of(sharding, d)) for d, n in enumerate(x.shape)]

    def local(x):
        y = axes.matrices(x)
        if len(axes.batch) and y.shape[0] > 1:
            y = _dealt(rule, y, sides, len(axes.batch))
        else:
            one = partial(_shared if gram else _gathered, rule, sides=sides)
            y = over_batch(one, len(axes.batch))(y)
        return axes.leaf(y, shape)

    spec = sharding.spec
    # what is gathered is the same on all devices, which the types do not know
    run = jax.shard_map(
        local, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return run(x)


def over_batch(one: Callable[..., Any], batch: int) -> Callable[..., Any]:
    """`one` of each matrix of stacks with so many leading axes, one after another."""
    if not batch:
        return one
    inner = over_batch(one, batch - 1)
    return lambda *stacks: lax.map(lambda xs: inner(*xs), stacks)


def _size(sharding: NamedSharding, names: Names) -> int:
    size = 1
    for name in names:
        size *= sharding.mesh.shape[name]
    return size


def _dealt(rule: Rule, x, sides: SidesOverMesh, batch: int):
    """Each device has some of the matrices, whole, for the time of the iterations."""
    names, matrices, local = sides.names, x.shape[0], x.shape[-2:]
    if not names:
        return over_batch(rule, batch)(x)
    devices = lax.axis_size(names)
    more = -matrices % devices
    x = jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) if more else x
    exchange = partial(
        lax.all_to_all, axis_name=names, split_axis=0, concat_axis=0, tiled=True
    )
    x = _joined(exchange(x.reshape(devices, -1, *x.shape[1:])), sides)
    x = exchange(_parted(over_batch(rule, batch)(x), local))
    return x.reshape(-1, *x.shape[2:])[:matrices]


def _gathered(rule: Rule, x, sides: SidesOverMesh):
    """Each device has the whole matrix, and keeps its part of the result."""
    if not sides.names:
        return rule(x)
    u = rule(_joined(lax.all_gather(x, sides.names), sides))
    first = [lax.axis_index(n) * k for n, k in zip(sides, x.shape, strict=True)]
    return lax.dynamic_slice(u, first, x.shape)


def _joined(parts, sides: SidesOverMesh):
    """Matrices [*batch, m, n] of their parts [devices, *batch, rows, columns]."""
    rows, columns = map(lax.axis_size, sides)
    x = parts.reshape(rows, columns, *parts.shape[1:])
    x = jnp.moveaxis(x, (0, 1), (-4, -2))
    return x.reshape(*x.shape[:-4], rows * x.shape[-3], columns * x.shape[-1])


def _parted(x, local: Sequence[int]):
    """The devices' parts of matrices, each of the size `local`."""
    m, n = x.shape[-2:]
    rows, columns = m // local[0], n // local[1]
    x = x.reshape(*x.shape[:-2], rows, local[0], columns, local[1])
    x = jnp.moveaxis(x, (-4, -2), (0, 1))
    return x.reshape(rows * columns, *x.shape[2:])


def _shared(rule: Rule, x, sides: SidesOverMesh):
    """Each device has all of the smaller side and some of the larger one."""
    whole = [n * lax.axis_size(names) for n, names in zip(x.shape, sides, strict=True)]
    small, large = (0, 1) if whole[0] <= whole[1] else (1, 0)
    names, length = sides[small], x.shape[large]
    if names:
        more = [(0, 0), (0, 0)]
        more[large] = (0, -length % lax.axis_size(names))  # zeros change no product
        x = lax.all_to_all(jnp.pad(x, more), names, large, small, tiled=True)
    x = rule(x, axes=sides.names, wide=small == 0)
    if names:
        x = lax.all_to_all(x, names, small, large, tiled=True)
        x = lax.slice_in_dim(x, 0, length, axis=large)
    return x
