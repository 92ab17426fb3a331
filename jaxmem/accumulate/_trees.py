"""Trees of arrays: a choice between two, and reductions over the devices of a map.

Each reduction leaves its tree as it is if there are no mesh axes.
"""

from typing import Any

import jax
import jax.numpy as jnp

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
    """A scalar: no leaf holds an infinity or a NaN."""
    checks = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return jnp.stack(checks).all()


def total(tree, axes: Axes) -> Any:
    """The sum over the devices."""
    return jax.lax.psum(tree, axes) if axes else tree


def mean(tree, axes: Axes) -> Any:
    """The mean over the devices, in the dtypes of the leaves."""
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
