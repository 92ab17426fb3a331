"""Trees of arrays: micro-batches of a batch, choices, and reductions over devices.

Each reduction leaves its tree as it is if there are no mesh axes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxmem._checks import check_float, check_key, shown
from jaxmem.optim.accumulation import accumulation_dtype

Axes = tuple[str, ...]


def choose(keep, new, old):
    """`new` where the scalar `keep` is true, else `old`; None is always true."""
    if keep is None:
        return new
    return jax.tree.map(lambda a, b: b if a is b else _select(keep, a, b), new, old)


def _select(keep, new, old):
    # `where` would broadcast the predicate to the size of the leaf
    return jax.lax.select(keep, jnp.asarray(new), jnp.asarray(old))


def all_finite(tree):
    numbers = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # not the ids of rows
    checks = [jnp.isfinite(x).all() for x in filter(numbers, jax.tree.leaves(tree))]
    return jnp.stack(checks).all()


def total(tree, axes: Axes) -> Any:
    return jax.lax.psum(tree, axes) if axes else tree


def mean(tree, axes: Axes) -> Any:
    return jax.lax.pmean(tree, axes) if axes else tree


def any_of(flags, axes: Axes):
    """Whether a flag is set on any device; None stays None."""
    if flags is None:
        return None
    here = flags.any()
    return jax.lax.pmax(here.astype(jnp.int32), axes) > 0 if axes else here


def replicated(states, before, updated, axes: Axes, reduce=jax.lax.pmean):
    """The states of all devices reduced to one, or `before` without an update."""
    if not axes:
        return states
    one = jax.tree.map(lambda x: _reduced(x, axes, reduce), states)
    return choose(updated, one, before)


def _reduced(x, axes: Axes, reduce):
    """`reduce` of numbers; the largest of counts, and of keys, which are all equal."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.lax.pmax(jax.random.key_data(x), axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return reduce(x.astype(accumulation_dtype(x)), axes).astype(x.dtype)
    return jax.lax.pmax(x, axes)


def split_batch(batch, n: int):
    """Leaves [B, ...] as [n, B/n, ...]; ValueError names the leaf that cannot be."""
    check_sizes(batch, n)
    return jax.tree.map(lambda x: _strided(jnp.asarray(x), n), batch)


def _strided(x, n: int):
    # Micro-batch i holds examples i, i + n, i + 2n, ... If the batch is sharded, every
    # device thus has examples in each micro-batch, and nothing moves; a block of
    # consecutive examples would lie on a few of the devices.
    return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)


def check_sizes(batch, n: int) -> None:
    """Every leaf has the same size along axis 0, a multiple of n."""
    leaves = jax.tree.leaves_with_path(batch)
    shapes = {f"batch{keystr(path)}": jnp.shape(leaf) for path, leaf in leaves}
    if not shapes:
        raise ValueError(f"batch={shown(batch)} holds no arrays")
    first = next(iter(shapes))
    for name, shape in shapes.items():
        if not shape:
            raise ValueError(f"{name} is a scalar: an array has the batch on axis 0")
        if shape[0] != shapes[first][0]:
            raise ValueError(
                f"batch leaves of different batch size: {first} has "
                f"{shapes[first][0]} examples, {name} has {shape[0]}"
            )
    size = shapes[first][0]
    if size == 0 or size % n:
        raise ValueError(
            f"n={n} micro-batches of one size cannot be made of {first}: it has "
            f"{size} examples on axis 0 of {shapes[first]}"
        )


def split_keys(rng, n: int, axes: Axes = ()):
    """A key a micro-batch for each key of the tree; one micro-batch gets `rng`."""
    # With `axes` the index of the device is folded in first.
    jax.tree.map(functools.partial(check_key, "rng"), rng)
    if axes:
        device = jax.lax.axis_index(axes)
        rng = jax.tree.map(lambda key: jax.random.fold_in(key, device), rng)
    if n == 1:
        return jax.tree.map(lambda key: key[None], rng)
    return jax.tree.map(lambda key: jax.random.split(key, n), rng)


def weights_of(weight_fn: Callable | None, batches, n: int):
    """[n] in the default float dtype; None without a function."""
    if weight_fn is None:
        return None
    weights = jax.vmap(lambda batch: _known_weight(weight_fn(batch)))(batches)
    if getattr(weights, "shape", None) != (n,):
        shapes = jax.tree.map(lambda x: x.shape[1:], weights)
        raise ValueError(
            f"weight_fn must return a scalar for a micro-batch, got shape {shapes}"
        )
    return weights.astype(jnp.result_type(float))


def _known_weight(weight: Any) -> Any:
    """The weight; ValueError for one that is known now and is none."""
    if isinstance(weight, int | float | np.ndarray | np.generic):
        if np.shape(weight) == ():
            check_float("weight_fn(batch)", weight, at_least=0)
    return weight


def shares_of(weights, axes: Axes = ()):
    """w / sum(w); zeros if no micro-batch has a weight, NaN if one has none at all."""
    # of numbers that nobody knows before the step runs: then nothing is updated
    real = (weights >= 0) & jnp.isfinite(weights)
    weights = jnp.where(real, weights, jnp.full_like(weights, jnp.nan))
    # The devices' sums of w g are averaged, so the sums of w are averaged too.
    total = mean(weights.sum(), axes)
    return weights / jnp.where(total == 0, jnp.ones_like(total), total)
