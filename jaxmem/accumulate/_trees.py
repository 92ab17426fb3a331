"""Leaf by leaf: choose between two trees, dtypes to add up in."""

import jax
import jax.numpy as jnp


def choose(keep, new, old):
    """`new` where the scalar `keep` is true, else `old`; None is always true."""
    if keep is None:
        return new
    return jax.tree.map(lambda a, b: b if a is b else _select(keep, a, b), new, old)


def _select(keep, new, old):
    # a scalar predicate as it is: nothing the size of the leaf is made of it
    return jax.lax.select(keep, jnp.asarray(new), jnp.asarray(old))


def wide(dtype):
    """The dtype to add up in: float32, or the dtype itself where it is wider."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return dtype if inexact and jnp.finfo(dtype).bits >= 32 else jnp.float32


def all_finite(tree):
    """A scalar: no leaf holds an infinity or a NaN."""
    checks = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return jnp.stack(checks).all()


def tree_bytes(tree) -> int:
    """Of the arrays in it; a Python number, as TrainState.step may be, is none."""
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return sum(x.size * x.dtype.itemsize for x in arrays)
