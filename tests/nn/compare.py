"""Plain against substituted: trees, values, gradients, bytes kept."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import DenyList

from jaxmem import _compat
from tests.arrays import array


def initialized(model, *args, seed=0):
    """A linen model's variables; in one program, not one for each operation."""
    return jax.jit(lambda key: model.init(key, *args))(jax.random.key(seed))


def drawn(model, *args, seed=0):
    """Variables for a linen model, by NumPy: to compile its own takes long."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return array(np.zeros(x.shape), x.dtype)
        value = rng.standard_normal(x.shape) / max(1, np.prod(x.shape[:-1])) ** 0.5
        near_one = path[-1].key in ("scale", "var")  # statistics are no sums of squares
        return array(1 + np.tanh(value) / 2 if near_one else value, x.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), *args)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def assert_trees_identical(a, b):
    """Same structure, and the same bits in every leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, _numbers(a), _numbers(b))


def assert_close(a, b, roundings=64):
    """Equal up to `roundings` float32 roundings of the largest element of the tree.

    A layer rounds a few times in either version, and the error passes through the
    later layers of these models (three at most), amplified by less than ten. The
    small leaves of a gradient come from the same sums as the large ones.
    """
    assert jax.tree.structure(a) == jax.tree.structure(b)
    a, b = _numbers(a), _numbers(b)
    largest = max((np.abs(x).max(initial=0.0) for x in jax.tree.leaves(a)), default=0)
    allowed = roundings * np.finfo("f4").eps * largest
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(y, x, atol=allowed, rtol=0.0), a, b
    )


def _numbers(tree):
    """Numpy arrays; keys as plain numbers."""

    def raw(x):
        typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if typed else x)

    return jax.tree.map(raw, tree)


def kept_bytes(fn, *args) -> int:
    """Bytes the backward pass of `fn` keeps beyond its arguments."""
    own = ("from the argument", "from a constant")
    return sum(
        aval.size * aval.dtype.itemsize
        for aval, source in _compat.saved_residuals(fn, *args)
        if not source.startswith(own)
    )


def kernel_step(layer, variables, x, loss):
    """(the kernel's gradient, the variables after it), by an ordinary jitted step."""

    @jax.jit
    def step(variables, x):
        def of(params):
            given = {**variables, "params": params}
            y, state = layer.apply(given, x, mutable=DenyList("params"))
            return loss(y), state

        gradient, state = jax.grad(of, has_aux=True)(variables["params"])
        return gradient["kernel"], {**variables, **state}

    return step(variables, x)
